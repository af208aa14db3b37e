"""Where blocks stand, and which of them are seen.

Positions are relative to the start of each sequence: left padding moves nothing. Column block ``c`` is keys ``[c * block,
(c + 1) * block)``; row blocks are counted from the first query that sees a key. A batch without padding has leading size 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class RowSpan(NamedTuple):
    """First and last query position of each row block, int64 ``[B | 1, Tr]``; the last one is -1 in an empty block."""

    first: Tensor
    last: Tensor


def row_span(num_queries: int, num_keys: int, block_size: int, kv_start: Tensor | None, device: torch.device) -> RowSpan:
    """Row blocks of ``num_queries`` queries that end where the ``num_keys`` keys end (bottom-right aligned)."""
    steps = torch.arange(0, num_queries, block_size, device=device)[None]
    if kv_start is None and num_queries <= num_keys:  # no empty block: fewer launches, which is most of the time this takes
        first = steps + (num_keys - num_queries)
        return RowSpan(first, (first + (block_size - 1)).clamp(max=num_keys - 1))
    start = torch.zeros(1, dtype=torch.long, device=device) if kv_start is None else kv_start.long()
    first = steps + (num_keys - num_queries - start).clamp(min=0)[:, None]
    last = torch.minimum(first + block_size, num_keys - start[:, None]) - 1
    return RowSpan(first, last.where(first <= last, -1))


def visible_blocks(num_queries: int, num_keys: int, block_size: int, kv_start: Tensor | None, device: torch.device) -> Tensor:
    """Blocks that hold a key some query of the row block may see (causal): bool ``[B | 1, 1, Tr, Tc]``."""
    return _visible(row_span(num_queries, num_keys, block_size, kv_start, device), num_keys, block_size)


def diagonal_blocks(num_queries: int, num_keys: int, block_size: int, kv_start: Tensor | None, device: torch.device) -> Tensor:
    """Visible blocks that hold the row block's own tokens: bool ``[B | 1, 1, Tr, Tc]``.

    One a row, or two where queries start inside a column block. Every query sees a key in them.
    """
    return visible_and_diagonal(num_queries, num_keys, block_size, kv_start, device)[1]


def visible_and_diagonal(
    num_queries: int, num_keys: int, block_size: int, kv_start: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """What :func:`visible_blocks` and :func:`diagonal_blocks` give, at the price of one."""
    rows = row_span(num_queries, num_keys, block_size, kv_start, device)
    visible = _visible(rows, num_keys, block_size)
    ends = torch.arange(block_size, num_keys + block_size, block_size, device=device)
    return visible, visible & (ends > rows.first[..., None])[:, None]


def _visible(rows: RowSpan, num_keys: int, block_size: int) -> Tensor:
    return (torch.arange(0, num_keys, block_size, device=rows.last.device) <= rows.last[..., None])[:, None]


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


def sparsity(chosen: Tensor, visible: Tensor) -> Tensor:
    """Share of the causally visible blocks that is not read: a float scalar on the device of ``chosen``.

    ``chosen`` is bool ``[B, H, Tr, Tc]``, or uint8 zooms of that shape: a block at zoom z counts as 1 / z of a block.
    ``visible`` is bool ``[B | 1, 1, Tr, Tc]``; nothing else is chosen.
    """
    read = chosen if chosen.dtype == torch.bool else (1 / chosen.float()).masked_fill(chosen == 0, 0)
    seen = visible.sum() * (chosen.numel() // visible.numel())
    return 1 - read.sum() / seen.clamp(min=1)
