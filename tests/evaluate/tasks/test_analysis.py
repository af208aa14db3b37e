"""The measurements of ``eval=analysis`` against direct computation in fp64, and the task through
the command.
"""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from msattn.trainer import models
from msattn.trainer.config import AnalysisConfig
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.compared import Compared, ComparedRouting
from msattn.trainer.evaluate.row import WINDOW
from msattn.trainer.evaluate.tasks.analysis import (
    bucket_sizes,
    partitions,
    planes,
    selectivity,
    task,
    top_mass,
)
from msattn.trainer.evaluate.tasks.analysis.queries import (
    SHARES,
    Window,
    query_batches,
    query_positions,
)
from msattn.trainer.evaluate.tasks.reads import keys_read
from msattn.trainer.evaluate.tasks.recall import MethodRecall
from msattn.trainer.methods.base import Method
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.models.layer_attention import Angles, LayerInputs, Scoring
from tests.evaluate.runs import config
from tests.factory import random_partition
from tests.running import succeed

LENGTH, HEADS, GROUP, SIZE, BUCKETS = 96, 2, 3, 8, 8
WINDOW_KEYS = Window(sink=1, recent=8)


def layer_inputs(seed: int = 0, layer: int = 0) -> LayerInputs:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> Tensor:
        return torch.randn(1, heads, LENGTH, SIZE, generator=generator)

    q = draw(HEADS * GROUP)
    k = draw(HEADS)
    v = draw(HEADS)
    q_nope = draw(HEADS * GROUP)
    k_nope = draw(HEADS)
    flat = torch.ones(1, LENGTH, SIZE)
    return LayerInputs(layer, 2 * q, k, v, q_nope, k_nope, Angles(flat, flat), Scoring(SIZE**-0.5))


