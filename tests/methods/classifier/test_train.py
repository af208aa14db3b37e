"""`fit-kmeans` and `train-qmodel`: from text to artifacts, resuming, several ranks, and the cached
targets.
"""

import gc
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from msattn.trainer import artifacts, models, progress
from msattn.trainer.config import ArtifactsConfig, QModelConfig, TrainQModelConfig
from msattn.trainer.errors import ModelWarning, UserError
from msattn.trainer.methods.budgets import KeyThresholds
from msattn.trainer.methods.classifier import fit_kmeans as fit_kmeans_module
from msattn.trainer.methods.classifier import targets
from msattn.trainer.methods.classifier.distillation import Distiller
from msattn.trainer.methods.classifier.fit_kmeans import fit_kmeans
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.classifier.qmodel import QModel, routing_warning
from msattn.trainer.methods.classifier.targets import QueryTargets, key_buckets, layer_targets
from msattn.trainer.methods.classifier.train import train_qmodel
from msattn.trainer.serving.attach import attach
from tests.factory import inputs_of_layers, random_partition, random_tokens, tiny_model
from tests.jobs import Job
from tests.methods.classifier.runs import BUCKETS, LENGTH, configs, write_documents
from tests.running import metrics_lines
from tests.training.small import interrupted_after


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    outputs = tmp_path_factory.mktemp("outputs")
    for_kmeans, for_qmodel = configs(text, outputs)
    fit_kmeans(for_kmeans)
    train_qmodel(for_qmodel)
    return outputs


def test_artifacts_load_and_record_their_source(trained: Path) -> None:
    partition = KMeans.load(trained / "toy" / "base" / "kmeans")
    assert partition.centroids.shape == (2, 2, BUCKETS, 16)
    assert partition.artifact is not None
    details = partition.artifact.manifest["details"]
    assert details["layers"] == partition.layers == [0, 1]
    # the sink of each prompt is left out
    assert details["stats"][1][0]["points"] == 4 * (LENGTH - 1)
    assert {"objective", "imbalance", "empty_buckets"} <= details["stats"][0][1].keys()
    assert not (trained / "toy" / "base" / "runs" / "kmeans" / "layers").exists()

    qmodel = QModel.load(trained / "toy" / "base" / "qmodel")
    assert qmodel.artifact is not None
    manifest = qmodel.artifact.manifest
    assert manifest["details"]["kmeans_hash"] == partition.artifact.manifest["content_hash"]
    assert torch.equal(qmodel.partition.centroids, partition.centroids)
    assert not qmodel.training
    assert not any(parameter.requires_grad for parameter in qmodel.parameters())
    query = torch.randn(1, 4, 1, 16)
    assert torch.isfinite(qmodel.scores(1, query, query)).all()


def test_thresholds_are_stored_and_may_be_missing(trained: Path, tmp_path: Path) -> None:
    folder = trained / "toy" / "base" / "qmodel"
    qmodel = QModel.load(folder)
    assert qmodel.artifact is not None
    manifest = qmodel.artifact.manifest
    assert qmodel.thresholds == KeyThresholds(**manifest["details"]["thresholds"])
    model = tiny_model(vocab_size=4096)
    with attach(model, qmodel=qmodel, keys=0.1, recent=16, dense_below=0) as sparse:
        model.generate(random_tokens(1, 100), max_new_tokens=4, do_sample=False)
        assert 0.2 < sparse.stats()["selectivity"] < 0.8

    def written(name: str, **changes: Any) -> Path:
        details = {
            key: value for key, value in manifest["details"].items() if key != "thresholds"
        } | changes
        facts = {key: manifest[key] for key in ("model", "data", "seed", "metrics")}
        tensors = artifacts.read(folder).tensors
        return artifacts.write(
            tmp_path / name, kind="qmodel", tensors=tensors, config={}, details=details, **facts
        )

    assert QModel.load(written("without")).thresholds is None
    wrong = {"shares": [0.1, 0.2], "densities": [1.0, 2.0]}
    with pytest.raises(
        UserError, match=r"details: thresholds: densities must be 2 numbers that decrease"
    ):
        QModel.load(written("wrong", thresholds=wrong))


