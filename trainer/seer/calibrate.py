"""Calibrated thresholds, which select a given share of the blocks on average, and more in rows and heads that need more.

Top-k reads the same share in each row of each head. Here top-k reads only a part of that share in each row (``FLOOR``), and
one threshold per layer adds the blocks whose score is high: many in early rows, few where attention is sharp. They are
measured once on text, for a grid of sparsities. A gate stores its thresholds; ``msattn eval`` measures those of the baselines
in the same way. The selection of a row does not depend on later rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
from accelerate.utils import reduce
from annotated_types import Interval
from torch import Tensor

from msattn.trainer.models.families import num_layers
from msattn.trainer.models.tap import LayerInputs, dense_attention, run_backbone, tap
from msattn.trainer.progress import activity
from msattn.trainer.seer.blocks import candidate_blocks
from msattn.trainer.seer.policies import TopK

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from msattn.trainer.seer.select import Scorer

CALIBRATION_CHUNKS = 4  # chunks that thresholds are measured on
FLOOR = 0.75  # with less, late rows of long prompts lose blocks that hold the answer; 1 is plain top-k
SPARSITIES = tuple(round(0.05 * i, 2) for i in range(1, 20))
LOWEST = -30.0  # log2 of the smallest probability that the histogram resolves
BINS = 3000  # each 0.01 wide in log2


Share = Annotated[float, Interval(ge=0, le=1)]


@dataclass(frozen=True)
class Thresholds:
    """Schema of the result of :func:`calibrate` in a manifest."""

    floor: Share
    sparsities: list[Share]
    layers: list[list[Annotated[float, Interval(gt=0, le=1)]]]

    def __post_init__(self) -> None:
        if not self.sparsities or sorted(set(self.sparsities)) != self.sparsities or not self.sparsities[0] > 0:
            raise ValueError("sparsities must be positive and increase")
        if any(len(layer) != len(self.sparsities) for layer in self.layers):
            raise ValueError(f"every layer needs {len(self.sparsities)} thresholds, one for each sparsity")


@torch.no_grad()
def calibrate(
    scorer: "Scorer", teacher: "PreTrainedModel", chunks: Iterable[dict[str, Tensor]], floor: float = FLOOR
) -> dict[str, Any]:
    """Returns thresholds on the scores of each layer for a grid of mean sparsities.

    Parameters
    ----------
    scorer : source of the block scores, of a gate (:class:`msattn.trainer.seer.select.GateScores`) or a baseline.
    chunks : this rank's items ``{"input_ids": int64 [N]}``, from training text and never from test text.
    floor : part of its top-k share that each row reads regardless of the threshold, in [0, 1].

    Returns
    -------
    dict
        ``floor``; ``sparsities``, increasing; ``layers``: for each layer, a threshold per sparsity.
    """
    floors = [floor_policy(sparsity, floor) for sparsity in SPARSITIES]
    counts = torch.zeros(num_layers(teacher.config), len(SPARSITIES), BINS, dtype=torch.float64, device=teacher.device)

    def dense_attention_with_histograms(x: LayerInputs) -> Tensor:
        scores = scorer(x)
        candidates = candidate_blocks(x.num_queries, x.num_keys, scorer.block_size, x.kv_start, x.q.device)
        counts[x.layer] += torch.stack([histogram(scores, candidates.visible, read(scores, candidates)) for read in floors])
        return dense_attention(x)

    with tap(teacher, dense_attention_with_histograms), activity("calibrating the thresholds of block scores"):
        for chunk in chunks:
            run_backbone(teacher, chunk["input_ids"][None].to(teacher.device))
    counts = cast(Tensor, reduce(counts, "sum"))  # over ranks: integers, so the order does not change the sum
    layers = [thresholds(layer_counts) for layer_counts in counts.cpu()]
    return {"floor": floor, "sparsities": list(SPARSITIES), "layers": layers}


def floor_policy(sparsity: float, floor: float) -> TopK:
    """Returns the top-k policy for the part of its share that each row reads regardless of the threshold."""
    return TopK(1 - (1 - sparsity) * floor)


def histogram(scores: Tensor, visible: Tensor, always: Tensor) -> Tensor:
    """Counts visible blocks by log2 of their score: float64 ``[BINS]``. Blocks in ``always`` are counted in the last bin."""
    logs = scores.masked_fill(always, 1).log2().clamp_(LOWEST, 0)
    return logs.masked_fill_(~visible, LOWEST - 1).histc(BINS, LOWEST, 0).double()  # histc leaves out values below LOWEST


def thresholds(counts: Tensor) -> list[float]:
    """Returns the largest threshold that reads enough blocks for each of ``SPARSITIES``.

    Each row of ``counts``, float64 ``[len(SPARSITIES), BINS]``, is the histogram for one sparsity.
    """
    read = counts.flip(1).cumsum(1)
    needed = (1 - torch.tensor(SPARSITIES, dtype=torch.float64))[:, None] * read[:, -1:]
    bins = BINS - 1 - torch.searchsorted(read, needed)[:, 0]
    return (2.0 ** (LOWEST + bins * (-LOWEST / BINS))).tolist()


def threshold_at(table: dict[str, Any], layer: int, sparsity: float) -> float:
    """Returns the threshold of a layer for any sparsity from 0 (threshold 0) to the largest calibrated one.

    Between calibrated sparsities the logarithm of the threshold is interpolated linearly.
    """
    if sparsity == 0:
        return 0.0
    grid = torch.tensor([0.0, *table["sparsities"]])
    logs = torch.tensor([2.0**LOWEST, *table["layers"][layer]]).log2()
    after = int(torch.searchsorted(grid, sparsity))
    before = after - 1
    share = (sparsity - grid[before]) / (grid[after] - grid[before])
    return float(2 ** torch.lerp(logs[before], logs[after], share))