def dense_weights(x: LayerInputs, head: int, position: int) -> Tensor:
    """Attention probabilities of one query, fp64 ``[position + 1]``."""
    scores = (
        x.k[0, head // GROUP, : position + 1].double() @ x.q[0, head, position].double() * x.scale
    )
    return scores.softmax(0)


def far_keys(position: int) -> range:
    return range(WINDOW_KEYS.sink, position - WINDOW_KEYS.recent + 1)


def share_counted(share: float, total: int) -> int:
    return max(1, math.ceil(round(share * total, 9)))


def test_principal_plane_against_covariance() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = (
        torch.randn(40, SIZE, generator=generator, dtype=torch.float64) * torch.arange(1, SIZE + 1)
        + 3
    )
    queries = torch.randn(30, SIZE, generator=generator, dtype=torch.float64) - 2
    mean, axes, explained = planes.principal_plane(keys, queries)
    values, vectors = np.linalg.eigh(np.cov(torch.cat([keys, queries]).numpy().T))
    assert explained == pytest.approx(values[-2:].sum() / values.sum())
    products = np.abs(axes.numpy().T @ vectors[:, [-1, -2]])
    np.testing.assert_allclose(products, np.eye(2), atol=1e-8)
    assert bool(((keys.mean(0) - mean) @ axes >= 0).all())


def test_deviation_and_imbalance_by_hand() -> None:
    counts = bucket_sizes.bucket_counts(torch.tensor([[0, 0, 0, 1], [2, 2, 2, 2]]), 4)
    assert counts.tolist() == [[3, 1, 0, 0], [0, 0, 4, 0]]
    assert bucket_sizes.imbalance(counts).tolist() == pytest.approx([4 * (9 + 1) / 16, 4])
    uniform = torch.full((2, 4), 5.0, dtype=torch.float64)
    by_hand = [
        math.sqrt(((0.75 - 0.25) ** 2 + 0 + 2 * 0.25**2) / 4) * 4,
        math.sqrt((0.75**2 + 3 * 0.25**2) / 4) * 4,
    ]
    assert bucket_sizes.deviation(counts, uniform).tolist() == pytest.approx(by_hand)
    assert bucket_sizes.deviation(3 * counts, counts).tolist() == pytest.approx([0, 0])


def test_deviation_finds_drift_with_the_position() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = {}
    for name in ("steady", "drifting"):
        heldout = torch.randint(BUCKETS, (4, HEADS, 400), generator=generator)
        if name == "drifting":
            heldout = (heldout // 4 + torch.arange(400) * BUCKETS // 400) % BUCKETS
        training = torch.randint(BUCKETS, (HEADS, 1000), generator=generator)
        sizes = bucket_sizes.SampledBuckets(
            Method(name), BUCKETS, 0, {0: training}, {0: list(heldout)}
        )
        rows |= {(str(row.method), str(row.setting)): row for row in sizes.rows(LENGTH)}
    assert len(rows) == 8
    steady = [
        rows["buckets of steady", way].score
        for way in ("training text", "one prompt", "one range of positions")
    ]
    assert max(steady) < 0.35
    assert rows["buckets of drifting", "one prompt"].score < 0.4
    drift = rows["buckets of drifting", "one range of positions"]
    assert drift.score > 1
    assert (
        drift.extra["imbalance"] > 2 > rows["buckets of drifting", "one prompt"].extra["imbalance"]
    )
    assert (len(drift.extra["deviations"]), drift.samples) == (8, 4)
    assert drift.extra["sorted_sizes"] == sorted(drift.extra["sorted_sizes"], reverse=True)
    assert sum(drift.extra["sorted_sizes"]) == pytest.approx(BUCKETS, abs=1e-3)


def test_mass_in_top_keys_against_sorting() -> None:
    x, positions = layer_inputs(), query_positions(LENGTH, WINDOW_KEYS, 5)
    measured = top_mass.TopMass(16, heads=[1])
    for queries in query_batches(x, 1, positions, WINDOW_KEYS):
        measured.add_queries(x, 1, queries)
    everywhere, far = measured.rows(LENGTH, num_chunks=1)
    assert str(far.setting) == "outside the window"
    for row, chosen in ((everywhere, lambda p: range(p + 1)), (far, far_keys)):
        expected = torch.zeros(GROUP, len(SHARES), dtype=torch.float64)
        for head in range(GROUP):
            for position in positions.tolist():
                mass = (
                    dense_weights(x, GROUP + head, position)[list(chosen(position))]
                    .sort(descending=True)
                    .values
                )
                for s, share in enumerate(SHARES):
                    expected[head, s] += (
                        mass[: share_counted(share, len(mass))].sum() / mass.sum() / len(positions)
                    )
        torch.testing.assert_close(
            torch.tensor(row.extra["by_head"][0], dtype=torch.float64), expected, rtol=1e-5, atol=0
        )
        assert row.score == pytest.approx(float(expected[:, 0].mean()), rel=1e-5)
        assert row.extra["top 50%"] == pytest.approx(float(expected[:, -1].mean()), rel=1e-5)


def test_mass_in_top_blocks_against_sorting(monkeypatch: pytest.MonkeyPatch) -> None:
    x, size = layer_inputs(), 8
    # several batches of rows in a block
    monkeypatch.setattr(top_mass, "BATCH_SCORES", 3 * GROUP * LENGTH)
    found = top_mass.top_blocks(x, 0, size)
    assert found is not None
    assert found.shape == (GROUP, top_mass.QUERY_BLOCKS, len(SHARES))
    for head in range(GROUP):
        for number, block in enumerate((6, 8, 9, 11)):
            mass = torch.zeros(block + 1, dtype=torch.float64)
            for position in range(block * size, (block + 1) * size):
                weights = dense_weights(x, head, position)
                mass.index_add_(0, torch.arange(position + 1) // size, weights)
            mass = mass.sort(descending=True).values
            expected = [
                float(mass[: share_counted(share, block + 1)].sum() / mass.sum())
                for share in SHARES
            ]
            assert found[head, number].tolist() == pytest.approx(expected, rel=1e-5)
    assert top_mass.top_blocks(x, 0, LENGTH + 1) is None


def direct(
    x: LayerInputs, head: int, position: int, read: set[int]
) -> tuple[Tensor, Tensor, float]:
    """Sparse output, dense output and mass read of one query in fp64."""
    weights, v = dense_weights(x, head, position), x.v[0, head // GROUP, : position + 1].double()
    rows = sorted(read)
    return weights[rows] @ v[rows] / weights[rows].sum(), weights @ v, float(weights[rows].sum())


def test_exact_top_keys_against_direct_attention() -> None:
    x, positions = layer_inputs(), query_positions(LENGTH, WINDOW_KEYS, 5)
    (queries,) = query_batches(x, 0, positions, WINDOW_KEYS)
    stage = selectivity.stages_of_shares(queries.logits, queries.far)
    out, mass, keys = selectivity.read_in_stages(queries, x.v[0, 0], stage, len(SHARES) + 1)
    for head in range(GROUP):
        for n, position in enumerate(positions.tolist()):
            weights = dense_weights(x, head, position)
            far = sorted(far_keys(position), key=lambda key: -weights[key])
            window = set(range(position + 1)) - set(far)
            for s in range(len(SHARES) + 1):
                read = window | set(far[: share_counted(SHARES[s - 1], len(far))] if s else [])
                sparse, dense, share = direct(x, head, position, read)
                torch.testing.assert_close(out[head, n, -1].double(), dense, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(out[head, n, s].double(), sparse, rtol=1e-4, atol=1e-5)
                assert mass[head, n, s].item() == pytest.approx(share, rel=1e-5)
                assert keys[head, n, s].item() == pytest.approx(len(read) / (position + 1))


def router(rope: bool, layers: list[int] | None = None) -> KMeans:
    return random_partition(
        BUCKETS, layers=layers or [0], heads=HEADS, size=SIZE, rope=rope, seed=1
    )


@pytest.mark.parametrize("rope", [False, True])
def test_routing_against_the_keys_that_serving_reads(rope: bool) -> None:
    x, positions = layer_inputs(), query_positions(LENGTH, WINDOW_KEYS, 5)
    method = ComparedRouting("k-means", router(rope), 2, WINDOW_KEYS.recent, WINDOW_KEYS.sink, ())
    reads = selectivity.LayerReads.of(x, [method], positions, seed=0)
    for head in range(HEADS):
        for queries in query_batches(x, head, positions, WINDOW_KEYS):
            reads.add(head, queries)
    found = {
        (name, setting): MethodRecall(True, {0: [recall]})
        for name, setting, recall in reads.recalls()
    }
    rows = {
        (str(row.method), str(row.setting)): row for row in selectivity.error_rows(found, LENGTH)
    }
    assert {setting for name, setting in rows if name == "k-means"} == {
        "1 probe",
        "2 probes",
        "4 probes",
    }
    q, q_nope = (each[0, :, positions].transpose(0, 1)[:, :, None] for each in (x.q, x.q_nope))
    assert isinstance(method.router, KMeans)
    buckets = method.router.assign(0, x.k_nope, x.k)
    for probes, setting in ((0, None), (1, "1 probe"), (4, "4 probes")):
        row = rows["k-means", setting] if setting else rows[str(WINDOW), "0 probes"]
        visited = keys_read(
            buckets,
            positions,
            method.router.best(method.router.scores(0, q_nope, q), probes),
            method,
        )
        assert row.selectivity == pytest.approx(
            float((visited.sum(-1) / (positions[:, None] + 1)).mean()), rel=1e-5
        )
        for head in range(HEADS * GROUP):
            difference = size = mass = 0.0
            for n, position in enumerate(positions.tolist()):
                read = set(visited[n, head // GROUP].nonzero().flatten().tolist())
                sparse, dense, share = direct(x, head, position, read)
                difference += float((sparse - dense).square().sum())
                size += float(dense.square().sum())
                mass += share / len(positions)
            assert row.extra["heads"][0][head] == pytest.approx(mass, rel=1e-4)
            assert row.extra["output_error_heads"][0][head] == pytest.approx(
                difference / size, rel=1e-3
            )
        assert row.extra["missed_mass"] == pytest.approx(1 - row.score)


def test_layers_that_a_router_does_not_hold_are_left_out() -> None:
    x, positions = layer_inputs(layer=1), query_positions(LENGTH, WINDOW_KEYS, 2)
    method = ComparedRouting("k-means", router(False), 2, WINDOW_KEYS.recent, WINDOW_KEYS.sink, ())
    reads = selectivity.LayerReads.of(x, [method], positions, seed=0)
    assert not reads.routed
    assert task.training_sizes([method], partitions.TrainingKeys({}, {}, 0), [1], [0], seed=0) == []


SMALL = [
    "model=tiny",
    "eval=analysis",
    "tracker=none",
    "device=cpu",
    "eval.analysis.length=320",
    "eval.analysis.num_queries=4",
]
SMALL += ["eval.analysis.num_chunks=2", "eval.analysis.layers=[1,4]", "eval.analysis.buckets=[8]"]
SMALL += ["data.source=text", "data.path=text", "data.heldout_path=heldout.txt"]
FIGURES = ("analysis_planes", "analysis_buckets", "analysis_mass", "analysis_error")


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and held-out text in the working directory; partitions are fitted on few keys."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(partitions, "POINTS_PER_BUCKET", 16)
    (tmp_path / "text").mkdir()
    draw = random.Random(0)
    for name, count in (("text/essays.txt", 20_000), ("heldout.txt", 2_000)):
        words = ["".join(draw.choices("abcdefgh ", k=6)) for _ in range(count)]
        (tmp_path / name).write_text(" ".join(words), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.usefixtures("text")
def test_command_writes_figures_and_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    succeed("eval", *SMALL, f"outputs={tmp_path}")
    assert "Fitted for the analysis" in capsys.readouterr().out
    folder = tmp_path / "tiny" / "base" / "eval"
    page = (folder / "report.html").read_text(encoding="utf-8")
    for name in FIGURES:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f'aria-label="{name}"' in page
    rows = [
        row
        for row in json.loads((folder / "results.json").read_text())["rows"]
        if row["task"] == "analysis"
    ]
    assert len({(row["method"], row["setting"]) for row in rows}) == len(rows)
    assert all(row["extra"]["layers"] == [1, 4] for row in rows)
    assert {row["method"] for row in rows} == {
        *(
            "queries and keys",
            "buckets of k-means",
            "buckets of k-means, RoPE",
            "mass in top keys",
            "mass in top blocks",
        ),
        *(
            str(WINDOW),
            "exact top keys",
            "random keys",
            "classifier",
            "k-means",
            "k-means, RoPE",
            "k-means, 8 buckets",
        ),
    }
    exact, drawn = (
        [row["score"] for row in rows if row["method"] == f"{each} keys"]
        for each in ("exact top", "random")
    )
    assert exact == sorted(exact)
    assert all(best >= other for best, other in zip(exact, drawn, strict=True))
    assert "top 10%" in (folder / "results.csv").read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"heads": [2]},
            r"eval\.analysis\.heads=\[2\]: expected 0 to 1, as the model has 2 key/value heads",
        ),
        (
            {"length": 1025},
            r"eval\.analysis\.length=1025: expected more than recent \+ sink = 1025 tokens",
        ),
    ],
)
def test_wrong_numbers_are_refused(changes: dict[str, Any], message: str) -> None:
    cfg = replace(config(Path("unused"), "unused", analysis=AnalysisConfig(**changes)), recent=1024)
    with pytest.raises(UserError, match=message):
        task.check_sizes(cfg, models.describe(cfg.model), Compared([], []))
