"""``eval.routers`` and ``eval.key_shares``: training-free routers beside the k-means, at equal
shares of the keys.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from msattn.trainer.config import EvalRunConfig
from msattn.trainer.config.evaluate import ROUTERS
from msattn.trainer.evaluate import calibration
from msattn.trainer.evaluate.calibration import match_key_shares
from msattn.trainer.evaluate.tasks import recall
from msattn.trainer.models.tap import LayerInputs
from tests.evaluate.runs import config, loaded_and_found, measured_on_a_chunk, rows_of
from tests.routers import Head, keys_of_a_token

PRESET_BUCKETS = 8


def routed_config(outputs: Path, text: str, **changes: Any) -> EvalRunConfig:
    """A small configuration with all routers of :data:`PRESET_BUCKETS` buckets, in all layers."""
    # the oracle chooses among buckets of the first
    routers = ["window", *(name for name in ROUTERS if name != "window")]
    cfg = config(outputs, text, **{"routers": routers, "baselines": [], **changes})
    model = replace(
        cfg.model, presets=replace(cfg.model.presets, num_buckets=PRESET_BUCKETS, probes=2)
    )
    return replace(cfg, model=model, dense_layers=[])


def test_recall_of_quest_and_window_is_the_mass_of_their_pages(tmp_path: Path, text: str) -> None:
    cfg = routed_config(tmp_path, text, routers=["quest", "window"])
    sizes = replace(cfg.eval.recall, num_chunks=1, probes=[3])
    cfg = replace(cfg, eval=replace(cfg.eval, recall=sizes))
    loaded, found = loaded_and_found(cfg)
    rows = {str(row.method): row for row in rows_of(recall, loaded, cfg, found)}
    recent, sink = found.bucket_routings[0].recent, found.bucket_routings[0].sink
    expected: dict[str, list[float]] = {"Quest pages": [], "sink and window": []}
    shares: dict[str, list[float]] = {"Quest pages": [], "sink and window": []}

    def measure(x: LayerInputs) -> None:
        for position in (
            torch.linspace(recent + sink, x.num_keys - 1, sizes.num_queries).round().int().tolist()
        ):
            for head in range(2):
                q = x.q[0, 2 * head : 2 * head + 2, position]
                keys = x.k[0, head, : position + 1]
                one = Head(keys, q, recent, 3, PRESET_BUCKETS)
                for name, router in (("Quest pages", "quest"), ("sink and window", "window")):
                    read = keys_of_a_token(router, one, sink)
                    weights = (q @ keys.mT * x.scale).softmax(-1)
                    expected[name] += (weights * read).sum(-1).tolist()
                    shares[name].append(read.float().mean().item())

    measured_on_a_chunk(cfg, loaded, measure)
    for name in expected:
        assert rows[name].score == pytest.approx(
            sum(expected[name]) / len(expected[name]), rel=1e-4
        )
        assert rows[name].selectivity == pytest.approx(
            sum(shares[name]) / len(shares[name]), rel=1e-4
        )


def test_a_number_of_probes_stands_for_a_share_within_a_quarter(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = routed_config(tmp_path, text, routers=["lsh"], key_shares=[0.02, 0.05, 0.1])
    loaded, before = loaded_and_found(cfg)
    curve = torch.tensor([0.01, 0.014, 0.062, 0.09, 0.5])
    monkeypatch.setattr(calibration, "measure_curves", lambda *_: [curve])
    found = match_key_shares(before, cfg, loaded)
    assert found.bucket_routings[0].by_share == {0.05: 2, 0.1: 3}
    assert found.notes[-1:] == [
        "LSH: probes by share of the keys, on training text: 1 for 0.02 (reads 0.014), 2 for 0.05 "
        "(reads 0.062), "
        "3 for 0.1 (reads 0.09); not measured: 0.02"
    ]
    without = replace(cfg, eval=replace(cfg.eval, key_shares=[]))
    assert match_key_shares(before, without, loaded) is before
    assert (1 + calibration.FARTHEST) / (1 - calibration.FARTHEST) < 2, (
        "no number stands for a share and for its double"
    )
