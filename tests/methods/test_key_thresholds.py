"""Shares of the keys: densities of buckets, calibrated thresholds, and what a decoded query then
reads.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from msattn.kernels.common.densities import bucket_densities, dense_buckets
from msattn.trainer.errors import UserError
from msattn.trainer.methods.buckets import bucket_sizes
from msattn.trainer.methods.budgets import KeyThresholds, most_probes
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.key_thresholds import SHARES, calibrate_keys, densities_of
from msattn.trainer.serving.attach import attach
from tests.factory import inputs_of_layers, random_partition, random_tokens, tiny_model

BUCKETS, RECENT, SINK = 12, 16, 1


def classifiers() -> QModel:
    """Random classifiers, sharp enough that their probabilities differ."""
    qmodel = QModel(random_partition(BUCKETS, seed=3), 2, 24)
    with torch.no_grad():
        qmodel.weight_out.mul_(8)
    return qmodel.requires_grad_(False).eval()


def test_density_is_the_attention_of_a_key_over_that_of_the_mean_key() -> None:
    scores, sizes = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([50, 10, 0, 40])
    densities = bucket_densities(scores, sizes)
    torch.testing.assert_close(densities, torch.tensor([1.0, 3.0, 0.0, 0.0]))
    # summed over a query group
    torch.testing.assert_close(bucket_densities(4 * scores, sizes), densities)
    assert dense_buckets(densities, 2.0, 3).tolist().count(-1) == 2
    assert set(dense_buckets(densities, 1.0, 4).tolist()) == {0, 1, -1}
    # no more than asked for, the densest first
    assert dense_buckets(densities, 0.5, 1).tolist() == [1]


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=30), st.data())
def test_bucket_sizes_count_the_keys_up_to_each_query(
    buckets: list[int], data: st.DataObject
) -> None:
    where = st.lists(st.integers(0, len(buckets) - 1), min_size=1, unique=True)
    positions = sorted(data.draw(where))
    sizes = bucket_sizes(torch.tensor([buckets], dtype=torch.int32), torch.tensor(positions), 4)
    assert sizes[:, 0].tolist() == [
        [buckets[: at + 1].count(each) for each in range(4)] for at in positions
    ]


def test_thresholds_are_interpolated_and_decrease() -> None:
    counts = torch.zeros(4000, dtype=torch.float64)
    counts[1500:1700] = 1  # densities 1 to 4, equally many keys in each hundredth of an octave
    densities = densities_of(counts)
    assert densities == sorted(densities, reverse=True)
    assert densities[SHARES.index(0.5)] == pytest.approx(2, rel=0.01)
    table = KeyThresholds([0.01, 0.04], [8.0, 2.0])
    assert table.density(0.02) == pytest.approx(4)
    for share in (0.005, 0.05):
        with pytest.raises(
            UserError, match=f"^keys={share}: the router is calibrated from 0.01 to 0.04$"
        ):
            table.density(share)


@pytest.mark.parametrize(
    ("share", "buckets", "most"),
    [(0.05, 12, 12), (0.01, 1024, 64), (0.05, 1024, 256), (0.5, 1024, 1024)],
)
def test_the_number_of_probes_is_bounded(share: float, buckets: int, most: int) -> None:
    assert most_probes(share, buckets) == most


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_the_mean_share_of_the_keys_is_the_requested_one(share: float) -> None:
    """The keys are counted one by one for every query, which needs none of the calibration's
    code.
    """
    model, ids, router = tiny_model(), random_tokens(3, 200), classifiers()
    chunks = [{"input_ids": row} for row in ids]
    threshold = calibrate_keys(
        router, model, chunks, recent=RECENT, sink=SINK, dense_layers=[0]
    ).density(share)
    read = total = 0
    reads = set()
    for row in ids:
        x = inputs_of_layers(model, row[None])[1]
        buckets = router.assign(1, x.k_nope, x.k)[0]
        for at in range(RECENT, 200):
            scores = router.scores(1, x.q_nope[:, :, at : at + 1], x.q[:, :, at : at + 1])[0]
            for head in range(2):
                seen, far = buckets[head, : at + 1], buckets[head, SINK : at - RECENT + 1]
                per_key = torch.stack(
                    [scores[head, each] / (seen == each).sum() for each in range(BUCKETS)]
                )
                dense = per_key >= threshold * scores[head].sum() / len(seen)
                here = int(dense[far.long()].sum())
                read, total = read + here, total + len(far)
                reads.add(here)
    assert read / total == pytest.approx(share, rel=0.03)
    assert len(reads) > 10  # queries differ


@torch.no_grad()
def test_decoding_reads_the_dense_buckets_of_each_layer() -> None:
    """Against the share of the keys that the definition gives for the one token that is decoded."""
    model, ids, router = tiny_model(), random_tokens(2, 200), classifiers()
    router.thresholds = calibrate_keys(
        router, model, [{"input_ids": ids[0]}], recent=RECENT, sink=SINK, dense_layers=[]
    )
    options: dict[str, Any] = {"recent": RECENT, "sink": SINK, "dense_layers": (), "dense_below": 0}

    def decoded(**settings: Any) -> tuple[Tensor, float]:
        with attach(model, qmodel=router, **options, **settings) as sparse:
            cache = model(ids[:, :-1]).past_key_values
            return model(ids[:, -1:], past_key_values=cache).logits, sparse.stats()["selectivity"]

    _, window = decoded(probes=0)
    _, few = decoded(keys=0.05)
    _, many = decoded(keys=0.4)
    assert window < few < many < 1
    router.thresholds = KeyThresholds([0.05], [2.0**-20])
    everything, share = decoded(keys=0.05)
    assert share == 1
    torch.testing.assert_close(everything, model(ids).logits[:, -1:], rtol=1e-4, atol=1e-4)
    router.thresholds = KeyThresholds([0.05], [2.0**20])
    assert decoded(keys=0.05)[1] == window


def test_a_window_that_holds_every_key_leaves_nothing_to_calibrate() -> None:
    chunks = [{"input_ids": random_tokens(1, 20)[0]}]
    with pytest.raises(
        UserError, match="sink=20: the calibration needs chunks with keys outside the dense window"
    ):
        calibrate_keys(classifiers(), tiny_model(), chunks, recent=4, sink=20, dense_layers=())
