"""The lab model's experiments: what their YAML says composes, in the order it says, and a toy of the whole line runs."""

import json
import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from msattn import cli
from msattn.trainer.commands import compose
from msattn.trainer.config import EvalRunConfig, FinetuneConfig, FitKMeansConfig, RunConfig, TrainGateConfig, TrainQModelConfig

EXPERIMENTS = Path(__file__).parents[2] / "conf" / "experiment"
LINE = [command.split() for command in re.findall(r"msattn ([a-z].*?)(?=\s{3,}|\n)", (EXPERIMENTS / "lab.yaml").read_text())]
SWEPT = {
    ("finetune", "lab_yarn_gates"): [f"yarn-{sparsity}" for sparsity in (0.5, 0.6, 0.7, 0.8, 0.9)],
    ("eval", "lab_32k"): ["yarn", *(f"yarn-{sparsity}" for sparsity in (0.5, 0.6, 0.7, 0.8, 0.9))],
    ("train-gate", "lab_rope"): ["rope-True", "rope-False"],
    ("eval", "lab_rope_lengths"): [f"rope-{rope}-{length}" for rope in (True, False) for length in (8192, 16384, 32768)],
    ("train-gate", "lab_losses"): ["loss-mse", "loss-kl", "loss-smooth_l1"],
    ("train-qmodel", "lab_buckets"): ["buckets-64", "buckets-256", "buckets-1024"],
    ("train-qmodel", "lab_classifiers"): [
        f"range-{distance}_residual-{residual}" for distance in (512, 0) for residual in (False, True)
    ],
}
TOY = {  # overrides by command; "" is for all
    "": [
        "device=cpu",
        "tracker=none",
        "data=text",
        "data.path=text.txt",
        "data.heldout_path=text.txt",
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
    "eval": ["eval.needle.depths=[0.5]", "eval.recall.num_queries=4"],
}
SHORTER = {  # what each experiment sweeps over or reads, at a toy's length
    "lab_short": ["data.seq_len=64", "tasks=0", "train.compile=false"],
    "lab_scratch": ["data.seq_len=128", "tasks=0", "train.compile=false"],
    "lab_yarn": ["data.seq_len=512"],
    "lab_stretched": ["model.presets.seq_len=512"],
    "lab_yarn_gates": ["data.seq_len=512", "select.sparsity=0.5"],
    "lab_32k": ["model.presets.seq_len=512"],
    "lab_rope": ["model.presets.seq_len=128", "model.presets.gate_rope=false"],
    "lab_rope_lengths": ["model.presets.seq_len=512", "model.presets.gate_rope=false"],
    "lab_pooling": ["model.presets.seq_len=128", "model.presets.gate_q_pool=[avg,max,min]", "model.presets.gate_k_pool=[max]"],
    "lab_losses": ["model.presets.seq_len=128", "model.presets.gate_loss=kl"],
    "lab_buckets": ["model.presets.seq_len=128", "model.presets.long_range=16", "model.presets.num_buckets=4"],
    "lab_classifiers": [
        "model.presets.seq_len=128",
        "model.presets.long_range=16",
        "model.presets.qmodel_residual=true",
        "artifacts.kmeans=outputs/lab/buckets-4/kmeans",
    ],
}


def msattn(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    return int(caught.value.code or 0)


def experiment_of(arguments: list[str]) -> str:
    (found,) = (argument.partition("=")[2] for argument in arguments if argument.startswith("experiment="))
    return found


def written(cfg: RunConfig) -> set[str]:
    """The artifacts that a job leaves."""
    kinds = {FinetuneConfig: ["model"], TrainGateConfig: ["gate"], FitKMeansConfig: ["kmeans"], TrainQModelConfig: ["qmodel"]}
    found = kinds.get(type(cfg), [])
    if isinstance(cfg, FinetuneConfig) and cfg.sparse:
        found = [*found, "gate"]
    return {str(cfg.folder / kind) for kind in found}


def read(cfg: RunConfig) -> set[str]:
    """What a job names; artifacts of its own name it finds by itself."""
    paths = {cfg.model.path} if cfg.model.init == "pretrained" else set()
    if isinstance(cfg, FinetuneConfig):
        return paths | ({str(cfg.artifacts.gate)} if cfg.sparse else set())
    if isinstance(cfg, TrainQModelConfig | EvalRunConfig):
        return paths | {path for path in (cfg.artifacts.gate, cfg.artifacts.kmeans, cfg.artifacts.qmodel) if path is not None}
    return paths


def test_every_experiment_stands_in_the_line() -> None:
    files = {path.stem for path in EXPERIMENTS.glob("lab_*.yaml")}
    assert {experiment_of(arguments) for arguments in LINE} == files == SHORTER.keys()


def test_the_line_composes_and_each_job_finds_what_it_reads() -> None:
    """Every command of lab.yaml, with every point that it sweeps over."""
    there: set[str] = set()
    for command, *arguments in LINE:
        experiment, overrides = experiment_of(arguments), [argument for argument in arguments if argument != "-m"]
        jobs = compose.compose_sweep(command, overrides) if "-m" in arguments else [compose.compose(command, overrides)]
        for cfg in jobs:
            assert read(cfg) <= there, f"{command} {experiment}: nothing has made {read(cfg) - there}"
            assert not written(cfg) & there, "two jobs of one name"
            there |= written(cfg)
        names = [cfg.name for cfg in jobs]
        assert names == SWEPT.get((command, experiment), names)
        if experiment == "lab_pooling":
            assert len(set(names)) == 8
            assert {"pool-avg_max-min", "pool-avg-max-min_avg-max-min"} < set(names)
        if experiment == "lab_buckets" and command == "train-qmodel":
            assert {str(cfg.folder / "kmeans") for cfg in jobs} <= there
        if experiment == "lab_rope_lengths":
            assert {cfg.eval.perplexity.length for cfg in jobs} == {8192, 16384, 32768}


def test_names_that_follow_the_sweep_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compose.Command, "run", lambda self, cfg, arguments: seen.append((cfg.name, cfg.gate.loss)))
    assert msattn("train-gate", "-m", "experiment=lab_losses", "model.presets.gate_loss=kl,mse") == 0
    assert seen == [("loss-kl", "kl"), ("loss-mse", "mse")], "the command line replaces what the YAML sweeps over"
    seen.clear()
    assert msattn("train-gate", "-m", "experiment=lab_losses", "name=mine", "model.presets.gate_loss=kl") == 0
    assert msattn("train-gate", "-m", "experiment=demo", "gate.loss=kl,mse") == 0
    assert [name for name, _ in seen] == ["mine", "0", "1"], "a YAML's one name is no name for several jobs"


def test_no_job_of_a_sweep_runs_when_a_later_one_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compose.Command, "run", lambda self, cfg, arguments: pytest.fail("it ran"))
    assert msattn("train-gate", "-m", "experiment=lab_losses", "gate.block_size=64,48") == 2
    assert capsys.readouterr().err == "msattn: job 1: gate.block_size=48: a power of two from 16 to 128\n"
    assert not list(tmp_path.iterdir()), "a mistake leaves nothing behind"


@pytest.mark.slow
def test_a_toy_of_the_whole_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("\n".join(f"def function_{i}(x):\n    return x + {i}" for i in range(3000)))
    for arguments in LINE:
        command, name = arguments[0], experiment_of(arguments)
        swept = ["name=yarn,yarn-0.5"] if (command, name) == ("eval", "lab_32k") else []
        assert msattn(*arguments, *TOY[""], *TOY.get(command, []), *SHORTER[name], *swept) == 0, arguments
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
    assert own >= shared - 1e-6, "the best bucket of each query head holds no less than the group's"
