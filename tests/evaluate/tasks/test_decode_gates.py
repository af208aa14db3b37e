"""``eval`` and ``generate`` with decode gates: rows beside other routers, shares of the keys, and
what decodes.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from msattn.kernels.maxpool_attention import maxpool_attention
from msattn.trainer import artifacts, models
from msattn.trainer.commands import answers
from msattn.trainer.commands.compose import compose
from msattn.trainer.config import ArtifactsConfig, GateConfig
from msattn.trainer.config.evaluate import ROUTERS, DecodingConfig
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate import calibration
from msattn.trainer.evaluate.calibration import match_key_shares, share_curve
from msattn.trainer.evaluate.row import WINDOW
from msattn.trainer.evaluate.tasks import decoding, needle, recall
from msattn.trainer.evaluate.tasks.analysis.partitions import with_k_means
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from msattn.trainer.methods.untrained import untrained_router
from tests.evaluate.named import named
from tests.evaluate.runs import config, loaded_and_found, measured_on_a_chunk, rows_of
from tests.sparse import save

BLOCK = 16
BLOCKS = 16  # of the 256 positions of the model
# read no more than the keys that collide, or that hold most of the attention
PARTIAL = ("LSH", "Twilight")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text: str) -> Path:
    """An output folder with untrained decode gates for the model of :func:`config`."""
    outputs = tmp_path_factory.mktemp("outputs")
    loaded = models.load(config(outputs, text).model, device="cpu")
    gate = DecodeGate.build(loaded.model.config, GateConfig(phase="decode", block_size=BLOCK))
    serving = {"probes": 2, "recent": 9, "sink": 3, "dense_layers": [1]}
    save(outputs / "rand" / "base", loaded, gate, serving=serving)
    return outputs


@pytest.mark.slow
def test_every_task_measures_every_router(trained: Path, text: str) -> None:
    sizes = config(trained, text).eval
    cfg = config(
        trained,
        text,
        baselines=[],
        routers=list(ROUTERS),
        recall=replace(sizes.recall, probes=[0, 1, BLOCKS], keys=[0.1, 0.4], independent=True),
        needle=replace(
            sizes.needle, probes=[1], keys=[0.3], depths=[0.5], samples=1, question="dense"
        ),
        decoding=DecodingConfig(lengths=[200], tokens=2, transformers_batch=0),
    )
    loaded, found = loaded_and_found(cfg)
    calibration.calibrate_routers(found, cfg, loaded)
    assert any(
        note.startswith("decode gate: its artifact has no thresholds") for note in found.notes
    )
    assert not any("No decode_gate" in note for note in found.notes)
    assert [str(each.method) for each in with_k_means(found).bucket_routings] == [], (
        "their blocks are no partition"
    )
    rows = [row for task in (recall, needle, decoding) for row in rows_of(task, loaded, cfg, found)]
    by_name = {(row.task, str(row.method), str(row.setting)): row for row in rows}
    assert len(rows) == len(by_name)
    for suffix in ("", ", independent"):  # one choice serves a query group anyway
        for setting in ("1 probe", f"{BLOCKS} probes"):
            one = by_name["recall", "decode gate", setting]
            other = by_name["recall", "decode gate" + suffix, setting]
            assert other.score == pytest.approx(one.score)
            assert other.selectivity == pytest.approx(one.selectivity)
    names = ["decode gate", *(str(untrained_router(name).method) for name in ROUTERS)]
    for name, suffix in product(names, ("", ", independent")):
        every = by_name["recall", name + suffix, f"{BLOCKS} probes"]
        if name in PARTIAL:
            assert 0.3 < (every.selectivity or 1) < 0.99
        else:
            assert every.score == pytest.approx(1, abs=1e-5)
            assert every.selectivity == pytest.approx(1)
        assert (by_name["recall", name + suffix, "1 probe"].selectivity or 1) < 0.5
    shares = [
        by_name["recall", "decode gate, calibrated", f"{share} % of far keys"] for share in (10, 40)
    ]
    window = by_name["recall", str(WINDOW), "0 probes"]
    one = by_name["recall", "decode gate", "1 probe"]
    reads = [row.selectivity or 1 for row in (window, *shares)]
    assert reads[0] < reads[1] < reads[2] < 1
    assert window.score < one.score <= by_name["recall", "oracle routing", "1 probe"].score + 1e-6
    share = by_name["needle", "decode gate, calibrated", "30 % of far keys"]
    decoded = [
        row
        for name in names
        for row in (by_name["needle", name, "1 probe"], by_name["decoding", name, "2 probes"])
    ]
    for row in (share, *decoded):
        assert 0.08 < (row.selectivity or 0) < 0.8
    assert named("decode gate").is_trained


def test_share_curves_are_the_shares_that_the_kernel_reads(trained: Path, text: str) -> None:
    cfg = replace(
        config(trained, text, routers=list(ROUTERS), key_shares=[0.01, 0.3, 1.0]), dense_layers=[]
    )
    loaded, found = loaded_and_found(cfg)

    def measure(x: Any) -> None:
        dense = maxpool_attention(x.q, x.k, x.v, scale=x.scale)
        positions = torch.linspace(x.num_keys * 7 // 8, x.num_keys - 1, 32).round().long()
        for routing in found.bucket_routings:
            curve = share_curve(x, routing)
            buckets, number = routing.router.buckets_of_keys(x)
            for probes in (0, 1, 5, BLOCKS):
                chosen = routing.buckets(
                    routing.router.scores_at(x, positions, routing.recent), probes
                )
                read = recall.decode_queries(
                    x, dense, routing, buckets, number, positions.int(), chosen
                )
                assert curve[probes].item() == pytest.approx(read.share.item(), rel=1e-5), (
                    routing.method
                )

    measured_on_a_chunk(cfg, loaded, measure)
    for matched in match_key_shares(found, cfg, loaded).bucket_routings:
        labels, counts = zip(*matched.settings([0, 7]), strict=True)
        shares = (
            ["about 30 % of keys"]
            if str(matched.method) in PARTIAL
            else ["about 30 % of keys", "about 100 % of keys"]
        )
        assert [*map(str, labels)] == ["0 probes", *shares]
        assert sorted({0, *counts}) == list(counts), "different numbers, that increase"
        assert counts[-1] <= BLOCKS


def test_numbers_of_the_manifest_are_served(trained: Path, text: str) -> None:
    cfg = replace(config(trained, text), recent=None, sink=None)
    _, found = loaded_and_found(cfg)
    routing = found.bucket_routings[0]
    assert (routing.probes, routing.recent, routing.sink, routing.dense_layers) == (2, 9, 3, (1,))
    named = replace(
        cfg, name="other", artifacts=ArtifactsConfig(decode_gate=str(trained / "rand" / "base"))
    )
    _, found = loaded_and_found(named)
    assert str(found.bucket_routings[0].method) == "decode gate"


def test_one_router_decodes(tmp_path: Path) -> None:
    """A given one, else the first kind that there is; the embedded model has a classifier."""

    def chosen(*overrides: str) -> list[str]:
        paths = answers._artifacts(compose("generate", [f"outputs={tmp_path}", *overrides]))
        return [kind for kind in artifacts.ROUTER_KINDS if paths[kind]]

    assert chosen() == ["qmodel"]
    assert chosen("artifacts.decode_gate=some/folder") == ["decode_gate"]
    assert chosen("artifacts.kmeans=embedded") == ["kmeans"]
    with pytest.raises(
        UserError,
        match=r"artifacts\.decode_gate=some/folder, artifacts\.kmeans=embedded: expected one of "
        r"them",
    ):
        chosen("artifacts.kmeans=embedded", "artifacts.decode_gate=some/folder")
    with pytest.raises(UserError, match=r"artifacts\.gate=some/folder: select=quest reads no gate"):
        chosen("select=quest", "artifacts.gate=some/folder")
    (tmp_path / "tiny" / "base" / "decode_gate").mkdir(parents=True)
    assert chosen() == ["qmodel"]
    assert chosen("artifacts.qmodel=embedded") == ["qmodel"]
