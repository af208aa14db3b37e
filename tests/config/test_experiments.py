"""The lab model's experiments: all commands in lab.yaml compose, find what they read, and run in order on a toy model."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra._internal.hydra import Hydra
from omegaconf import OmegaConf

from msattn.trainer.commands import compose
from msattn.trainer.commands.jobs import Command
from msattn.trainer.config import EvalRunConfig, FinetuneConfig, FitKMeansConfig, RunConfig, TrainGateConfig, TrainQModelConfig
from tests.running import TEXTS, exit_code, write_texts

EXPERIMENTS = Path(__file__).parents[2] / "conf" / "experiment"
LINE = [command.split() for command in re.findall(r"msattn ([a-z].*?)(?=\s{3,}|\n)", (EXPERIMENTS / "lab.yaml").read_text())]
YARN = [f"yarn-{sparsity}" for sparsity in (0.5, 0.6, 0.7, 0.8, 0.9)]
LOSSES = ["loss-mse", "loss-kl", "loss-smooth_l1"]
BUCKETS = ["buckets-64", "buckets-256", "buckets-1024"]
CLASSIFIERS = [f"range-{distance}_residual-{residual}" for distance in (512, 0) for residual in (False, True)]
POOLINGS = [f"pool-{q}_{k}" for q in ("avg", "avg-max-min") for k in ("avg", "max", "max-min", "avg-max-min")]
JOB_NAMES = {  # of each sweep, by command and experiment; sweeps of experiment=lab are over the names themselves
    ("finetune", "lab_yarn_gates"): YARN,
    ("eval", "lab_32k"): ["yarn", *YARN],
    ("train-gate", "lab_rope"): ["rope-True", "rope-False"],
    ("eval", "lab_rope_lengths"): [f"rope-{rope}-{length}" for rope in (True, False) for length in (8192, 16384, 32768)],
    ("train-gate", "lab_pooling"): POOLINGS,
    ("eval", "lab_pooling_eval"): POOLINGS,
    ("train-gate", "lab_losses"): LOSSES,
    ("fit-kmeans", "lab_buckets"): BUCKETS,
    ("train-qmodel", "lab_classifiers"): CLASSIFIERS,
    ("eval", "lab_classifiers_eval"): CLASSIFIERS,
}
TOY = {  # overrides by command; "" is for all
    "": [
        "device=cpu",
        "tracker=none",
        *TEXTS,
        "data.needles=false",
        "model.architecture.hidden_size=32",
        "model.architecture.intermediate_size=32",
        "model.architecture.num_hidden_layers=2",
        "model.architecture.num_attention_heads=4",
        "model.architecture.head_dim=8",
        "model.architecture.max_position_embeddings=128",
        "model.presets.gate_steps=2",
        "model.presets.gate_batch=1",
        "model.presets.qmodel_steps=2",
        "model.presets.qmodel_hidden=8",
        "model.presets.kmeans_prompts=2",
        "model.presets.qmodel_prompts=2",
        "model.presets.recent=16",
        "model.presets.eval_chunks=1",
        "model.presets.eval_probes=[1,2]",
        "model.presets.needle_samples=1",
    ],
    "finetune": [
        f"train.{key}" for key in ("steps=2", "batch_size=2", "micro_batch_size=1", "warmup_steps=1", "num_workers=0")
    ],
    "eval": [
        "eval.perplexity.sparsities=[0.5,0.9]",
        "eval.recall.sparsities=[0.5]",
        "eval.recall.num_queries=4",
        "eval.recall.num_chunks=1",
        "eval.needle.sparsities=[0.8]",
        "eval.needle.depths=[0.5]",
    ],
}
SHORTER = {  # one point of each sweep, at the length of a toy; experiment=lab is keyed by the first of its names
    "lab_short": ["data.seq_len=64", "tasks=0", "train.compile=false"],
    "lab_scratch": ["data.seq_len=128", "tasks=0", "train.compile=false"],
    "lab_yarn": ["data.seq_len=512"],
    "lab_stretched": ["data.seq_len=512"],
    "lab_yarn_gates": ["data.seq_len=512", "select.sparsity=0.5"],
    "lab_32k": ["data.seq_len=512"],
    "lab_rope": ["data.seq_len=128", "gate.rope=false"],
    "lab_rope_lengths": ["data.seq_len=512", "artifacts.gate=outputs/lab/rope-False/gate"],
    "lab_pooling": ["data.seq_len=128", "gate.q_pool=[avg,max,min]", "gate.k_pool=[max]"],
    "lab_pooling_eval": ["data.seq_len=128", "name=pool-avg-max-min_max"],
    "lab_losses": ["data.seq_len=128", "gate.loss=kl"],
    "loss-mse": ["data.seq_len=128", "name=loss-kl"],
    "lab_buckets": ["data.seq_len=128", "kmeans.num_buckets=4"],
    "buckets-64": ["data.seq_len=128", "model.presets.long_range=16", "name=buckets-4"],
    "lab_classifiers": [
        "data.seq_len=128",
        "qmodel.long_range=16",
        "qmodel.residual=true",
        "artifacts.kmeans=outputs/lab/buckets-4/kmeans",
    ],
    "lab_classifiers_eval": [
        "data.seq_len=128",
        "name=range-16_residual-True",
        "artifacts.kmeans=outputs/lab/buckets-4/kmeans",
    ],
}


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
    assert {experiment_of(arguments) for arguments in LINE} == SHORTER.keys()
    assert {name for name in SHORTER if name.startswith("lab_")} == files


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects the configurations that the command line checks before it runs a job; no job runs."""
    collected: list[Any] = []
    typed = compose._typed

    def collect(composed: Any, command: str) -> Any:
        collected.append(typed(composed, command))
        return collected[-1]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compose, "_typed", collect)
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
        names = [cfg.name for cfg in checked]
        assert names == JOB_NAMES.get((command, experiment), names)
        if experiment == "lab_rope_lengths":
            assert {cfg.eval.perplexity.length for cfg in checked} == {8192, 16384, 32768}


