"""Where blocks stand, which of them are seen, and what a block's tokens pool to.

Positions are relative to the start of each sequence: left padding moves nothing. Column block ``c`` is keys ``[c * block,
(c + 1) * block)``; row blocks are counted from the first query that sees a key. A batch without padding has leading size 1.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class RowSpan(NamedTuple):
    """First and last query position of each row block, int64 ``[B | 1, Tr]``; ``last < first`` in an empty block."""

    first: Tensor
    last: Tensor


def row_span(num_queries: int, num_keys: int, block_size: int, kv_start: Tensor | None, device: torch.device) -> RowSpan:
    """Row blocks of ``num_queries`` queries that end where the ``num_keys`` keys end (bottom-right aligned)."""
    start = torch.zeros(1, dtype=torch.long, device=device) if kv_start is None else kv_start.long()
    length = (num_keys - start)[:, None]
    first_query = (num_keys - num_queries - start).clamp(min=0)[:, None]
    row_blocks = -(-num_queries // block_size)
    first = first_query + torch.arange(row_blocks, device=device) * block_size
    return RowSpan(first, torch.minimum(first + block_size, length) - 1)


def visible_blocks(num_queries: int, num_keys: int, block_size: int, kv_start: Tensor | None, device: torch.device) -> Tensor:
    """Blocks that hold a key some query of the row block may see (causal): bool ``[B | 1, 1, Tr, Tc]``."""
    first, last = row_span(num_queries, num_keys, block_size, kv_start, device)
    starts = torch.arange(0, num_keys, block_size, device=device)
    return ((starts <= last[..., None]) & (first <= last)[..., None])[:, None]


def diagonal_blocks(num_queries: int, num_keys: int, block_size: int, kv_start: Tensor | None, device: torch.device) -> Tensor:
    """Visible blocks that hold the row block's own tokens: bool ``[B | 1, 1, Tr, Tc]``.

    One a row, or two where queries start inside a column block. Every query sees a key in them.
    """
    first, _ = row_span(num_queries, num_keys, block_size, kv_start, device)
    cols = torch.arange(-(-num_keys // block_size), device=device)
    own = (cols >= (first // block_size)[..., None])[:, None]
    return own & visible_blocks(num_queries, num_keys, block_size, kv_start, device)


def first_query(num_queries: int, num_keys: int, kv_start: Tensor | None, device: torch.device) -> Tensor | None:
    """Index of the first query that sees a key, int64 ``[B | 1]``; None when that is query 0 everywhere."""
    if kv_start is None and num_queries <= num_keys:
        return None
    start = torch.zeros(1, dtype=torch.long, device=device) if kv_start is None else kv_start.long()
    return (start - (num_keys - num_queries)).clamp(min=0)


def aligned_blocks(x: Tensor, start: Tensor | None, block_size: int) -> Tensor:
    """Tokens from ``start`` on, cut into blocks.

    Parameters
    ----------
    x : ``[B, H, N, D]``.
    start : int64 ``[B | 1]``, first token of each sequence; None: 0.

    Returns
    -------
    Tensor
        ``[B, H, T, block_size, D]``, a view where ``N`` is whole blocks and ``start`` None. Past a sequence's end its
        last token is repeated, which leaves maxima and minima of a partial block as they are.
    """
    tokens = x.shape[2]
    blocks = -(-tokens // block_size)
    if start is not None or tokens % block_size:
        start = torch.zeros(1, dtype=torch.long, device=x.device) if start is None else start
        index = (start[:, None] + torch.arange(blocks * block_size, device=x.device)).clamp(max=tokens - 1)
        x = x.gather(2, index[:, None, :, None].expand(x.shape[0], x.shape[1], -1, x.shape[3]))
    return x.unflatten(2, (blocks, block_size))


def pool_blocks(x: Tensor, poolings: list[str], block_size: int, start: Tensor | None = None) -> Tensor:
    """Each block's tokens pooled in each of several ways, concatenated.

    Parameters
    ----------
    x : ``[B, H, N, D]``, any strides; read in its own dtype, averaged in fp32.
    poolings : of ``avg``, ``max``, ``min``, in the order of the result.
    start : int64 ``[B | 1]``, number of padded tokens before each sequence; they enter no block.

    Returns
    -------
    Tensor
        fp32 ``[B, H, T, len(poolings) * D]``, ``T = ceil(N / block_size)``. The last, partial block pools the tokens that
        exist; an empty block (after the end of a shorter sequence) is finite and means nothing.
    """
    if start is None:
        whole = x.shape[2] - x.shape[2] % block_size
        parts = [x[:, :, :whole].unflatten(2, (whole // block_size, block_size))] if whole else []
        if whole < x.shape[2]:
            parts.append(x[:, :, None, whole:])
        return torch.cat([torch.cat([_reduce(part, name) for name in poolings], dim=-1) for part in parts], dim=2)
    blocks = aligned_blocks(x, start, block_size)
    index = torch.arange(blocks.shape[2] * block_size, device=x.device).view(1, -1, block_size)
    real = (index < (x.shape[2] - start)[:, None, None])[:, None, :, :, None]
    return torch.cat([_reduce(blocks, name, real) for name in poolings], dim=-1)


def _reduce(blocks: Tensor, pooling: str, real: Tensor | None = None) -> Tensor:
    if pooling == "max":
        return blocks.amax(dim=3).float()
    if pooling == "min":
        return blocks.amin(dim=3).float()
    if real is None:
        return blocks.mean(dim=3, dtype=torch.float32)
    total = blocks.masked_fill(~real, 0).sum(dim=3, dtype=torch.float32)
    return total / real.sum(dim=3).clamp(min=1)


def block_softmax(logits: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible blocks of each row, 0 elsewhere; a row that sees nothing is all 0, never NaN."""
    lowest = torch.finfo(logits.dtype).min
    return F.softmax(logits.masked_fill(~visible, lowest), dim=-1).masked_fill(~visible, 0)


def sparsity(chosen: Tensor, visible: Tensor) -> Tensor:
    """Share of the causally visible blocks that is not read: a float scalar on the device of ``chosen``.

    ``chosen`` is bool ``[B, H, Tr, Tc]``, or uint8 zooms of that shape: a block at zoom z counts as 1 / z of a block.
    ``visible`` is bool ``[B | 1, 1, Tr, Tc]``.
    """
    seen = visible.expand(chosen.shape)
    read = chosen if chosen.dtype == torch.bool else (1 / chosen.float()).masked_fill(chosen == 0, 0)
    return 1 - (read * seen).sum() / seen.sum().clamp(min=1)
