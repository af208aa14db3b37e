"""`fit-kmeans` and `train-qmodel`, from text to artifacts, and the pieces between."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from msattn.trainer import artifacts
from msattn.trainer.config import (
    ArtifactsConfig,
    DataConfig,
    FitKMeansConfig,
    KMeansConfig,
    ModelConfig,
    QModelConfig,
    TrackerConfig,
    TrainConfig,
    TrainQModelConfig,
)
from msattn.trainer.errors import UserError
from msattn.trainer.saap import distill, kmeans
from msattn.trainer.saap.distill import Distiller, QueryBatches, layer_pairs, routing_recall, train_qmodel
from msattn.trainer.saap.kmeans import KMeans, fit_kmeans
from msattn.trainer.saap.parts import FinishedParts
from msattn.trainer.saap.qmodel import QModel
from msattn.trainer.tap import LayerInputs, dense_attention, run_backbone, tap
from tests.factory import random_tokens, tiny_architecture, tiny_model

LENGTH, BUCKETS = 128, 8


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that repeat words from far back."""
    folder = tmp_path_factory.mktemp("text")
    generator = torch.Generator().manual_seed(0)
    for number in range(24):
        words = [f"w{i}" for i in torch.randint(0, 60, (400,), generator=generator).tolist()]
        (folder / f"{number}.txt").write_text(" ".join(words))
    return folder


def configs(text: Path, outputs: Path) -> tuple[FitKMeansConfig, TrainQModelConfig]:
    shared: dict[str, Any] = {
        "model": ModelConfig("toy", "none", init="random", architecture=tiny_architecture(vocab_size=4096)),
        "data": DataConfig("text", path=str(text), seq_len=LENGTH),
        "tracker": TrackerConfig("none"),
        "outputs": str(outputs),
        "device": "cpu",
    }
    settings = QModelConfig(hidden=16, num_prompts=4, queries_per_prompt=40, long_range=16, batch_queries=64)
    train = TrainConfig(lr=1e-2, steps=30, log_every=10, save_every=10)
    return (
        FitKMeansConfig(kmeans=KMeansConfig(num_buckets=BUCKETS, iterations=4, num_prompts=4), **shared),
        TrainQModelConfig(qmodel=settings, train=train, **shared),
    )


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    outputs = tmp_path_factory.mktemp("outputs")
    for_kmeans, for_qmodel = configs(text, outputs)
    fit_kmeans(for_kmeans)
    train_qmodel(for_qmodel)
    return outputs


def test_artifacts(trained: Path) -> None:
    partition = KMeans.load(trained / "toy" / "base" / "kmeans")
    assert partition.centroids.shape == (2, 2, BUCKETS, 16)
    assert partition.artifact is not None
    details = partition.artifact.manifest["details"]
    assert details["layers"] == partition.layers == [0, 1]
    assert details["stats"][1][0]["points"] == 4 * (LENGTH - 1)  # the sink of each prompt is left out
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


def test_training_beats_routing_by_centroids(trained: Path) -> None:
    metrics = artifacts.read(trained / "toy" / "base" / "qmodel").manifest["metrics"]
    for probes in (1, 2, 4):
        oracle, learnt, untrained = (metrics[f"recall_{name}@{probes}"] for name in ("oracle", "qmodel", "kmeans"))
        assert untrained < learnt <= oracle <= 1
    assert metrics["recall_oracle@8"] == pytest.approx(1, abs=2e-3)  # all buckets; targets are kept in fp16
    lines = (trained / "toy" / "base" / "runs" / "qmodel" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]
    assert losses[-1] < losses[0]


def interrupted_after(times: int, function: Any) -> Any:
    """``function``, until it has been called so often: then Ctrl-C."""
    left = iter([function] * times)

    def call(*args: Any, **named: Any) -> Any:
        try:
            return next(left)(*args, **named)
        except StopIteration:
            raise KeyboardInterrupt from None

    return call


