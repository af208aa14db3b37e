"""Recipes of evaluations: documents of two corpora, the lab teacher with YaRN, and the table, each run on a toy model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from msattn.trainer.commands.compose import compose
from msattn.trainer.config import DataConfig
from msattn.trainer.models.families import max_length
from msattn.trainer.models.loading import config_and_tokenizer
from tests.evaluate.runs import read_rows
from tests.running import SHAPE, WORDS, succeed, write_texts

SENTENCE = "The heron left the mill before anyone had thought of the river again. "
LENGTHS = [8192, 16384, 32768, 65536, 131072]
TOY = ["model.init=random", *SHAPE, "device=cpu", "dtype=float32", "tracker=none"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_texts(1000)
    Path("heldout.txt").write_text(WORDS)
    return tmp_path / "outputs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "read"),
    [
        ("documents_pg19", ("emozilla/pg19", "test")),
        ("documents_proofpile", ("emozilla/proofpile-test-tokenized-mistral", "train")),
    ],
)
def test_documents_are_read_from_their_beginning(
    recipe: str, read: tuple[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = compose("eval", [f"experiment={recipe}"])
    assert (cfg.eval.tasks, cfg.eval.documents.lengths) == (["documents"], LENGTHS)
    config, _ = config_and_tokenizer(compose("eval", [f"experiment={recipe}", "model.init=random"]).model)
    assert max_length(config) == max(LENGTHS)
    opened = set()

    def rows_of(data: DataConfig, split: str) -> Iterator[dict[str, str]]:
        opened.add((data.path, split))
        yield from ({"text": f"Document {number}. {SENTENCE * (4 + 2 * number)}"} for number in range(10))

    monkeypatch.setattr("msattn.trainer.data.sources.hub_rows", rows_of)
    sizes = [f"eval.documents.{key}" for key in ("lengths=[64,128]", "num_documents=3", "sparsities=[0.9]")]
    succeed("eval", f"experiment={recipe}", *TOY, *sizes, "model.architecture.vocab_size=4096", "eval.baselines=[quest]")
    assert opened == {read}
    found = read_rows(folder / "llama3/seer/eval", "length")
    for length in (64, 128):
        assert found["dense", "", length]["samples"] == 3
        assert ("quest", "sparsity 0.9", length) in found


def test_the_teacher_has_twice_its_positions_with_yarn() -> None:
    cfg, trained = compose("eval", ["experiment=teacher_yarn"]), compose("eval", ["model=teacher"])
    assert (cfg.model.path, cfg.folder.name, cfg.data.seq_len) == (trained.model.path, "yarn", 65536)
    assert cfg.eval.perplexity.length == 65536
    assert cfg.eval.needle.lengths == cfg.eval.ruler.lengths == [65536]
    config, _ = config_and_tokenizer(compose("eval", ["experiment=teacher_yarn", "model.init=random"]).model)
    assert max_length(config) == 65536
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.rope_parameters["rope_theta"] == 1e6, "that of the model"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "lengths"),
    [
        (["model=llama3"], [4096, 16384, 65536]),
        (["model=teacher"], [4096, 16384, 32768]),
        (["model=teacher", "data.seq_len=16384"], [4096, 16384]),
        (["model=tiny", "data.seq_len=1024"], [1024]),
    ],
)
def test_the_table_has_the_lengths_of_rulers_that_a_model_reads(overrides: list[str], lengths: list[int]) -> None:
    cfg = compose("eval", ["eval=table", *overrides])
    assert cfg.eval.ruler.lengths == lengths
    assert cfg.eval.key_shares == [0.02, 0.05, 0.1]
