"""Calibrated thresholds: a given share of the blocks or keys on average, more where it pays and less elsewhere.

Blocks of prompts. Top-k reads the same share of each row in each head. A calibrated policy reads only a part of that share by
top-k, its floor. A threshold adds the blocks with a high score: many where attention is flat, few where it is sharp. A gate has
one threshold for all layers, so that the share is a mean over layers, too. Other scores may differ in scale from layer to
layer, and have a threshold for each (:class:`Allocation`).

The threshold of a row depends on the number ``v`` of its visible blocks, for two reasons. The scores of a row sum to 1, so
those of a longer row are smaller. And the blocks that are always read are a larger part of a shorter row's share: in rows with
``v <= above`` they are all of it. The threshold is

    scale * v ** exponent * (1 - above / v) ** edge_exponent,

fitted on text for a grid of sparsities. It holds for shorter and for longer prompts. It does not depend on later rows, and so
neither does the selection of a row.

Rows of up to ``SHORT_ROWS`` blocks are read whole. A share of few blocks costs them more quality than all other rows. Reading
them whole costs 1 % of the blocks of 8192 tokens, less of longer prompts.

Keys of new tokens. The density of a bucket is the predicted attention of its keys, as a multiple of the mean key's. A query
reads the buckets with the highest density. A threshold decides how dense a bucket must be: one for all layers and heads, for
each of a grid of shares. The dense window comes on top of the share.

Gates and classifiers store their thresholds; ``msattn eval`` measures those of the baselines in the same way.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import numpy as np
import torch
from accelerate.utils import reduce as reduce_over_ranks
from annotated_types import Interval, Len
from torch import Tensor
from torch.nn import functional as F

from msattn.kernels.common.densities import bucket_densities
from msattn.trainer.errors import UserError
from msattn.trainer.methods.base import Scorer
from msattn.trainer.methods.blocks import SINK_AND_LOCAL, AlwaysRead, Candidates, candidate_blocks
from msattn.trainer.methods.buckets import Router
from msattn.trainer.methods.budgets import KeyShare
from msattn.trainer.models.families import num_layers
from msattn.trainer.models.layer_attention import dense_attention
from msattn.trainer.models.tap import LayerInputs, run_tapped
from msattn.trainer.progress import activity

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CALIBRATION_CHUNKS = 8  # chunks that thresholds are measured on
SPARSITIES = tuple(round(0.05 * i, 2) for i in range(1, 20))
LOWEST = -30.0  # log2 of the smallest probability that the histogram resolves
BINS = 1000  # each 0.03 wide in log2
BANDS_PER_OCTAVE = 2  # rows of about as many visible blocks share a histogram
SHORT_ROWS = 16  # visible blocks
SHORTEST_FITTED = 1.1  # rows enter the fit from this multiple of ``above``
PRIOR_FIT = (0.0, -1.0, -0.5)  # log2 of the scale, and the exponents, that the fit tends to where rows have few lengths
PRIOR_WEIGHTS = (0.0, 0.03, 0.03)

KEY_CALIBRATION_CHUNKS = 4
QUERIES = 256  # of each chunk and layer
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
LOWEST_DENSITY, DENSITY_BINS, BINS_OF_OCTAVE = -15, 4000, 100  # histogram of log2 density, from 2^-15 to 2^25
PROBES_AT_ONCE = 64  # buckets that bucket_decode processes at a time
PROBE_LIMIT_FACTOR = 4  # times the number of buckets that hold the share, if all are equally large

Share = Annotated[float, Interval(ge=0, le=1)]


class Allocation(NamedTuple):
    """A way to share out the blocks that are read: ``floor`` is the part of its top-k share that each row reads in any case.

    Below 0.75 late rows of long prompts lose blocks that hold the answer, if layers have thresholds of their own. ``pooled``:
    all layers have the same threshold.
    """

    floor: float = 0.75
    pooled: bool = False


class RowThreshold(NamedTuple):
    """The smallest score that a row selects, without ``above``; see the module's docstring."""

    scale: float
    exponent: float
    edge_exponent: float


@dataclass(frozen=True)
class BlockThresholds:
    """Schema of the result of :func:`calibrate_blocks` in a manifest.

    ``layers`` has a :class:`RowThreshold` for each layer and sparsity, or None where the chunks were too short to measure it.
    """

    floor: Share
    sparsities: list[Share]
    layers: list[list[Annotated[list[Annotated[float, Interval(ge=-1e30, le=1e30)]], Len(3, 3)] | None]]

    def __post_init__(self) -> None:
        if not self.sparsities or sorted(set(self.sparsities)) != self.sparsities or not self.sparsities[0] > 0:
            raise ValueError("sparsities must be positive and increase")
        if any(len(layer) != len(self.sparsities) for layer in self.layers):
            raise ValueError(f"every layer needs {len(self.sparsities)} thresholds, one for each sparsity")
        if any(found is not None and found[0] <= 0 for layer in self.layers for found in layer):
            raise ValueError("thresholds must be positive")


