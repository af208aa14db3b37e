"""Reference of ``pool_blocks``."""

import torch
from torch import Tensor

from msattn.kernels.common.checks import statistics_dtype


def pool_blocks(
    x: Tensor,
    poolings: list[str],
    *,
    block_size: int = 64,
    start: Tensor | None = None,
    rotated: Tensor | None = None,
) -> Tensor:
    """Reference of :func:`msattn.kernels.pool_blocks.pool_blocks`."""
    if rotated is not None:
        parts = ((x, poolings), (rotated, ["avg"]))
        return torch.cat(
            [pool_blocks(part, names, block_size=block_size, start=start) for part, names in parts],
            dim=-1,
        )
    tokens = x.shape[2]
    if start is None:
        whole = tokens - tokens % block_size
        parts = [x[:, :, :whole].unflatten(2, (-1, block_size))] if whole else []
        if whole < tokens:
            parts.append(x[:, :, None, whole:])
        return torch.cat(
            [torch.cat([_reduce(part, name) for name in poolings], dim=-1) for part in parts], dim=2
        )
    if not all(0 <= first <= tokens for first in start.tolist()):
        raise ValueError(
            f"start={start.tolist()}: expected positions in the sequence, 0 to {tokens}"
        )
    index = start.long()[:, None] + torch.arange(
        -(-tokens // block_size) * block_size, device=x.device
    )
    # [B | 1, 1, T, block, 1]
    real = (index < tokens)[:, None, :, None].unflatten(2, (-1, block_size))
    index = index.clamp(max=tokens - 1)[:, None, :, None].expand(
        x.shape[0], x.shape[1], -1, x.shape[3]
    )
    # the last token is repeated past the end
    blocks = x.gather(2, index).unflatten(2, (-1, block_size))
    pooled = torch.cat([_reduce(blocks, name, real) for name in poolings], dim=-1)
    return pooled.masked_fill(~real.any(3), 0)


def _reduce(blocks: Tensor, pooling: str, real: Tensor | None = None) -> Tensor:
    """Reduces ``blocks [B, H, T, n, D]`` over n; only ``real`` entries count."""
    dtype = statistics_dtype(blocks)
    if pooling == "max":
        return blocks.amax(dim=3).to(dtype)
    if pooling == "min":
        return blocks.amin(dim=3).to(dtype)
    if real is None:
        return blocks.mean(dim=3, dtype=dtype)
    return blocks.masked_fill(~real, 0).sum(dim=3, dtype=dtype) / real.sum(dim=3).clamp(min=1)
