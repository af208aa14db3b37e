"""Calibrated thresholds of block scores, which read a given share of the blocks on average and more
where it helps most.

Top-k reads the same share of each row in each head. A calibrated policy reads only a part of that
share by top-k, its floor. A threshold adds the blocks with a high score: many where attention is
flat, few where it is sharp. A gate has one threshold for all layers, so that the share is a mean
over layers, too. Other scores may differ in scale from layer to layer, and have a threshold for
each (:class:`Allocation`).

The threshold of a row depends on the number ``v`` of its visible blocks, for two reasons. The
scores of a row sum to 1, so those of a longer row are smaller. And the blocks that are always read
are more than the share of a short row: rows with ``v <= above`` read nothing else
(:func:`shortest_row`). The threshold is

    scale * v ** exponent * (1 - above / v) ** edge_exponent,

fitted to text for a grid of sparsities. It holds for shorter and for longer prompts, and for the
chunks of a prompt: neither it nor the scores of a gate depend on later rows.

Rows of up to ``SHORT_ROWS`` row blocks in the first eighth of a prompt are read in full, because
sparse attention changes predictions most there. This adds 1 % of the blocks in prompts of up to
8192 tokens, less in longer ones. In chunks the eighth is that of the keys so far, since how many
will follow is not known: each chunk then reads the share, but a first chunk of less than 8192
tokens reads less of these rows than one pass.

Gates store thresholds of each of their scores; ``msattn eval`` measures thresholds of the baselines
in the same way.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

import torch
from accelerate.utils import reduce as reduce_over_ranks
from annotated_types import Interval, Len
from torch import Tensor
from torch.nn import functional as F

from msattn.trainer.config.schema import Share
from msattn.trainer.config.sizes import BlockSizes
from msattn.trainer.methods.base import Scorer
from msattn.trainer.methods.blocks import (
    SINK_AND_LOCAL,
    AlwaysRead,
    RowCandidates,
    candidate_blocks,
)
from msattn.trainer.models.families import num_layers
from msattn.trainer.models.layer_attention import LayerInputs
from msattn.trainer.models.tap import visit_layers
from msattn.trainer.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CALIBRATION_CHUNKS = 8  # chunks that thresholds are measured on
SPARSITIES = tuple(round(0.05 * i, 2) for i in range(1, 20))
LOWEST = -30.0  # log2 of the smallest probability that the histogram resolves
BINS = 1000  # each 0.03 wide in log2
BANDS_PER_OCTAVE = 2  # rows of about as many visible blocks share a histogram
SHORT_ROWS = 16  # visible blocks of as many keys as a row block has queries
MADE_UP_FOR = 1.5
SHORTEST_FITTED = 1.1  # rows enter the fit from this multiple of ``above``
# log2 of the scale, and the exponents, that the fit tends to where rows have few lengths
PRIOR_FIT = (0.0, -1.0, -0.5)
PRIOR_WEIGHTS = (0.0, 0.03, 0.03)


class Allocation(NamedTuple):
    """Allocation of the blocks that are read: ``floor`` is the part of its top-k share that each
    row always reads.

    If layers have separate thresholds, values below 0.75 make late rows of long prompts lose blocks
    with the answer. ``pooled``: all layers have the same threshold.
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
    """Thresholds for a grid of mean sparsities, as :func:`calibrate_blocks` measures them and
    manifests hold them.

    ``layers`` has a :class:`RowThreshold` for each layer and sparsity, or None where the chunks
    were too short to measure it.
    """

    floor: Share
    sparsities: list[Share]
    layers: list[
        list[Annotated[list[Annotated[float, Interval(ge=-1e30, le=1e30)]], Len(3, 3)] | None]
    ]

    def __post_init__(self) -> None:
        if (
            not self.sparsities
            or sorted(set(self.sparsities)) != self.sparsities
            or not self.sparsities[0] > 0
        ):
            raise ValueError("sparsities must be positive and increase")
        if any(len(layer) != len(self.sparsities) for layer in self.layers):
            raise ValueError(
                f"every layer needs {len(self.sparsities)} thresholds, one for each sparsity"
            )
        if any(found is not None and found[0] <= 0 for layer in self.layers for found in layer):
            raise ValueError("thresholds must be positive")

    def row_threshold(self, layer: int, sparsity: float) -> RowThreshold | None:
        """Returns the threshold of a layer for any sparsity from 0 (threshold 0) to the largest one
        of the table.

        Between sparsities of the table, exponents and logarithms of scales are interpolated
        linearly. None stands for sparsities that could not be measured.
        """
        if sparsity == 0:
            return RowThreshold(0.0, 0.0, 0.0)
        grid, fits = [0.0, *self.sparsities], [[2.0**LOWEST, 0.0, 0.0], *self.layers[layer]]
        after = bisect_left(grid, sparsity)
        low, high = fits[after - 1], fits[after]
        if high is None or low is None:
            return None
        share = (sparsity - grid[after - 1]) / (grid[after] - grid[after - 1])
        log_scale, *exponents = (
            (1 - share) * a + share * b
            for a, b in zip(
                [math.log2(low[0]), *low[1:]], [math.log2(high[0]), *high[1:]], strict=True
            )
        )
        return RowThreshold(2**log_scale, *exponents)