@dataclass(frozen=True)
class FixedThresholds:
    """Schema of the thresholds of gates before version 0.2, for rows of one length."""

    floor: Share
    sparsities: list[Share]
    layers: list[list[Annotated[float, Interval(gt=0, le=1)]]]


class _Histograms(NamedTuple):
    """Histograms of the scores of a layer, by band of rows.

    ``blocks`` are visible blocks by log2 of their score, for each sparsity; those that are read whatever the threshold are in
    the last bin.
    """

    blocks: Tensor  # int64 [S, bands, BINS]
    rows: Tensor  # fp64 [bands], number of rows
    log_visible: Tensor  # fp64 [bands], sum of log2 of their visible blocks

    def plus(self, other: "_Histograms") -> "_Histograms":
        """Returns the sum with the histograms of another chunk, which has other bands if it has another length."""
        bands = max(len(self.rows), len(other.rows))
        return _Histograms(*map(torch.add, self._padded(bands), other._padded(bands)))

    def _padded(self, bands: int) -> "_Histograms":
        missing = bands - len(self.rows)
        return _Histograms(
            F.pad(self.blocks, (0, 0, 0, missing)), F.pad(self.rows, (0, missing)), F.pad(self.log_visible, (0, missing))
        )


@torch.no_grad()
def calibrate_blocks(
    scorers: Mapping[str, "Scorer"],
    teacher: "PreTrainedModel",
    chunks: Iterable[dict[str, Tensor]],
    *,
    always: AlwaysRead = SINK_AND_LOCAL,
    allocation: Allocation | None = None,
) -> dict[str, dict[str, Any]]:
    """Returns thresholds on the scores of each layer for a grid of mean sparsities, of all ``scorers`` in one dense pass.

    The scorers are those of gates (``GateScores``) or of methods without training, by name. ``chunks`` are this rank's items
    ``{"input_ids": int64 [N]}``, from training text and never from test text. ``always`` are the blocks that each row reads in
    any case, ``allocation`` that of all scorers (None: of each its own). The result has, by name, the fields of
    :class:`BlockThresholds`.
    """
    allocations = {name: allocation or allocation_of(scorer) for name, scorer in scorers.items()}
    found: dict[tuple[str, int], _Histograms] = {}
    served = always._replace(short_rows=SHORT_ROWS)

    def dense_attention_with_scores(x: LayerInputs) -> Tensor:
        for name, scorer in scorers.items():
            candidates = candidate_blocks(x.num_queries, x.num_keys, scorer.block_size, x.kv_start, x.q.device, served)
            scores = scorer(x)[..., :-1, :]  # gates score the last row otherwise
            added = block_histograms(scores, candidates.rows(slice(-1)), allocations[name].floor)
            before = found.get((name, x.layer))
            found[name, x.layer] = added if before is None else before.plus(added)
        return dense_attention(x)

    with activity(f"calibrating the thresholds of {', '.join(scorers)}"):
        run_tapped(teacher, dense_attention_with_scores, chunks)
    found = cast(dict, reduce_over_ranks(found, "sum"))  # over ranks
    layers = range(num_layers(teacher.config))
    tables = {}
    for name, (floor, pooled) in allocations.items():
        counts = [found.get((name, layer)) for layer in layers]
        if pooled:
            total = reduce(_Histograms.plus, filter(None, counts))
            counts = [each and total for each in counts]
        fits = [fit_thresholds(each, always) for each in counts]
        tables[name] = {"floor": floor, "sparsities": list(SPARSITIES), "layers": fits}
    return tables


def allocation_of(scorer: "Scorer") -> Allocation:
    """Returns the attribute ``allocation`` of a scorer, or the default without one."""
    return getattr(scorer, "allocation", Allocation())


