"""Thresholds that read a given share of blocks on average: budgets go to the rows and heads that need them.

Top-k gives each row of each head the same share. One threshold on a layer's block probabilities reads the same number of
blocks where they hold more: many in early rows and flat heads, few where attention is sharp. Which threshold reads which
share is measured on text, once, and kept with the gate.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from msattn.trainer.seer.blocks import diagonal_blocks, visible_blocks
from msattn.trainer.tap import LayerInputs, dense_attention, run_backbone, tap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from msattn.trainer.seer.gate import Gate

SPARSITIES = tuple(round(0.05 * i, 2) for i in range(1, 20))
LOWEST = -30.0  # log2 of the smallest probability that is told apart
BINS = 3000  # a hundredth of a factor of two each


@torch.no_grad()
def calibrate(gate: "Gate", teacher: "PreTrainedModel", chunks: Iterable[dict[str, Tensor]]) -> dict[str, list]:
    """Thresholds of each layer for a grid of mean sparsities.

    Parameters
    ----------
    chunks : items ``{"input_ids": int64 [N]}``; text the gate may know, and no test should.

    Returns
    -------
    dict
        ``sparsities``, increasing, and ``layers``: for each layer, a threshold for each sparsity.
    """
    counts = [torch.zeros(BINS, dtype=torch.float64, device=teacher.device) for _ in gate.layers]

    def attend(x: LayerInputs) -> Tensor:
        counts[x.layer] += histogram(gate.scores(x), x, gate.cfg.block_size)
        return dense_attention(x)

    with tap(teacher, attend):
        for chunk in chunks:
            run_backbone(teacher, chunk["input_ids"][None].to(teacher.device))
    return {"sparsities": list(SPARSITIES), "layers": [thresholds(found.cpu()) for found in counts]}


def histogram(scores: Tensor, x: LayerInputs, block_size: int) -> Tensor:
    """How many visible blocks have a score in each bin of its logarithm, float64 ``[BINS]``; the diagonal is in the last."""
    place = (x.num_queries, x.num_keys, block_size, x.kv_start, x.q.device)
    logs = scores.masked_fill(diagonal_blocks(*place), 1).log2().clamp_(LOWEST, 0)
    logs = logs.masked_fill_(~visible_blocks(*place), LOWEST - 1)  # out of range: not counted
    return logs.histc(BINS, LOWEST, 0).double()


def thresholds(counts: Tensor) -> list[float]:
    """For each of ``SPARSITIES`` the largest lower edge of a bin above which at least the share to be read lies."""
    read = counts.flip(0).cumsum(0)
    needed = (1 - torch.tensor(SPARSITIES, dtype=torch.float64)) * read[-1]
    bins = BINS - 1 - torch.searchsorted(read, needed)
    return (2.0 ** (LOWEST + bins * (-LOWEST / BINS))).tolist()


def threshold_at(table: dict[str, list], layer: int, sparsity: float) -> float:
    """The threshold of one layer for any sparsity up to the grid's last, by interpolation of its logarithm; 0 at 0."""
    if sparsity == 0:
        return 0.0
    grid = torch.tensor([0.0, *table["sparsities"]])
    logs = torch.tensor([2.0**LOWEST, *table["layers"][layer]]).log2()
    after = int(torch.searchsorted(grid, sparsity))
    before = after - 1
    share = (sparsity - grid[before]) / (grid[after] - grid[before])
    return float(2 ** torch.lerp(logs[before], logs[after], share))
