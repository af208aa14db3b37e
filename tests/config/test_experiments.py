"""Experiments: all commands in lab.yaml compose and find what earlier ones write; names of sweeps; recipes of evaluations."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra._internal.hydra import Hydra

from msattn.trainer.commands import launch
from msattn.trainer.commands.compose import compose
from msattn.trainer.commands.jobs import Command
from msattn.trainer.config import (
    DataConfig,
    EvalRunConfig,
    FinetuneConfig,
    FitKMeansConfig,
    RunConfig,
    TrainGateConfig,
    TrainQModelConfig,
)
from msattn.trainer.models.families import max_length
from msattn.trainer.models.loading import config_and_tokenizer
from tests.evaluate.runs import read_rows
from tests.running import SHAPE, WORDS, exit_code, succeed, write_texts

EXPERIMENTS = Path(__file__).parents[2] / "conf" / "experiment"
LINE = [command.split() for command in re.findall(r"msattn ([a-z].*?)(?=\s{3,}|\n)", (EXPERIMENTS / "lab.yaml").read_text())]


def experiment_of(arguments: list[str]) -> str:
    """The experiment of a command; of ``experiment=lab``, which is for all commands, the first of the names it is given."""
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    return given["name"].split(",")[0] if given["experiment"] == "lab" else given["experiment"]


def written(cfg: RunConfig) -> set[str]:
    """The artifacts that a job writes."""
    kinds: dict[type, list[str]] = {
        FinetuneConfig: ["model"],
        TrainGateConfig: ["gate"],
        FitKMeansConfig: ["kmeans"],
        TrainQModelConfig: ["qmodel"],
    }
    found = kinds.get(type(cfg), [])
    if isinstance(cfg, FinetuneConfig) and cfg.sparse:
        found = [*found, "gate"]
    return {str(cfg.folder / kind) for kind in found}


def read(cfg: RunConfig) -> set[str]:
    """The artifacts that the configuration of a job gives; a job finds those of its own name by itself."""
    paths = {cfg.model.path} if cfg.model.init == "pretrained" else set()
    if isinstance(cfg, FinetuneConfig):
        return paths | ({str(cfg.artifacts.gate)} if cfg.sparse else set())
    if isinstance(cfg, TrainQModelConfig | EvalRunConfig):
        return paths | {path for path in (cfg.artifacts.gate, cfg.artifacts.kmeans, cfg.artifacts.qmodel) if path is not None}
    return paths


def test_lab_yaml_lists_every_experiment() -> None:
    files = {path.stem for path in EXPERIMENTS.glob("lab_*.yaml")}
    assert files <= {experiment_of(arguments) for arguments in LINE}


@pytest.fixture
def checked(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects the configurations that the command line checks before it runs a job; no job runs."""
    collected: list[Any] = []
    typed = launch.typed_config

    def collect(composed: Any, command: str) -> Any:
        collected.append(typed(composed, command))
        return collected[-1]

    monkeypatch.setattr(launch, "typed_config", collect)
    monkeypatch.setattr(Hydra, "run", lambda *_, **__: SimpleNamespace(return_value=None))
    monkeypatch.setattr(Hydra, "multirun", lambda *_, **__: [])
    return collected


@pytest.mark.slow
def test_all_commands_of_lab_yaml_find_what_they_read(checked: list[Any]) -> None:
    """Every command with every point that it sweeps over."""
    there: set[str] = set()
    for arguments in LINE:
        command, experiment = arguments[0], experiment_of(arguments)
        checked.clear()
        assert exit_code(*arguments) == 0
        for cfg in checked:
            assert read(cfg) <= there, f"{command} {experiment}: nothing has made {read(cfg) - there}"
            assert not written(cfg) & there, "two jobs write the same artifact"
            there |= written(cfg)
            if command == "eval":
                assert any(path.startswith(f"{cfg.folder}/") for path in there) or experiment == "lab_rope_lengths"
            if command == "train-qmodel":
                assert cfg.artifacts.kmeans or str(cfg.folder / "kmeans") in there
        assert len({(cfg.name, cfg.eval.perplexity.length if command == "eval" else 0) for cfg in checked}) == len(checked)
        if experiment == "lab_rope_lengths":
            assert {cfg.eval.perplexity.length for cfg in checked} == {8192, 16384, 32768}