@pytest.mark.slow
def test_interpolated_names_are_kept_in_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Command, "run", lambda self, cfg, arguments: seen.append((cfg.name, cfg.gate.loss)))
    assert exit_code("train-gate", "-m", "experiment=lab_losses", "gate.loss=kl,mse") == 0
    assert seen == [("loss-kl", "kl"), ("loss-mse", "mse")], "the command line replaces the values that the YAML sweeps over"
    seen.clear()
    assert exit_code("train-gate", "-m", "experiment=lab_losses", "name=mine", "gate.loss=kl") == 0
    assert exit_code("train-gate", "-m", "experiment=demo", "gate.loss=kl,mse") == 0
    assert [name for name, _ in seen] == ["mine", "0", "1"], "the fixed name of a YAML is replaced by job numbers"


@pytest.mark.slow
def test_a_tracker_groups_an_experiment_or_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.chdir(tmp_path)
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Command, "run", lambda self, cfg, arguments: pytest.fail("a job ran"))
    assert exit_code("train-gate", "-m", "experiment=lab_losses", "gate.block_size=64,48") == 2
    assert capsys.readouterr().err == "msattn: job 1: gate.block_size=48: a power of two from 16 to 128\n"
    assert not list(tmp_path.iterdir()), "a mistake must leave no files"


@pytest.mark.slow
@pytest.mark.usefixtures("quick_start")
def test_all_commands_of_lab_yaml_run_on_a_toy_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(1000)
    for arguments in LINE:
        command, name = arguments[0], experiment_of(arguments)
        swept = ["name=yarn,yarn-0.5"] if (command, name) == ("eval", "lab_32k") else []
        assert exit_code(*arguments, *TOY[""], *TOY.get(command, []), *SHORTER[name], *swept) == 0, arguments
    lab = Path("outputs/lab")

    def rows(name: str) -> dict[tuple[str, str, str], dict]:
        found = json.loads((lab / name / "eval/results.json").read_text())["rows"]
        return {(row["task"], row["method"], row["setting"]): row for row in found}

    steps = [json.loads(line) for line in (lab / "yarn-0.5/runs/finetune/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "lr" in line] == [1, 2]
    for name in ("yarn", "yarn-0.5", "rope-False-512"):
        measured = rows(name)
        assert {("perplexity", "dense", ""), ("perplexity", "gate", "sparsity 0.9")} <= measured.keys()
        assert measured["perplexity", "dense", ""]["extra"]["length"] == 512
    assert torch.isfinite(torch.tensor([row["score"] for row in rows("pool-avg-max-min_max").values()])).all()
    routed = rows("range-16_residual-True")
    assert {("recall", "classifier, independent", "2 probes"), ("needle", "classifier", "2 probes")} <= routed.keys()
    assert OmegaConf.load(lab / "range-16_residual-True/qmodel/config.yaml").qmodel.residual is True
    own, shared = (routed["recall", f"oracle routing{kind}", "1 probe"]["score"] for kind in (", independent", ""))
    assert own >= shared - 1e-6, "the best bucket of each query head holds at least the mass of the group's best"