class _Histograms(NamedTuple):
    """Histograms of the scores of a layer, by band of rows.

    ``blocks`` are visible blocks by log2 of their score, for each sparsity; those that are read
    whatever the threshold are in the last bin.
    """

    blocks: Tensor  # int64 [S, bands, BINS]
    rows: Tensor  # fp64 [bands], number of rows
    log_visible: Tensor  # fp64 [bands], sum of log2 of their visible blocks

    def plus(self, other: "_Histograms") -> "_Histograms":
        """Returns the sum with the histograms of another chunk, whose bands differ if its length
        differs.
        """
        bands = max(len(self.rows), len(other.rows))
        return _Histograms(*map(torch.add, self._padded(bands), other._padded(bands)))

    def _padded(self, bands: int) -> "_Histograms":
        missing = bands - len(self.rows)
        return _Histograms(
            F.pad(self.blocks, (0, 0, 0, missing)),
            F.pad(self.rows, (0, missing)),
            F.pad(self.log_visible, (0, missing)),
        )


def calibrate_blocks(
    scorers: Mapping[str, "Scorer"],
    teacher: "PreTrainedModel",
    chunks: Iterable[dict[str, Tensor]],
    *,
    always: AlwaysRead = SINK_AND_LOCAL,
    allocation: Allocation | None = None,
) -> dict[str, BlockThresholds]:
    """Returns thresholds on the scores of each layer for a grid of mean sparsities, of all
    ``scorers`` in one dense pass.

    Parameters
    ----------
    scorers : scorers of gates (``GateScores``) or training-free methods, by name.
    teacher : the model, with dense attention.
    chunks : this rank's items ``{"input_ids": int64 [N]}``, from training text and never from test
        text.
    always : blocks that each row always reads.
    allocation : applies to all scorers; None: each uses its own.
    """
    allocations = {name: allocation or allocation_of(scorer) for name, scorer in scorers.items()}
    found: dict[tuple[str, int], _Histograms] = {}
    served = always._replace(short_rows=SHORT_ROWS)

    def count(x: LayerInputs) -> None:
        for name, scorer in scorers.items():
            candidates = candidate_blocks(x, scorer.sizes, served)
            scores = scorer(x)[..., :-1, :]  # gates score the last row otherwise
            added = block_histograms(scores, candidates.rows(slice(-1)), allocations[name].floor)
            before = found.get((name, x.layer))
            found[name, x.layer] = added if before is None else before.plus(added)

    what = f"calibrating the thresholds of {', '.join(scorers)}, chunks"
    with Progress() as progress:
        visit_layers(teacher, count, progress.track(list(chunks), description=what))
    found = cast(dict, reduce_over_ranks(found, "sum"))  # over ranks
    layers = range(num_layers(teacher.config))
    tables = {}
    for name, (floor, pooled) in allocations.items():
        counts = [found.get((name, layer)) for layer in layers]
        if pooled:
            total = reduce(_Histograms.plus, filter(None, counts))
            counts = [each and total for each in counts]
        fits = [fit_thresholds(each, always, scorers[name].sizes) for each in counts]
        tables[name] = BlockThresholds(floor, list(SPARSITIES), fits)
    return tables


