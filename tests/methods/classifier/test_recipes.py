"""The paper's recipes for Llama-3.1-8B: their settings, and runs of them on a random toy of the same architecture."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from msattn.trainer import artifacts
from msattn.trainer.commands.compose import compose
from msattn.trainer.commands.jobs import Command
from tests.running import SHAPE, TEXTS, WORDS, succeed, write_texts

RECIPES = {"saap_llama31": 131_072, "saap_llama31_500k": 500_000}
TOY = [
    "model.init=random",
    "model.architecture.vocab_size=4096",
    *SHAPE,
    "model.presets.num_buckets=4",
    "model.presets.points_per_bucket=30",
    "model.presets.kmeans_prompts=3",
    "model.presets.qmodel_prompts=3",
    "model.presets.qmodel_steps=3",
    "model.presets.qmodel_hidden=8",
    "model.presets.long_range=16",
    *TEXTS,
    "data.heldout_split=null",
    "data.seq_len=128",
    "device=cpu",
    "dtype=float32",
    "tracker=none",
]


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enters ``folder`` and writes texts for training and evaluation."""
    monkeypatch.chdir(folder)
    write_texts(300)


@pytest.mark.parametrize(("recipe", "length"), RECIPES.items())
def test_a_recipe_has_the_settings_of_the_paper(recipe: str, length: int) -> None:
    partition, classifier = (compose(command, [f"experiment={recipe}"]) for command in ("fit-kmeans", "train-qmodel"))
    assert partition.folder == classifier.folder, "train-qmodel must find the k-means"
    for cfg in (partition, classifier):
        assert (cfg.model.path, cfg.data.seq_len, cfg.data.num_chunks) == ("meta-llama/Llama-3.1-8B", length, 40)
    kmeans, qmodel, train = partition.kmeans, classifier.qmodel, classifier.train
    assert (kmeans.num_buckets, kmeans.iterations, kmeans.num_prompts, kmeans.points_per_bucket) == (1024, 10, 40, 256)
    assert (qmodel.source, qmodel.num_prompts, qmodel.batch_queries, qmodel.hidden) == ("online", 40, 1000, 1024)
    assert (qmodel.heads, qmodel.long_range, qmodel.causal, qmodel.min_distance) == ("kv", 1024, False, None)
    assert (train.lr, train.steps, train.schedule, train.batch_size) == (1e-5, 40_000, "constant", 1)
    presets = compose("eval", [f"experiment={recipe}"]).model.presets
    assert (presets.probes, presets.recent) == (32, 2047)


@pytest.mark.slow
def test_windows_are_those_of_the_paper_and_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Command, "run", lambda self, cfg, arguments: seen.append(cfg))
    succeed("eval", "-m", "experiment=saap_windows")
    windows = [(cfg.sink, cfg.recent) for cfg in seen]
    assert {(1, 2047), (128, 512)} <= set(windows)
    assert [cfg.name for cfg in seen] == [f"window-{sink}-{recent}" for sink, recent in windows]
    assert len(set(windows)) == 8
    trained = compose("train-qmodel", ["experiment=saap_llama31"])
    assert {cfg.artifacts.qmodel for cfg in seen} == {str(trained.folder / "qmodel")}
    assert {cfg.eval.needle.probes[-1] for cfg in seen} == {128}
    assert all(cfg.eval.tasks == ["needle"] and not cfg.eval.baselines + cfg.eval.routers for cfg in seen)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_start")
def test_windows_are_measured_on_a_toy_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, monkeypatch)
    for command in ("fit-kmeans", "train-qmodel"):
        succeed(command, "experiment=saap_llama31", *TOY)
    sizes = ["data.seq_len=256", "model.presets.eval_probes=[0,2]", "eval.needle.samples=1", "eval.needle.depths=[0.5]"]
    succeed("eval", "-m", "experiment=saap_windows", *TOY, *sizes, "sink=1,16", "recent=32,64")
    with Path("outputs/llama3/sweep.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["method"] == "classifier"]
    read = {line["name"]: float(line["selectivity"]) for line in lines if line["setting"] == "2 probes"}
    assert read.keys() == {"window-1-32", "window-1-64", "window-16-32", "window-16-64"}
    assert read["window-1-32"] < read["window-16-64"]


def test_separate_probes_are_measured_with_the_classifiers_of_the_paper() -> None:
    cfg, trained = compose("eval", ["experiment=saap_independent"]), compose("train-qmodel", ["experiment=saap_llama31"])
    assert cfg.artifacts.qmodel == str(trained.folder / "qmodel")
    assert cfg.folder != trained.folder
    for task in cfg.eval.tasks:
        settings = getattr(cfg.eval, task)
        assert (settings.independent, settings.probes) == (True, cfg.model.presets.eval_probes)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_start")
def test_separate_probes_are_measured_on_a_toy_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, monkeypatch)
    Path("heldout.txt").write_text(WORDS)
    for command in ("fit-kmeans", "train-qmodel"):
        succeed(command, "experiment=saap_llama31", *TOY)
    sizes = ["data.seq_len=512", "model.presets.eval_probes=[2]", "recent=32", "model.presets.eval_keys=[]"]
    recall = ["eval.recall.num_chunks=1", "eval.recall.num_queries=4"]
    answers = ["eval.needle.samples=1", "eval.needle.depths=[0.5]", "eval.ruler.samples=1", "eval.ruler.tasks=[niah_single_1]"]
    succeed("eval", "experiment=saap_independent", *TOY, *sizes, *recall, *answers)
    rows = json.loads(Path("outputs/llama3/saap-independent/eval/results.json").read_text())["rows"]
    read = {(row["task"], row["method"]): row["selectivity"] for row in rows if row["setting"] == "2 probes"}
    for task in ("recall", "needle", "ruler"):
        for method in ("classifier", "k-means"):
            assert 0 < read[task, method] < 1
            assert 0 < read[task, f"{method}, independent"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["saap_llama31", "saap_llama31_500k"])
