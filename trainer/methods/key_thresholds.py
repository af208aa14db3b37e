"""Calibrated thresholds, with which a decoded query reads a given share of the keys on average instead of a number of buckets.

Buckets differ in size and queries in how sure their router is. A query reads the buckets whose keys it is predicted to
attend to most: those with the highest density, the predicted attention of a key as a multiple of the mean key's. One
threshold for all layers and heads decides how dense a bucket must be, so a head reads many keys where that pays and few
elsewhere. It is measured once on text, for a grid of shares. The dense window comes on top of the share.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np
import torch
from accelerate.utils import reduce
from annotated_types import Interval
from torch import Tensor

from msattn.kernels.common.densities import bucket_densities
from msattn.trainer.errors import UserError
from msattn.trainer.methods.buckets import Router
from msattn.trainer.methods.pages import PageRouter, far_probabilities
from msattn.trainer.methods.probing import bucket_scores, buckets_of_keys
from msattn.trainer.models.tap import LayerInputs, dense_attention, run_backbone, tap
from msattn.trainer.progress import activity

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CALIBRATION_CHUNKS = 4  # chunks that thresholds are measured on
QUERIES = 256  # of each chunk and layer
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
LOWEST, BINS, BINS_OF_OCTAVE = -15, 4000, 100  # histogram of log2 density, from 2^-15 to 2^25
PROBES_AT_ONCE = 64  # buckets that bucket_decode processes at a time
MOST_PROBES = 4  # times the number of buckets that hold the share, if all are equally large


@dataclass(frozen=True)
class Thresholds:
    """Schema of the result of :func:`calibrate` in a manifest."""

    shares: list[Annotated[float, Interval(gt=0, le=1)]]
    densities: list[Annotated[float, Interval(gt=0, lt=2.0**30)]]

    def __post_init__(self) -> None:
        if not self.shares or sorted(set(self.shares)) != self.shares:
            raise ValueError("shares must increase")
        if len(self.densities) != len(self.shares) or sorted(self.densities, reverse=True) != self.densities:
            raise ValueError(f"densities must be {len(self.shares)} numbers that decrease, one for each share")


@torch.no_grad()
def calibrate(
    router: Router | PageRouter,
    teacher: "PreTrainedModel",
    chunks: Iterable[dict[str, Tensor]],
    *,
    recent: int,
    sink: int,
    dense_layers: Iterable[int],
) -> dict[str, Any]:
    """Returns thresholds on the density of buckets for a grid of mean shares of the keys outside the dense window.

    Parameters
    ----------
    router : query classifiers, whose scores are probabilities, or decode gates, whose scores become probabilities.
    chunks : this rank's items ``{"input_ids": int64 [N]}``, from training text and never from test text.
    recent, sink, dense_layers : as the router is served. The window of a chunk is at most half of it.

    Returns
    -------
    dict
        ``shares``, increasing; ``densities``: a threshold for each share.

    Raises
    ------
    UserError : the dense window holds every key of the chunks.
    """
    layers = set(router.layers) - set(dense_layers) or set(router.layers)
    counts = torch.zeros(BINS, dtype=torch.float64, device=teacher.device)

    def dense_attention_with_histograms(x: LayerInputs) -> Tensor:
        if x.layer in layers:
            counts.add_(histogram(router, x, min(recent, x.num_keys // 2), sink))
        return dense_attention(x)

    with tap(teacher, dense_attention_with_histograms), activity("calibrating the thresholds of bucket densities"):
        for chunk in chunks:
            run_backbone(teacher, chunk["input_ids"][None].to(teacher.device))
    counts = cast(Tensor, reduce(counts, "sum"))  # over ranks: integers, so the order does not change the sum
    if not counts.any():
        raise UserError(f"sink={sink}: the calibration needs chunks with keys outside the dense window")
    return {"shares": list(SHARES), "densities": thresholds(counts.cpu())}


def histogram(router: Router | PageRouter, x: LayerInputs, recent: int, sink: int) -> Tensor:
    """Counts keys outside the dense window by log2 of their bucket's density, for queries of a prompt: float64 ``[BINS]``."""
    count = min(QUERIES, x.num_keys - recent)
    positions = torch.linspace(recent, x.num_keys - 1, count, device=x.q.device).round().long()
    (buckets,), num_buckets = buckets_of_keys(x, router)
    far = buckets.clone()
    far[:, :sink] = -1
    scores = bucket_scores(x, router, positions, recent)
    scores = far_probabilities(scores) if isinstance(router, PageRouter) else scores
    sizes = bucket_sizes(buckets, positions, num_buckets)
    bins = ((bucket_densities(scores, sizes).log2() - LOWEST) * BINS_OF_OCTAVE).clamp(0, BINS - 1).long()
    far_sizes = bucket_sizes(far, positions - recent, num_buckets)
    return torch.bincount(bins.flatten(), far_sizes.flatten().double(), minlength=BINS)


def bucket_sizes(buckets: Tensor, positions: Tensor, num_buckets: int) -> Tensor:
    """Returns the number of keys up to each of ``positions`` in each bucket: int64 ``[n, Hkv, C]``.

    ``buckets`` int32 ``[Hkv, N]`` are those of the keys, -1 for keys that do not count; ``positions`` int64 ``[n]`` increase.
    """
    keys = torch.arange(buckets.shape[1], device=buckets.device)
    first_query = torch.searchsorted(positions, keys)  # that sees the key
    entries = first_query * (num_buckets + 1) + torch.where(buckets < 0, num_buckets, buckets)
    counts = entries.new_zeros(len(buckets), (len(positions) + 1) * (num_buckets + 1))
    counts.scatter_add_(1, entries, torch.ones_like(entries))
    return counts.unflatten(1, (-1, num_buckets + 1))[:, :-1, :-1].cumsum(1).transpose(0, 1)


def thresholds(counts: Tensor) -> list[float]:
    """Returns the largest threshold that reads enough keys for each of ``SHARES``, from their histogram ``[BINS]``."""
    read = counts.flip(0).cumsum(0)
    needed = torch.tensor(SHARES, dtype=torch.float64) * read[-1]
    bins = BINS - 1 - torch.searchsorted(read, needed).clamp(max=BINS - 1)
    return (2.0 ** (LOWEST + bins.double() / BINS_OF_OCTAVE)).tolist()


def threshold_at(table: dict[str, Any], share: float) -> float:
    """Returns the density from which a mean ``share`` of the keys is read, interpolated on logarithmic scales.

    Raises
    ------
    UserError : the table does not cover ``share``.
    """
    shares, densities = table["shares"], table["densities"]
    if not shares[0] <= share <= shares[-1]:
        raise UserError(f"keys={share}: the router is calibrated from {shares[0]} to {shares[-1]}")
    return float(np.exp(np.interp(np.log(float(share)), np.log(shares), np.log(densities))))


def most_probes(share: float, num_buckets: int) -> int:
    """Returns the number of buckets beyond which a query reads no more, a fixed number as CUDA graphs need."""
    expected = MOST_PROBES * share * num_buckets
    return min(num_buckets, PROBES_AT_ONCE * math.ceil(expected / PROBES_AT_ONCE))