def test_trained_routing_beats_kmeans_routing(trained: Path) -> None:
    metrics = artifacts.read(trained / "toy" / "base" / "qmodel").manifest["metrics"]
    for probes in (1, 2, 4):
        oracle, qmodel, kmeans = (
            metrics[f"recall_{name}@{probes}"] for name in ("oracle", "qmodel", "kmeans")
        )
        assert kmeans < qmodel <= oracle <= 1
    # all buckets; targets are kept in fp16
    assert metrics["recall_oracle@8"] == pytest.approx(1, abs=2e-3)
    assert metrics["loss"] == pytest.approx((metrics["loss/layer 0"] + metrics["loss/layer 1"]) / 2)
    assert metrics["recall_qmodel@8/layer 1"] <= metrics["recall_oracle@8/layer 1"]
    assert metrics["cache_seconds_a_kv_head"] > 0
    assert metrics["training_seconds_a_kv_head"] > 0
    lines = metrics_lines(trained / "toy" / "base" / "runs" / "qmodel" / "layers_0-1")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]


def test_the_first_prompt_tells_how_long_the_whole_command_takes(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    duration = r"\d+:\d\d"
    for_kmeans, for_qmodel = configs(text, tmp_path)
    fit_kmeans(for_kmeans)
    parts = f"4 prompts {duration}, k-means of 4 heads {duration}"
    assert (
        len(
            re.findall(
                f"msattn: fit-kmeans takes about {duration} in all: {parts}\n",
                capsys.readouterr().err,
            )
        )
        == 1
    )
    train_qmodel(for_qmodel)
    parts = f"8 prompts and calibration {duration}, 30 steps of 2 layers {duration}"
    assert (
        len(
            re.findall(
                f"msattn: train-qmodel takes about {duration} in all: {parts}\n",
                capsys.readouterr().err,
            )
        )
        == 1
    )


def test_a_classifier_that_routes_worse_than_its_kmeans_warns(
    text: Path, trained: Path, tmp_path: Path
) -> None:
    assert QModel.load(trained / "toy" / "base" / "qmodel").routing_warning is None
    _, cfg = configs(text, tmp_path)
    cfg = replace(cfg, artifacts=ArtifactsConfig(kmeans=str(trained / "toy" / "base" / "kmeans")))
    cfg = replace(cfg, model=replace(cfg.model, presets=replace(cfg.model.presets, probes=2)))
    with pytest.warns(
        ModelWarning,
        match=r"worse than their k-means alone: [0-9.]+% of the held-out attention mass in",
    ):
        folder = train_qmodel(replace(cfg, train=replace(cfg.train, steps=1)))
    model = models.load(cfg.model, device="cpu").model
    with (
        pytest.warns(ModelWarning, match="worse than their k-means alone"),
        attach(model, qmodel=folder),
    ):
        pass


@pytest.mark.parametrize(
    ("probes", "warning"),
    [(1, None), (2, "in 2 buckets"), (3, "in 2 buckets"), (4, None), (None, None)],
)
def test_the_warning_is_about_the_buckets_that_serving_reads(
    probes: int | None, warning: str | None
) -> None:
    metrics = {
        "recall_qmodel@1": 0.5,
        "recall_kmeans@1": 0.4,
        "recall_qmodel@2": 0.5,
        "recall_kmeans@2": 0.6,
    }
    metrics |= {"recall_qmodel@4": 0.8, "recall_kmeans@4": 0.8, "recall_qmodel@4/layer 0": 0.1}
    found = routing_warning(metrics, probes)
    assert found is None if warning is None else warning in (found or "")
    assert routing_warning({"loss": 1.0}, probes) is None  # an imported artifact


@pytest.mark.slow
def test_resumed_runs_give_the_uninterrupted_result(
    text: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for_kmeans, for_qmodel = configs(text, tmp_path)
    for_kmeans, for_qmodel = replace(for_kmeans, resume=True), replace(for_qmodel, resume=True)

    def run_until(owner: Any, name: str, times: int, job: Any, cfg: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted_after(times, getattr(owner, name)))
            with pytest.raises(KeyboardInterrupt):
                job(cfg)

    run_until(fit_kmeans_module, "fit_centroids", 1, fit_kmeans, for_kmeans)
    with pytest.raises(
        UserError, match=r"layers has \w+=.*, not .*; use the same settings, or overwrite=true"
    ):
        fit_kmeans(replace(for_kmeans, seed=1))
    fit_kmeans(for_kmeans)
    run_until(targets, "prompt_targets", 2, train_qmodel, for_qmodel)
    for_qmodel = replace(for_qmodel, qmodel=replace(for_qmodel.qmodel, layers_at_once=1))
    run_until(Distiller, "forward", 55, train_qmodel, for_qmodel)  # while the second layer trains
    # steps 20 to 24, from the checkpoint of step 20
    run_until(Distiller, "forward", 4, train_qmodel, for_qmodel)
    with monkeypatch.context() as patch:
        # fails if a layer restarts
        patch.setattr(Distiller, "forward", interrupted_after(10, Distiller.forward))
        train_qmodel(for_qmodel)
    assert not any(type(each) is QueryTargets for each in gc.get_objects()), (
        "a group's data must be freed"
    )
    for kind in ("kmeans", "qmodel"):
        resumed, uninterrupted = (
            artifacts.read(root / "toy" / "base" / kind) for root in (tmp_path, trained)
        )
        assert resumed.manifest["content_hash"] == uninterrupted.manifest["content_hash"]


JOB = """
import sys
from dataclasses import replace
from pathlib import Path
from msattn.trainer.methods.classifier.train import train_qmodel
from tests.methods.classifier.test_train import configs

cfg = configs(Path(sys.argv[1]), Path(sys.argv[2]))[1]
train_qmodel(replace(cfg, resume=True, train=replace(cfg.train, save_every=int(sys.argv[3]))))
"""


@pytest.mark.slow
def test_two_ranks_resume_after_a_kill_to_the_result_of_one_process(
    text: Path, trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "toy" / "base"
    shutil.copytree(trained / "toy" / "base" / "kmeans", folder / "kmeans")
    killed = Job(JOB, tmp_path, text, tmp_path, 1, processes=2)  # saves every step
    killed.wait_for(lambda: list(folder.glob("runs/qmodel/layers_*/checkpoints/*/complete.json")))
    killed.kill()
    assert not (folder / "qmodel").exists()

    job = Job(JOB, tmp_path, text, tmp_path, 10, processes=2)
    printed = job.output()
    assert "targets of" not in printed + job.err.read_text(), "all targets must be cached"
    assert printed.count(f"{folder / 'qmodel'}  ") == 1
    assert [line for line in printed.splitlines() if line.startswith("layers ")] == [
        "layers 0: 2 classifiers train at once"
    ]
    shared, alone = (
        artifacts.read(root / "toy" / "base" / "qmodel").manifest for root in (tmp_path, trained)
    )
    assert shared["content_hash"] == alone["content_hash"]
    for name in ("loss/layer 1", "recall_qmodel@4", "recall_oracle@8/layer 1"):
        assert shared["metrics"][name] == pytest.approx(alone["metrics"][name], rel=1e-5)
    assert not (folder / "runs" / "qmodel" / "layers").exists()


def rejects(cfg: TrainQModelConfig, message: str, **qmodel: Any) -> None:
    with pytest.raises(UserError, match=message):
        train_qmodel(replace(cfg, qmodel=replace(cfg.qmodel, **qmodel)))


def test_unsuitable_settings_are_rejected(
    text: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for_kmeans, cfg = configs(text, trained)
    rejects(cfg, "an artifact already exists; overwrite=true")
    cfg = replace(cfg, name="second")
    rejects(
        cfg,
        "there is no k-means in .*; msattn fit-kmeans --model none --data .* outputs=.* "
        "name=second .* creates it",
    )
    cfg = replace(cfg, artifacts=ArtifactsConfig(kmeans=str(trained / "toy" / "base" / "kmeans")))
    rejects(cfg, "qmodel.long_range=128: expected less than data.seq_len=128", long_range=128)
    rejects(
        cfg,
        "qmodel.long_range=127: no query has its top key that far away in 4 prompts",
        long_range=127,
        causal=True,
    )
    rejects(
        cfg,
        "qmodel.min_distance=126: some head has no query with keys that far away in 4 prompts",
        min_distance=126,
        causal=True,
    )
    rejects(cfg, "qmodel.min_distance=128: expected less than data.seq_len=128", min_distance=128)
    rejects(replace(cfg, seed=1), "its weights_hash is")
    with monkeypatch.context() as patch:
        # the text would not fit either
        patch.setattr("msattn.trainer.config.text_files.free_memory", lambda: 2**40)
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
        rejects(
            cfg, r"qmodel.num_prompts=4: training one layer takes .* GB of memory, 0.0 GB are free"
        )
        rejects(
            cfg,
            r"qmodel.layers_at_once=9: training 2 layers takes .* set it to null",
            layers_at_once=9,
        )
        other = replace(for_kmeans, outputs=str(tmp_path))
        with pytest.raises(
            UserError,
            match=r"kmeans.num_prompts=4: the keys take 0.0 GB of memory, 0.0 GB are free",
        ):
            fit_kmeans(other)
    monkeypatch.setattr(targets.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    rejects(
        cfg,
        r"qmodel.num_prompts=4: cached queries take up to 0.0 GB .* where 0.0 GB are free",
        queries_per_prompt=39,
    )
    with pytest.raises(
        UserError, match=r"kmeans.num_buckets=509: .* at most 508, the number of keys"
    ):
        fit_kmeans(replace(other, kmeans=replace(for_kmeans.kmeans, num_buckets=509)))
    assert not list(tmp_path.rglob("*")), "rejected before any work"


@pytest.mark.slow
def test_cached_targets_of_another_dtype_are_rejected(
    text: Path, trained: Path, device: str
) -> None:
    """On the CPU the random weights and their hash are the same in every dtype; on a GPU they
    differ.
    """
    _, cfg = configs(text, trained)
    cfg = replace(
        cfg,
        name="third",
        artifacts=ArtifactsConfig(kmeans=str(trained / "toy" / "base" / "kmeans")),
    )
    cfg = replace(cfg, train=replace(cfg.train, steps=2))
    train_qmodel(cfg)
    says = (
        r"cache has dtype=torch.float32, not torch.bfloat16"
        if device == "cpu"
        else "its weights_hash is"
    )
    with pytest.raises(UserError, match=says):
        train_qmodel(replace(cfg, dtype="bfloat16", resume=True, overwrite=True))


@pytest.mark.parametrize(
    ("causal", "min_distance", "rope"),
    [(False, None, False), (False, 10, True), (True, None, True), (True, 10, False)],
)
def test_targets_are_the_attention_mass_of_long_range_queries(
    causal: bool, min_distance: int | None, rope: bool
) -> None:
    x = inputs_of_layers(tiny_model(), random_tokens(1, 60))[1]
    partition = random_partition(BUCKETS, rope=rope)
    cfg = QModelConfig(long_range=12, causal=causal, min_distance=min_distance)
    positions = torch.arange(0, 60, 2, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    found = layer_targets(x, partition, key_buckets(x, partition), cfg, positions, generator, 20)
    ends = found["counts"].cumsum(0).tolist()

    buckets = partition.assign(1, x.k_nope, x.k)[0]
    keys = torch.arange(60)
    distance = (keys[:, None] - keys).abs()
    shown = (keys > 0) & (
        (keys <= keys[:, None]) if causal else torch.ones(60, 60, dtype=torch.bool)
    )
    for head in range(4):
        scores = (x.q[0, head].double() @ x.k[0, head // 2].double().T * x.scale).masked_fill(
            ~shown, -torch.inf
        )
        top = scores.argmax(-1)
        farther = (
            scores
            if min_distance is None
            else scores.masked_fill(distance <= min_distance, -torch.inf)
        )
        one_hot = torch.nn.functional.one_hot(buckets[head // 2].long(), BUCKETS).double()
        mass = farther.softmax(-1).nan_to_num(0) @ one_hot
        usable = mass.sum(-1) > 0
        far = ((distance[keys, top] > 12) & usable)[::2].nonzero().flatten() * 2
        source = (x.q if rope else x.q_nope)[0, head].half()

        count, long_range = int(found["counts"][head]), int(found["long_range"][head])
        rows = slice(ends[head] - count, ends[head])
        assert long_range == min(len(far), 20)
        assert count == min(max(len(far), 16), 20, int(usable[::2].sum()))
        chosen = [int((source == row).all(-1).nonzero()[0]) for row in found["queries"][rows]]
        assert len(set(chosen)) == count
        assert set(chosen[:long_range]) <= set(far.tolist())
        # fp16
        torch.testing.assert_close(found["targets"][rows].double(), mass[chosen], rtol=0, atol=1e-3)