@pytest.mark.usefixtures("quick_start")
def test_a_recipe_runs_on_a_toy_model(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, monkeypatch)
    for command in ("fit-kmeans", "train-qmodel"):
        succeed(command, f"experiment={recipe}", *TOY)
    (name,) = Path("outputs/llama3").iterdir()
    partition, classifier = (artifacts.read(name / kind).manifest for kind in ("kmeans", "qmodel"))
    assert partition["details"]["stats"][0][0]["points"] == 4 * 30
    assert classifier["details"]["source"] == "online"
    assert classifier["details"]["kmeans_hash"] == partition["content_hash"]


PARTITIONS = [f"rope-{rope}_balance-{balance}" for rope in (False, True) for balance in (None, 1.5)]


@pytest.mark.slow
def test_every_partition_has_a_classifier_and_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Any]] = {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Command, "run", lambda self, cfg, arguments: seen.setdefault(self.config, []).append(cfg))
    succeed("fit-kmeans", "-m", "experiment=partitions")
    succeed("train-qmodel", "-m", "experiment=partitions_classifiers")
    succeed("eval", "-m", "experiment=partitions_eval")
    assert {command: [cfg.name for cfg in cfgs] for command, cfgs in seen.items()} == dict.fromkeys(seen, PARTITIONS)
    assert [(cfg.kmeans.rope, cfg.kmeans.balance) for cfg in seen["fit_kmeans"]] == [
        (rope, balance) for rope in (False, True) for balance in (None, 1.5)
    ]
    assert all(cfg.eval.routers == ["quest"] and cfg.eval.tasks == ["recall", "needle"] for cfg in seen["eval"])


@pytest.mark.slow
@pytest.mark.usefixtures("quick_start")
def test_classifiers_over_keys_after_rope_and_over_balanced_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions, classifiers and their evaluation: each classifier reads as its partition was made. Half of them, for time."""
    prepare(tmp_path, monkeypatch)
    sizes = [*TOY, "data.seq_len=256", "model.presets.recent=32", "data.needles=false"]
    measured = ["eval.needle.samples=1", "eval.needle.depths=[0.5]", "eval.recall.num_chunks=1", "eval.recall.num_queries=8"]
    balanced = [name for name in PARTITIONS if "1.5" in name]
    swept = f"name={','.join(balanced)}"
    succeed("fit-kmeans", "-m", "experiment=partitions", *sizes, "kmeans.balance=1.5")
    succeed("train-qmodel", "-m", "experiment=partitions_classifiers", *sizes, swept)
    succeed("eval", "-m", "experiment=partitions_eval", *sizes, *measured, "eval.key_shares=[0.5]", swept)
    for name in balanced:
        partition, classifier = (artifacts.read(f"outputs/tiny/{name}/{kind}").manifest for kind in ("kmeans", "qmodel"))
        details, rope = partition["details"], "True" in name
        assert (details["rope"], details["balance"]) == (rope, 1.5)
        assert (classifier["details"]["rope"], classifier["details"]["kmeans_hash"]) == (rope, partition["content_hash"])
        assert classifier["details"]["thresholds"]["shares"]
        with (Path("outputs/tiny") / name / "eval/results.csv").open() as file:
            lines = list(csv.DictReader(file))
        suffix = ", RoPE" * rope
        methods = {line["method"] for line in lines if line["setting"] == "about 50 % of keys"}
        assert methods >= {f"classifier{suffix}", f"k-means{suffix}", "Quest pages"}
        calibrated = [float(line["selectivity"]) for line in lines if line["method"] == f"classifier{suffix}, calibrated"]
        assert len(calibrated) == 4, "two shares of the keys in each task"
        assert all(0 < share < 1 for share in calibrated)