def block_histograms(scores: Tensor, candidates: Candidates, floor: float) -> _Histograms:
    """Counts the visible blocks of ``scores [B, H, Tr, Tc]`` by their score and the number of visible blocks of their row."""
    ranked = scores.masked_fill(candidates.always, torch.inf).masked_fill(~candidates.visible, 0).sort(-1, True).values
    visible = candidates.row_visible.expand(*scores.shape[:3], 1)
    band = (BANDS_PER_OCTAVE * visible.clamp(min=1).log2()).round().long()
    bands = int(BANDS_PER_OCTAVE * math.log2(scores.shape[3])) + 2
    bins = ((ranked.log2() - LOWEST) * (BINS / -LOWEST)).clamp(0, BINS - 1).long()
    rank = torch.arange(scores.shape[3], device=scores.device)
    forced = candidates.always.sum(-1, keepdim=True)
    blocks = []
    for sparsity in SPARSITIES:
        taken = rank < torch.maximum(candidates.share(floor * (1 - sparsity)), forced)
        place = band * BINS + bins.masked_fill(taken, BINS - 1)
        counts = torch.bincount(place[(rank < visible)].flatten(), minlength=bands * BINS)
        blocks.append(counts.view(bands, BINS))
    rows = torch.bincount(band.flatten(), minlength=bands).double()
    logs = torch.bincount(band.flatten(), visible.clamp(min=1).double().log2().flatten(), minlength=bands)
    return _Histograms(torch.stack(blocks), rows, logs)


def fit_thresholds(counts: _Histograms | None, always: AlwaysRead) -> list[list[float] | None]:
    """Returns the threshold for each of ``SPARSITIES``, as a list: a fit to those of the bands, each in logarithms.

    A band's threshold is the largest one that reads enough of its blocks. None stands for a sparsity at which the blocks that
    are always read are enough in all bands. A layer that is not served has no ``counts``, and no thresholds.
    """
    if counts is None:
        return [None] * len(SPARSITIES)
    counts = _Histograms(*(each.cpu() for each in counts))
    blocks = counts.blocks.flip(2).double()  # highest scores first
    read = blocks.cumsum(2)
    needed = (1 - torch.tensor(SPARSITIES, dtype=torch.float64))[:, None] * read[..., -1]
    bins = torch.searchsorted(read, needed[..., None]).clamp(max=BINS - 1)
    last, more = blocks.gather(2, bins)[..., 0], read.gather(2, bins)[..., 0] - needed
    logs = (LOWEST / BINS) * (bins[..., 0] + 1 - more / last.clamp(min=1))  # scores are spread evenly over a bin
    visible = 2 ** (counts.log_visible / counts.rows.clamp(min=1))
    found: list[list[float] | None] = []
    for sparsity, y, enough in zip(SPARSITIES, logs, needed > read[..., 0], strict=True):
        above = shortest_row(sparsity, always)
        used = enough & (counts.rows > 0) & (visible >= SHORTEST_FITTED * above)
        found.append(_regression(visible[used], y[used], counts.rows[used], above) if used.any() else None)
    return found


def shortest_row(sparsity: float, always: AlwaysRead) -> float:
    """Returns the number of visible blocks up to which the blocks that are always read are the share of a row."""
    return (1 + always.sink_blocks + always.local_blocks) / (1 - sparsity)


def _regression(visible: Tensor, logs: Tensor, rows: Tensor, above: float) -> list[float]:
    """Returns the fields of the :class:`RowThreshold` that fits log2 thresholds of bands best, weighted by their ``rows``."""
    terms = torch.stack([torch.ones_like(visible), visible.log2(), (1 - above / visible).log2()], dim=1)
    prior, weights = (torch.tensor(each, dtype=terms.dtype) for each in (PRIOR_FIT, PRIOR_WEIGHTS))
    weighted = terms * (rows / rows.sum())[:, None]
    log_scale, *exponents = torch.linalg.solve(
        terms.T @ weighted + weights.diag(), weighted.T @ logs + weights * prior
    ).tolist()
    return [float(f"{2**log_scale:.5g}"), *(round(each, 4) for each in exponents)]


def block_threshold(table: Mapping[str, Any], layer: int, sparsity: float) -> RowThreshold | None:
    """Returns the threshold of a layer for any sparsity from 0 (threshold 0) to the largest one of the table.

    Between sparsities of the table, exponents and logarithms of scales are interpolated linearly. None stands for sparsities
    that could not be measured.
    """
    if sparsity == 0:
        return RowThreshold(0.0, 0.0, 0.0)
    grid, fits = [0.0, *table["sparsities"]], [[2.0**LOWEST, 0.0, 0.0], *table["layers"][layer]]
    after = bisect_left(grid, sparsity)
    low, high = fits[after - 1], fits[after]
    if high is None or low is None:
        return None
    share = (sparsity - grid[after - 1]) / (grid[after] - grid[after - 1])
    log_scale, *exponents = (
        (1 - share) * a + share * b for a, b in zip([math.log2(low[0]), *low[1:]], [math.log2(high[0]), *high[1:]], strict=True)
    )
    return RowThreshold(2**log_scale, *exponents)