@pytest.mark.slow
def test_interpolated_names_are_kept_in_a_sweep(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(Command, "run", lambda self, cfg, arguments: seen.append((cfg.name, cfg.gate.loss)))
    assert exit_code("train-gate", "-m", "experiment=lab_losses", "gate.loss=kl,mse") == 0
    assert seen == [("loss-kl", "kl"), ("loss-mse", "mse")], "the command line replaces the values that the YAML sweeps over"
    seen.clear()
    assert exit_code("train-gate", "-m", "experiment=lab_losses", "name=mine", "gate.loss=kl") == 0
    assert exit_code("train-gate", "-m", "experiment=demo", "gate.loss=kl,mse") == 0
    assert [name for name, _ in seen] == ["mine", "0", "1"], "the fixed name of a YAML is replaced by job numbers"


@pytest.mark.slow
def test_a_tracker_groups_an_experiment_or_a_sweep(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(Command, "run", lambda self, cfg, arguments: seen.append(cfg.tracker.group))

    def groups(*arguments: str) -> list[Any]:
        seen.clear()
        assert exit_code("fit-kmeans", *arguments) == 0
        return list(seen)

    assert groups("data=stdlib", "experiment=teacher_seeds", "tracker=none") == [None]
    assert groups("data=stdlib", "experiment=teacher_seeds") == ["teacher_seeds"]
    assert groups("data=stdlib", "experiment=teacher_seeds", "tracker.group=mine") == ["mine"]
    first, second = groups("-m", "seed=1,2")
    assert first == second
    assert re.fullmatch(r"fit-kmeans-\d{8}-\d{6}", first)
    assert groups("-m", "seed=1", "tracker.group=${name}") == ["0"]


def test_no_job_of_a_sweep_runs_when_a_later_one_is_wrong(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Command, "run", lambda self, cfg, arguments: pytest.fail("a job ran"))
    assert exit_code("train-gate", "-m", "experiment=lab_losses", "gate.block_size=64,48") == 2
    assert capsys.readouterr().err == "msattn: job 1: gate.block_size=48: expected a power of two in [16, 128]\n"
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
    cfg = compose("eval", [f"experiment={recipe}", "model.init=random"])
    assert (cfg.data.source, cfg.data.path, cfg.data.heldout_split) == ("hub", path, split)
    assert (cfg.eval.tasks, cfg.eval.documents.lengths) == (["documents"], LENGTHS)
    config, _ = config_and_tokenizer(cfg.model)
    assert max_length(config) == max(LENGTHS)


@pytest.mark.slow
def test_documents_of_a_corpus_are_read_from_their_beginning(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts()
    Path("heldout.txt").write_text(WORDS)
    opened = set()

    def rows_of(data: DataConfig, split: str) -> Iterator[dict[str, str]]:
        opened.add((data.path, split))
        yield from ({"text": f"Document {number}. {'The heron left the mill. ' * (12 + 6 * number)}"} for number in range(10))

    monkeypatch.setattr("msattn.trainer.data.sources.hub_rows", rows_of)
    sizes = [f"eval.documents.{key}" for key in ("lengths=[64,128]", "num_documents=3", "sparsities=[0.9]")]
    toy = ["model.init=random", *SHAPE, "model.architecture.vocab_size=4096", "device=cpu", "dtype=float32", "tracker=none"]
    succeed("eval", "experiment=documents_pg19", *toy, *sizes, "eval.baselines=[quest]")
    assert opened == {("emozilla/pg19", "test")}
    found = read_rows(here / "outputs/llama3/seer/eval", "length")
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
