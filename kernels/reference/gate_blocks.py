"""Reference of ``gate_blocks``."""

import math
from typing import Any

import torch
from torch import Tensor

from msattn.kernels.common.block_bits import pack_blocks
from msattn.kernels.reference.best_blocks import best_blocks
from msattn.kernels.reference.gate_scores import gate_scores, row_blocks


def gate_blocks(
    q: Tensor,
    *tensors: Tensor | None,
    counts: Tensor,
    local: Tensor,
    sink_blocks: int = 0,
    threshold: float = math.inf,
    exponent: float = 0.0,
    edge_exponent: float = 0.0,
    above: float = 0.0,
    **gate: Any,
) -> Tensor:
    """Reference of :func:`msattn.kernels.gate_blocks.gate_blocks`."""
    scores = gate_scores(q, *tensors, **gate)  # type: ignore[arg-type]
    sizes = gate.get("block_size", 64), gate.get("key_block_size")
    *_, visible = row_blocks(q, gate["num_keys"], *sizes, gate.get("kv_start"))
    visible = visible[:, None]
    cols = torch.arange(scores.shape[3], device=scores.device)
    always = visible & ((cols < sink_blocks) | (cols >= local))
    limit = threshold, exponent, edge_exponent, above
    return pack_blocks(best_blocks(scores, counts, visible, always, *limit))