@dataclass(frozen=True)
class KeyThresholds:
    """Schema of the result of :func:`calibrate_keys` in a manifest."""

    shares: list[Annotated[float, Interval(gt=0, le=1)]]
    densities: list[Annotated[float, Interval(gt=0, lt=2.0**30)]]

    def __post_init__(self) -> None:
        if not self.shares or sorted(set(self.shares)) != self.shares:
            raise ValueError("shares must increase")
        if len(self.densities) != len(self.shares) or sorted(self.densities, reverse=True) != self.densities:
            raise ValueError(f"densities must be {len(self.shares)} numbers that decrease, one for each share")


@torch.no_grad()
def calibrate_keys(
    router: Router,
    teacher: "PreTrainedModel",
    chunks: Iterable[dict[str, Tensor]],
    *,
    recent: int,
    sink: int,
    dense_layers: Iterable[int],
) -> dict[str, Any]:
    """Returns thresholds on the density of buckets for a grid of mean shares of the keys outside the dense window.

    ``router`` are query classifiers, whose scores are probabilities, or decode gates, whose scores become probabilities.
    ``chunks`` are this rank's items ``{"input_ids": int64 [N]}``, from training text and never from test text. ``recent``,
    ``sink`` and ``dense_layers`` are as the router is served; the window of a chunk is at most half of it. The result has
    ``shares``, increasing, and ``densities``, a threshold for each. Raises UserError if the dense window holds every key of the
    chunks.
    """
    layers = set(router.layers) - set(dense_layers) or set(router.layers)
    counts = torch.zeros(DENSITY_BINS, dtype=torch.float64, device=teacher.device)

    def dense_attention_with_counts(x: LayerInputs) -> Tensor:
        if x.layer in layers:
            counts.add_(key_histogram(router, x, min(recent, x.num_keys // 2), sink))
        return dense_attention(x)

    with activity("calibrating the thresholds of bucket densities"):
        run_tapped(teacher, dense_attention_with_counts, chunks)
    counts = cast(Tensor, reduce_over_ranks(counts, "sum"))  # over ranks: integers, so the order does not change the sum
    if not counts.any():
        raise UserError(f"sink={sink}: the calibration needs chunks with keys outside the dense window")
    return {"shares": list(SHARES), "densities": densities_of(counts.cpu())}


def key_histogram(router: Router, x: LayerInputs, recent: int, sink: int) -> Tensor:
    """Counts keys outside the dense window by log2 of their bucket's density, for queries of a prompt.

    Returns float64 ``[DENSITY_BINS]``.
    """
    count = min(QUERIES, x.num_keys - recent)
    positions = torch.linspace(recent, x.num_keys - 1, count, device=x.q.device).round().long()
    (buckets,), num_buckets = router.buckets_of_keys(x)
    far = buckets.clone()
    far[:, :sink] = -1
    scores = router.probabilities(router.scores_at(x, positions, recent))
    sizes = bucket_sizes(buckets, positions, num_buckets)
    bins = ((bucket_densities(scores, sizes).log2() - LOWEST_DENSITY) * BINS_OF_OCTAVE).clamp(0, DENSITY_BINS - 1).long()
    far_sizes = bucket_sizes(far, positions - recent, num_buckets)
    return torch.bincount(bins.flatten(), far_sizes.flatten().double(), minlength=DENSITY_BINS)


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


def densities_of(counts: Tensor) -> list[float]:
    """Returns the largest threshold that reads enough keys for each of ``SHARES``, from their histogram ``[DENSITY_BINS]``."""
    read = counts.flip(0).cumsum(0)
    needed = torch.tensor(SHARES, dtype=torch.float64) * read[-1]
    bins = DENSITY_BINS - 1 - torch.searchsorted(read, needed).clamp(max=DENSITY_BINS - 1)
    return (2.0 ** (LOWEST_DENSITY + bins.double() / BINS_OF_OCTAVE)).tolist()


def key_threshold(table: dict[str, Any], share: float) -> float:
    """Returns the density from which a mean ``share`` of the keys is read, interpolated on logarithmic scales.

    Raises UserError: the table does not cover ``share``.
    """
    shares, densities = table["shares"], table["densities"]
    if not shares[0] <= share <= shares[-1]:
        raise UserError(f"keys={share}: the router is calibrated from {shares[0]} to {shares[-1]}")
    return float(np.exp(np.interp(np.log(float(share)), np.log(shares), np.log(densities))))


def key_share(router: Any, share: float) -> KeyShare:
    """Returns the budget of a router with calibrated ``thresholds`` that reads a mean ``share`` of the keys."""
    return KeyShare(share, key_threshold(router.thresholds, share), most_probes(share, router.num_buckets))


def most_probes(share: float, num_buckets: int) -> int:
    """Returns the number of buckets beyond which a query reads no more, a fixed number as CUDA graphs need."""
    most = PROBE_LIMIT_FACTOR * share * num_buckets
    return min(num_buckets, PROBES_AT_ONCE * math.ceil(most / PROBES_AT_ONCE))