def test_interrupted_runs_end_the_same(text: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for_kmeans, for_qmodel = configs(text, tmp_path)
    for_kmeans, for_qmodel = replace(for_kmeans, resume=True), replace(for_qmodel, resume=True)

    def run_until(module: Any, name: str, times: int, job: Any, cfg: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, interrupted_after(times, getattr(module, name)))
            with pytest.raises(KeyboardInterrupt):
                job(cfg)

    run_until(kmeans, "fit_points", 1, fit_kmeans, for_kmeans)
    with pytest.raises(UserError, match=r"resume=true: .* made with other settings"):
        fit_kmeans(replace(for_kmeans, seed=1))
    fit_kmeans(for_kmeans)
    run_until(distill, "prompt_pairs", 2, train_qmodel, for_qmodel)
    run_until(Distiller, "forward", 25, train_qmodel, for_qmodel)
    train_qmodel(for_qmodel)
    for kind in ("kmeans", "qmodel"):
        ours, theirs = (artifacts.read(root / "toy" / "base" / kind) for root in (tmp_path, trained))
        assert ours.manifest["content_hash"] == theirs.manifest["content_hash"]


def refused(cfg: TrainQModelConfig, message: str, **qmodel: Any) -> None:
    with pytest.raises(UserError, match=message):
        train_qmodel(replace(cfg, qmodel=replace(cfg.qmodel, **qmodel)))


def test_what_cannot_be_trained_is_refused(text: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for_kmeans, cfg = configs(text, trained)
    refused(cfg, "an artifact stands there; overwrite=true")
    cfg = replace(cfg, name="second")
    refused(cfg, "there is no k-means in .*; make it with msattn fit-kmeans")
    cfg = replace(cfg, artifacts=ArtifactsConfig(kmeans=str(trained / "toy" / "base" / "kmeans")))
    refused(cfg, "qmodel.long_range=128: accepted is less than data.seq_len=128", long_range=128)
    refused(cfg, "qmodel.long_range=127: no query looks that far back in 4 prompts", long_range=127, causal=True)
    refused(replace(cfg, seed=1), "its weights_hash is")
    monkeypatch.setattr(distill.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    refused(cfg, r"qmodel.num_prompts=4: cached queries take up to 0.0 GB .* where 0.0 GB are free", queries_per_prompt=39)
    with pytest.raises(UserError, match=r"kmeans.num_buckets=600: .* at most as many as there are keys, 508"):
        fit_kmeans(replace(for_kmeans, outputs=str(tmp_path), kmeans=replace(for_kmeans.kmeans, num_buckets=600)))


def tapped(model: Any, tokens: torch.Tensor) -> list[LayerInputs]:
    seen: list[LayerInputs] = []

    def attend(x: LayerInputs) -> torch.Tensor:
        seen.append(x)
        return dense_attention(x)

    with tap(model, attend), torch.no_grad():
        run_backbone(model, tokens)
    return seen


def partition_of(x: LayerInputs, rope: bool = False) -> KMeans:
    return KMeans(normalize(torch.randn(2, x.k.shape[1], BUCKETS, x.k.shape[3]), dim=-1), [0, 1], rope)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("min_distance", [None, 10])
@pytest.mark.parametrize("rope", [False, True])
def test_pairs_are_long_range_queries_and_their_attention(causal: bool, min_distance: int | None, rope: bool) -> None:
    x = tapped(tiny_model(), random_tokens(1, 60))[1]
    partition = partition_of(x, rope)
    cfg = QModelConfig(queries_per_prompt=20, long_range=12, causal=causal, min_distance=min_distance)
    positions = torch.arange(0, 60, 2, dtype=torch.int32)
    pairs = layer_pairs(x, partition, cfg, positions, torch.Generator().manual_seed(0))

    buckets = partition.assign(1, x.k_nope, x.k)[0]
    keys = torch.arange(60)
    distance = (keys[:, None] - keys).abs()
    shown = (keys > 0) & ((keys <= keys[:, None]) if causal else torch.ones(60, 60, dtype=torch.bool))
    for head in range(4):
        scores = (x.q[0, head].double() @ x.k[0, head // 2].double().T * x.scale).masked_fill(~shown, -torch.inf)
        top = scores.argmax(-1)
        farther = scores if min_distance is None else scores.masked_fill(distance <= min_distance, -torch.inf)
        one_hot = torch.nn.functional.one_hot(buckets[head // 2].long(), BUCKETS).double()
        mass = farther.softmax(-1).nan_to_num(0) @ one_hot
        usable = mass.sum(-1) > 0
        far = ((distance[keys, top] > 12) & usable)[::2].nonzero().flatten() * 2
        source = (x.q if rope else x.q_nope)[0, head].half()

        count, long_range = int(pairs["counts"][head]), int(pairs["long_range"][head])
        assert long_range == min(len(far), 20)
        assert count == min(max(len(far), 16), 20, int(usable[::2].sum()))
        chosen = [int((source == row).all(-1).nonzero()[0]) for row in pairs["queries"][head, :count]]
        assert len(set(chosen)) == count
        assert set(chosen[:long_range]) <= set(far.tolist())
        torch.testing.assert_close(pairs["targets"][head, :count].double(), mass[chosen], rtol=0, atol=1e-3)  # fp16


def test_batches_mix_prompts_and_query_heads_and_draw_only_what_is_there() -> None:
    prompts = []
    for number, counts in enumerate(([[3, 1], [2, 3]], [[1, 2], [3, 3]])):
        queries = torch.full((2, 2, 3, 1), torch.nan)
        for layer in range(2):
            for head in range(2):
                rows = torch.arange(counts[layer][head])
                queries[layer, head, rows, 0] = (1000 * number + 100 * layer + 10 * head + rows).float()
        prompts.append({"queries": queries, "targets": queries * 2, "counts": torch.tensor(counts)})

    shared = QueryBatches(prompts, num_heads=1, batch_queries=301, length=5, seed=3)
    batch = shared[4]
    assert batch["queries"].shape == (2, 1, 301, 1)
    assert torch.equal(batch["targets"], 2 * batch["queries"])
    for layer in range(2):
        valid = torch.cat([prompt["queries"][layer].flatten() for prompt in prompts])
        assert set(batch["queries"][layer].flatten().tolist()) == set(valid[valid.isfinite()].tolist())
    assert torch.equal(shared[4]["queries"], batch["queries"])
    assert not torch.equal(shared[3]["queries"], batch["queries"])
    own = QueryBatches(prompts, num_heads=2, batch_queries=50, length=5, seed=3)[0]["queries"]
    assert own.shape == (2, 2, 50, 1)
    assert (own[0, 1] % 100 // 10 == 1).all()
    assert torch.equal(distill.join_batches([batch, batch])["queries"], torch.cat([batch["queries"]] * 2, dim=2))


def test_loss_is_the_divergence_of_each_layer() -> None:
    qmodel = QModel(KMeans(normalize(torch.randn(2, 2, 5, 8), dim=-1), [1, 3]), 2, 6)
    queries, targets = torch.randn(2, 2, 9, 8), torch.rand(2, 2, 9, 5)
    targets[..., 0] = 0  # an empty bucket
    targets /= targets.sum(-1, keepdim=True)
    outputs = Distiller(qmodel)(queries, targets)
    probs = qmodel(queries).softmax(-1)
    divergence = torch.where(targets > 0, targets * (targets / probs).log(), 0).sum(-1).mean(-1).mean(-1)
    torch.testing.assert_close(outputs["loss"], divergence.mean())
    assert list(outputs["parts"]) == ["layer 1", "layer 3"]  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(torch.stack(list(outputs["parts"].values())), divergence)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("per_query_head", [False, True])
def test_recall(per_query_head: bool) -> None:
    """A classifier made of the centroids themselves routes as they do; rows behind the counts do not count."""
    partition = KMeans(normalize(torch.randn(1, 2, 6, 6), dim=-1), [0])
    qmodel = QModel(partition, 4 if per_query_head else 2, 12).eval()
    with torch.no_grad():
        both_signs = torch.cat([torch.eye(6), -torch.eye(6)], dim=1)  # relu(x) - relu(-x) = x
        qmodel.weight_in.copy_(both_signs)
        centroids = partition.centroids.repeat_interleave(2 if per_query_head else 1, dim=1).mT
        qmodel.weight_out.copy_(torch.cat([centroids, -centroids], dim=2))
    queries, targets = torch.randn(1, 4, 7, 6), torch.rand(1, 4, 7, 6)
    targets /= targets.sum(-1, keepdim=True)
    targets[:, 3, 2:] = torch.nan
    prompt = {"queries": queries, "targets": targets, "counts": torch.tensor([[7, 7, 7, 2]])}
    figures = routing_recall(qmodel, [prompt, prompt])
    assert set(figures) == {f"recall_{name}@{count}" for name in ("qmodel", "kmeans", "oracle") for count in (1, 2, 4)}
    valid = targets.isfinite().all(-1)
    scores = queries @ partition.centroids.repeat_interleave(2, dim=1).mT
    two = targets.gather(-1, scores.topk(2).indices).sum(-1)[valid].mean().item()
    assert figures["recall_kmeans@2"] == pytest.approx(two, abs=1e-5)
    assert figures["recall_qmodel@2"] == pytest.approx(two, abs=1e-5)
    assert figures["recall_oracle@4"] == pytest.approx(targets[valid].topk(4).values.sum(-1).mean().item(), abs=1e-5)


def test_parts_are_whole_or_not_there(tmp_path: Path) -> None:
    parts = FinishedParts(tmp_path / "parts", {"seed": 0}, resume=False)
    parts.save("one", {"x": torch.arange(3)}, {"note": 1})
    again = FinishedParts(tmp_path / "parts", {"seed": 0}, resume=True)
    tensors, note = again.load("one")
    assert torch.equal(tensors["x"], torch.arange(3))
    assert note == {"note": 1}
    assert [path.name for path in parts.folder.iterdir() if path.suffix == ".partial"] == []
    with pytest.raises(UserError, match="resume=true"):
        FinishedParts(tmp_path / "parts", {"seed": 1}, resume=True)
    assert not FinishedParts(tmp_path / "parts", {"seed": 1}, resume=False).path("one").exists()
