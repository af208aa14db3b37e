"""Thresholds that read a given share of blocks on average: budgets go to the rows and heads that need them.

Top-k gives each row of each head the same share. Here a row keeps only a part of that share for itself (``FLOOR``); for
the rest, one threshold a layer on the gate's block probabilities decides, so that blocks are read where they hold most: many
in early rows, few where attention is sharp. Which threshold reads which share is measured on text, once, and kept with
the gate. A row's choice hangs on no later row.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import reduce
from torch import Tensor

from msattn.trainer.models.tap import LayerInputs, dense_attention, run_backbone, tap
from msattn.trainer.seer.blocks import candidates
from msattn.trainer.seer.policies import TopK

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from msattn.trainer.seer.gate import Gate

CALIBRATION_CHUNKS = 4  # chunks that thresholds are measured on
FLOOR = 0.75  # with less, late rows of long prompts lose blocks that answers are read from; 1 is top-k
SPARSITIES = tuple(round(0.05 * i, 2) for i in range(1, 20))
LOWEST = -30.0  # log2 of the smallest probability that is told apart
BINS = 3000  # a hundredth of a factor of two each


@torch.no_grad()
def calibrate(
    gate: "Gate", teacher: "PreTrainedModel", chunks: Iterable[dict[str, Tensor]], floor: float = FLOOR
) -> dict[str, Any]:
    """Thresholds of each layer for a grid of mean sparsities.

    Parameters
    ----------
    chunks : items ``{"input_ids": int64 [N]}``, this process's share of them; text the gate may know, and no test should.
    floor : part of its share that each row keeps, in [0, 1].

    Returns
    -------
    dict
        ``floor``; ``sparsities``, increasing; ``layers``: for each layer, a threshold for each sparsity.
    """
    kept = [floor_of(sparsity, floor) for sparsity in SPARSITIES]
    counts = torch.zeros(len(gate.layers), len(SPARSITIES), BINS, dtype=torch.float64, device=teacher.device)

    def attend(x: LayerInputs) -> Tensor:
        place = (x.num_queries, x.num_keys, gate.cfg.block_size, x.kv_start, x.q.device)
        scores, among = gate.scores(x), candidates(*place)
        counts[x.layer] += torch.stack([histogram(scores, among.visible, keep(scores, among)) for keep in kept])
        return dense_attention(x)

    with tap(teacher, attend):
        for chunk in chunks:
            run_backbone(teacher, chunk["input_ids"][None].to(teacher.device))
    counts = cast(Tensor, reduce(counts, "sum"))  # over processes: whole numbers, the same in any order
    return {"floor": floor, "sparsities": list(SPARSITIES), "layers": [thresholds(found) for found in counts.cpu()]}


def floor_of(sparsity: float, floor: float) -> TopK:
    """What each row reads whatever the threshold."""
    return TopK(1 - (1 - sparsity) * floor)


def histogram(scores: Tensor, visible: Tensor, always: Tensor) -> Tensor:
    """Visible blocks by the logarithm of their score: counts, float64 ``[BINS]``; those of ``always`` are in the last bin."""
    logs = scores.masked_fill(always, 1).log2().clamp_(LOWEST, 0)
    return logs.masked_fill_(~visible, LOWEST - 1).histc(BINS, LOWEST, 0).double()  # out of range is not counted


def thresholds(counts: Tensor) -> list[float]:
    """Largest threshold that reads enough, for each of ``SPARSITIES``; a row of ``counts [len(SPARSITIES), BINS]`` each."""
    read = counts.flip(1).cumsum(1)
    needed = (1 - torch.tensor(SPARSITIES, dtype=torch.float64))[:, None] * read[:, -1:]
    bins = BINS - 1 - torch.searchsorted(read, needed)[:, 0]
    return (2.0 ** (LOWEST + bins * (-LOWEST / BINS))).tolist()


def threshold_at(table: dict[str, Any], layer: int, sparsity: float) -> float:
    """The threshold of one layer for any sparsity up to the grid's last, by interpolation of its logarithm; 0 at 0."""
    if sparsity == 0:
        return 0.0
    grid = torch.tensor([0.0, *table["sparsities"]])
    logs = torch.tensor([2.0**LOWEST, *table["layers"][layer]]).log2()
    after = int(torch.searchsorted(grid, sparsity))
    before = after - 1
    share = (sparsity - grid[before]) / (grid[after] - grid[before])
    return float(2 ** torch.lerp(logs[before], logs[after], share))
