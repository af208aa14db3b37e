"""Experiments: names of sweeps, groups of a tracker, recipes of evaluations."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msattn.trainer.commands.compose import compose, with_search_path
from msattn.trainer.commands.jobs import Command
from msattn.trainer.config import DataConfig
from msattn.trainer.models.families import max_length
from msattn.trainer.models.loading import config_and_tokenizer
from tests.evaluate.runs import read_rows
from tests.house.modules import EXPERIMENTS
from tests.running import SHAPE, WORDS, exit_code, succeed, write_texts

PAPERS = "--config-dir", str(EXPERIMENTS)


@pytest.mark.slow
def test_interpolated_names_are_kept_in_a_sweep(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(
        Command, "run", lambda self, cfg, arguments: seen.append((cfg.name, cfg.kmeans.balance))
    )
    swept = "kmeans.rope=true", "kmeans.balance=1.5,3.0"
    assert exit_code("fit-kmeans", "-m", *PAPERS, "experiment=partitions", *swept) == 0
    expected = [("rope-True_balance-1.5", 1.5), ("rope-True_balance-3.0", 3.0)]
    assert seen == expected, "the command line replaces the values that the YAML sweeps over"
    seen.clear()
    assert (
        exit_code(
            "fit-kmeans",
            "-m",
            *PAPERS,
            "experiment=partitions",
            "name=mine",
            "kmeans.rope=true",
            "kmeans.balance=3.0",
        )
        == 0
    )
    assert exit_code("fit-kmeans", "-m", "experiment=demo", "kmeans.balance=1.5,3.0") == 0
    assert [name for name, _ in seen] == ["mine", "0", "1"], (
        "the fixed name of a YAML is replaced by job numbers"
    )


@pytest.mark.slow
def test_a_tracker_groups_an_experiment_or_a_sweep(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(Command, "run", lambda self, cfg, arguments: seen.append(cfg.tracker.group))

    def groups(*arguments: str) -> list[Any]:
        seen.clear()
        assert exit_code("fit-kmeans", *PAPERS, *arguments) == 0
        return list(seen)

    assert groups("data=stdlib", "experiment=partitions", "tracker=none") == [None]
    assert groups("data=stdlib", "experiment=partitions") == ["partitions"]
    assert groups("data=stdlib", "experiment=partitions", "tracker.group=mine") == ["mine"]
    first, second = groups("-m", "seed=1,2")
    assert first == second
    assert re.fullmatch(r"fit-kmeans-\d{8}-\d{6}", first)
    assert groups("-m", "seed=1", "tracker.group=${name}") == ["0"]


def test_no_job_of_a_sweep_runs_when_a_later_one_is_wrong(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Command, "run", lambda self, cfg, arguments: pytest.fail("a job ran"))
    assert exit_code("train-gate", "-m", "gate.block_size=64,48") == 2
    assert (
        capsys.readouterr().err
        == "msattn: job 1: gate.block_size=48: expected a power of two in [16, 128]\n"
    )
    assert not list(here.iterdir()), "a mistake must leave no files"


LENGTHS = [8192, 16384, 32768, 65536, 131072]


@pytest.mark.parametrize(
    ("recipe", "path", "split"),
    [
        ("documents_pg19", "emozilla/pg19", "test"),
        ("documents_proofpile", "emozilla/proofpile-test-tokenized-mistral", "train"),
    ],
)
def test_documents_of_a_corpus(recipe: str, path: str, split: str) -> None:
    cfg = compose(
        "eval", with_search_path([f"experiment={recipe}", "model.init=random"], EXPERIMENTS)
    )
    assert (cfg.data.source, cfg.data.path, cfg.data.heldout_split) == ("hub", path, split)
    assert (cfg.eval.tasks, cfg.eval.documents.lengths) == (["documents"], LENGTHS)
    config, _ = config_and_tokenizer(cfg.model)
    assert max_length(config) == max(LENGTHS)
    assert (cfg.select.policy, cfg.select.scores, cfg.select.last_block) == (
        "topk",
        "gate",
        "pooled",
    ), "as in the paper"


@pytest.mark.slow
def test_documents_of_a_corpus_are_read_from_their_beginning(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts()
    Path("heldout.txt").write_text(WORDS)
    opened = set()

    def rows_of(data: DataConfig, split: str) -> Iterator[dict[str, str]]:
        opened.add((data.path, split))
        yield from (
            {"text": f"Document {number}. {'The heron left the mill. ' * (12 + 6 * number)}"}
            for number in range(10)
        )

    monkeypatch.setattr("msattn.trainer.data.sources.hub_rows", rows_of)
    sizes = [
        f"eval.documents.{key}"
        for key in ("lengths=[64,128]", "num_documents=3", "sparsities=[0.9]")
    ]
    toy = [
        "model.init=random",
        *SHAPE,
        "model.architecture.vocab_size=4096",
        "device=cpu",
        "dtype=float32",
        "tracker=none",
    ]
    succeed("eval", *PAPERS, "experiment=documents_pg19", *toy, *sizes, "eval.baselines=[quest]")
    assert opened == {("emozilla/pg19", "test")}
    found = read_rows(here / "outputs/llama3/seer/eval", "length")
    for length in (64, 128):
        assert found["dense", "", length]["samples"] == 3
        assert ("quest", "sparsity 0.9", length) in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "lengths"),
    [
        (["model=llama3"], [4096, 16384, 65536]),
        (["model=llama3", "data.seq_len=16384"], [4096, 16384]),
        (["model=tiny", "data.seq_len=1024"], [1024]),
    ],
)
def test_the_table_has_the_lengths_of_rulers_that_a_model_reads(
    overrides: list[str], lengths: list[int]
) -> None:
    cfg = compose("eval", ["eval=table", *overrides])
    assert cfg.eval.ruler.lengths == lengths
    assert cfg.eval.key_shares == [0.02, 0.05, 0.1]