def allocation_of(scorer: "Scorer") -> Allocation:
    """Returns the attribute ``allocation`` of a scorer, or the default without one."""
    return getattr(scorer, "allocation", Allocation())


def block_histograms(scores: Tensor, candidates: RowCandidates, floor: float) -> _Histograms:
    """Counts the visible blocks of ``scores [B, H, Tr, Tc]`` by their score and the number of
    visible blocks of their row.
    """
    ranked = (
        scores.masked_fill(candidates.always, torch.inf)
        .masked_fill(~candidates.visible, 0)
        .sort(-1, True)
        .values
    )
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
    logs = torch.bincount(
        band.flatten(), visible.clamp(min=1).double().log2().flatten(), minlength=bands
    )
    return _Histograms(torch.stack(blocks), rows, logs)


def fit_thresholds(
    counts: _Histograms | None, always: AlwaysRead, sizes: BlockSizes
) -> list[list[float] | None]:
    """Returns the threshold for each of ``SPARSITIES`` as a list, fitted in logarithms to the
    thresholds of the bands.

    A band's threshold is the largest one that reads enough of its blocks. None means that the
    always-read blocks are enough in all bands at this sparsity. A layer that is not served has no
    ``counts`` and no thresholds.
    """
    if counts is None:
        return [None] * len(SPARSITIES)
    counts = _Histograms(*(each.cpu() for each in counts))
    blocks = counts.blocks.flip(2).double()  # highest scores first
    read = blocks.cumsum(2)
    needed = (1 - torch.tensor(SPARSITIES, dtype=torch.float64))[:, None] * read[..., -1]
    bins = torch.searchsorted(read, needed[..., None]).clamp(max=BINS - 1)
    last, more = blocks.gather(2, bins)[..., 0], read.gather(2, bins)[..., 0] - needed
    # scores are spread evenly over a bin
    logs = (LOWEST / BINS) * (bins[..., 0] + 1 - more / last.clamp(min=1))
    visible = 2 ** (counts.log_visible / counts.rows.clamp(min=1))
    found: list[list[float] | None] = []
    for sparsity, y, enough in zip(SPARSITIES, logs, needed > read[..., 0], strict=True):
        above = shortest_row(sparsity, always, sizes)
        used = enough & (counts.rows > 0) & (visible >= SHORTEST_FITTED * above)
        found.append(
            _regression(visible[used], y[used], counts.rows[used], above) if used.any() else None
        )
    return found


def shortest_row(sparsity: float, always: AlwaysRead, sizes: BlockSizes) -> float:
    """Returns the number of visible blocks of keys up to which a row reads nothing but the blocks
    that are always read.

    In rows of up to ``least / share`` blocks they exceed the row's share. The next rows, half as
    many, read nothing else either, which compensates most of the excess, so that prompts of 2048
    tokens read what is asked for, too.
    """
    least = sizes.ratio * (1 + always.sink_blocks + always.local_blocks)
    return least + MADE_UP_FOR * (least / (1 - sparsity) - least)


def _regression(visible: Tensor, logs: Tensor, rows: Tensor, above: float) -> list[float]:
    """Returns the fields of the :class:`RowThreshold` that fits log2 thresholds of bands best,
    weighted by their ``rows``.
    """
    terms = torch.stack(
        [torch.ones_like(visible), visible.log2(), (1 - above / visible).log2()], dim=1
    )
    prior, weights = (torch.tensor(each, dtype=terms.dtype) for each in (PRIOR_FIT, PRIOR_WEIGHTS))
    weighted = terms * (rows / rows.sum())[:, None]
    log_scale, *exponents = torch.linalg.solve(
        terms.T @ weighted + weights.diag(), weighted.T @ logs + weights * prior
    ).tolist()
    return [float(f"{2**log_scale:.5g}"), *(round(each, 4) for each in exponents)]
