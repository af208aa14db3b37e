"""Calibrated thresholds of routers, which read a given share of the keys on average and more where
attention is flat.

The density of a bucket is the predicted attention per key, divided by the mean over all keys. A
query reads the buckets with the highest density. A threshold, shared by all layers and heads,
decides how dense a bucket must be; there is one threshold for each share of a grid. The dense
window comes on top of the share. Query classifiers and decode gates store their thresholds.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
from accelerate.utils import reduce as reduce_over_ranks
from torch import Tensor

from msattn.kernels.common.densities import bucket_densities
from msattn.trainer.errors import UserError
from msattn.trainer.methods.buckets import Router, bucket_sizes
from msattn.trainer.methods.budgets import KeyThresholds
from msattn.trainer.models.layer_attention import LayerInputs
from msattn.trainer.models.tap import visit_layers
from msattn.trainer.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY_CALIBRATION_CHUNKS = 4
QUERIES = 256  # queries per chunk and layer
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
# histogram of log2 density, from 2^-15 to 2^25
LOWEST_DENSITY, DENSITY_BINS, BINS_OF_OCTAVE = -15, 4000, 100


def calibrate_keys(
    router: Router,
    teacher: "PreTrainedModel",
    chunks: Iterable[dict[str, Tensor]],
    *,
    recent: int,
    sink: int,
    dense_layers: Iterable[int],
) -> KeyThresholds:
    """Returns thresholds on the density of buckets for a grid of mean shares of the keys outside
    the dense window.

    ``router`` are query classifiers, whose scores are probabilities, or decode gates, whose scores
    become probabilities. ``chunks`` are this rank's items ``{"input_ids": int64 [N]}``, from
    training text and never from test text. ``recent``, ``sink`` and ``dense_layers`` are as the
    router is served; the window of a chunk is at most half of it. Raises UserError if the dense
    window holds every key of the chunks.
    """
    layers = set(router.layers) - set(dense_layers) or set(router.layers)
    counts = torch.zeros(DENSITY_BINS, dtype=torch.float64, device=teacher.device)

    def count(x: LayerInputs) -> None:
        counts.add_(key_histogram(router, x, min(recent, x.num_keys // 2), sink))

    what = "calibrating the thresholds of bucket densities, chunks"
    with Progress() as progress:
        visit_layers(teacher, count, progress.track(list(chunks), description=what), layers)
    # over ranks: integers, so the order does not change the sum
    counts = cast(Tensor, reduce_over_ranks(counts, "sum"))
    if not counts.any():
        raise UserError(
            f"sink={sink}: the calibration needs chunks with keys outside the dense window"
        )
    return KeyThresholds(list(SHARES), densities_of(counts.cpu()))


def key_histogram(router: Router, x: LayerInputs, recent: int, sink: int) -> Tensor:
    """Counts keys outside the dense window by log2 of their bucket's density, for queries of a
    prompt.

    Returns float64 ``[DENSITY_BINS]``.
    """
    count = min(QUERIES, x.num_keys - recent)
    positions = torch.linspace(recent, x.num_keys - 1, count, device=x.q.device).round().long()
    (buckets,), num_buckets = router.buckets_of_keys(x)
    far = buckets.clone()
    far[:, :sink] = -1
    scores = router.probabilities(router.scores_at(x, positions, recent))
    sizes = bucket_sizes(buckets, positions, num_buckets)
    bins = (
        ((bucket_densities(scores, sizes).log2() - LOWEST_DENSITY) * BINS_OF_OCTAVE)
        .clamp(0, DENSITY_BINS - 1)
        .long()
    )
    far_sizes = bucket_sizes(far, positions - recent, num_buckets)
    return torch.bincount(bins.flatten(), far_sizes.flatten().double(), minlength=DENSITY_BINS)


def densities_of(counts: Tensor) -> list[float]:
    """Returns the largest threshold that reads enough keys for each of ``SHARES``, from their
    histogram ``[DENSITY_BINS]``.
    """
    read = counts.flip(0).cumsum(0)
    needed = torch.tensor(SHARES, dtype=torch.float64) * read[-1]
    bins = DENSITY_BINS - 1 - torch.searchsorted(read, needed).clamp(max=DENSITY_BINS - 1)
    return (2.0 ** (LOWEST_DENSITY + bins.double() / BINS_OF_OCTAVE)).tolist()
