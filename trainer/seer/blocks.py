"""Positions of row and column blocks, and the blocks that are causally visible.

Positions are relative to the start of each sequence, so left padding does not shift blocks. Column block ``c`` holds keys
``[c * block, (c + 1) * block)``; row blocks are counted from the first query that sees a key. Without padding the leading size
of masks and positions is 1 instead of ``B``.
"""

from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels.common.block_counts import EIGHTHS, blocks_read


class RowSpan(NamedTuple):
    """First and last query position of each row block, int64 ``[B | 1, Tr]``; ``last`` is -1 for an empty block."""

    first: Tensor
    last: Tensor


def row_span(num_queries: int, num_keys: int, block_size: int, kv_start: Tensor | None, device: torch.device) -> RowSpan:
    """Returns the row blocks of the last ``num_queries`` of ``num_keys`` positions (bottom-right aligned)."""
    steps = torch.arange(0, num_queries, block_size, device=device)[None]
    if kv_start is None and num_queries <= num_keys:  # no block is empty, and this form needs fewer kernel launches
        first = steps + (num_keys - num_queries)
        return RowSpan(first, (first + (block_size - 1)).clamp(max=num_keys - 1))
    start = torch.zeros(1, dtype=torch.long, device=device) if kv_start is None else kv_start.long()
    first = steps + (num_keys - num_queries - start).clamp(min=0)[:, None]
    last = torch.minimum(first + block_size, num_keys - start[:, None]) - 1
    return RowSpan(first, last.where(first <= last, -1))


def visible_blocks(num_queries: int, num_keys: int, block_size: int, kv_start: Tensor | None, device: torch.device) -> Tensor:
    """Returns the column blocks with a key that some query of the row block may see: bool ``[B | 1, 1, Tr, Tc]``."""
    return visible_and_diagonal(num_queries, num_keys, block_size, kv_start, device)[0]


def visible_and_diagonal(
    num_queries: int, num_keys: int, block_size: int, kv_start: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns the visible blocks, and the diagonal ones among them: bool ``[B | 1, 1, Tr, Tc]`` each.

    Diagonal blocks hold the row block's own tokens: one per row, or two if its queries start inside a column block. Every query
    sees a key in them.
    """
    rows = row_span(num_queries, num_keys, block_size, kv_start, device)
    starts = torch.arange(0, num_keys, block_size, device=device)
    visible = (starts <= rows.last[..., None])[:, None]
    return visible, visible & (starts + block_size > rows.first[..., None])[:, None]


def last_row(rows: RowSpan) -> Tensor:
    """Returns the index of the row block that holds the last query, int64 ``[B | 1]``; row blocks after it are empty."""
    return rows.last.argmax(1)


class Candidates:
    """Blocks of a layer that a policy selects from.

    Attributes
    ----------
    visible, always : bool ``[B | 1, 1, Tr, Tc]``, the blocks that may be read, and those among them that must be read, at
        least one in each row that sees a key.
    """

    def __init__(self, visible: Tensor, always: Tensor) -> None:
        self.visible, self.always = visible, always
        self._counts: dict[float, Tensor] = {}

    @cached_property
    def num_visible(self) -> Tensor:
        """Number of visible blocks, at least 1: int64 scalar."""
        return self.visible.sum().clamp(min=1)

    def share(self, share: float) -> Tensor:
        """Returns a share of the number of visible blocks of each row, rounded: int32 ``[B | 1, 1, Tr, 1]``."""
        if share not in self._counts:
            self._counts[share] = (self.visible.sum(-1, keepdim=True).double() * share).round().int()
        return self._counts[share]


def candidate_blocks(
    num_queries: int,
    num_keys: int,
    block_size: int,
    kv_start: Tensor | None,
    device: torch.device,
    sink_blocks: int = 0,
    dense_queries: int = 0,
) -> Candidates:
    """Returns the visible blocks, of which some must be read.

    Those are the diagonal ones, the first ``sink_blocks``, and all in the rows of the last ``dense_queries`` queries.

    Without padding the result depends only on shapes and is cached for the other layers, because computing it takes longer than
    the selection.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if kv_start is not None or capturing:  # tensors captured in a CUDA graph have no values until its replay
        return _candidate_blocks(num_queries, num_keys, block_size, kv_start, device, sink_blocks, dense_queries)
    with torch.inference_mode(False):  # a cached inference tensor could not be used in training
        return _unpadded_candidates(num_queries, num_keys, block_size, device, sink_blocks, dense_queries)


@lru_cache(maxsize=4)
def _unpadded_candidates(
    num_queries: int, num_keys: int, block_size: int, device: torch.device, sink_blocks: int, dense_queries: int
) -> Candidates:
    return _candidate_blocks(num_queries, num_keys, block_size, None, device, sink_blocks, dense_queries)


def _candidate_blocks(
    num_queries: int,
    num_keys: int,
    block_size: int,
    kv_start: Tensor | None,
    device: torch.device,
    sink_blocks: int,
    dense_queries: int,
) -> Candidates:
    visible, always = visible_and_diagonal(num_queries, num_keys, block_size, kv_start, device)
    always[..., :sink_blocks] = visible[..., :sink_blocks]
    if dense_queries:
        last = row_span(num_queries, num_keys, block_size, kv_start, device).last
        is_dense = last > last.amax(1, keepdim=True) - dense_queries
        always |= visible & is_dense[:, None, :, None]
    return Candidates(visible, always)


def normalize_rows(scores: Tensor) -> Tensor:
    """Divides rows by their sums; a row of zeros stays zero."""
    return scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def aligned_blocks(x: Tensor, start: Tensor | None, block_size: int) -> Tensor:
    """Splits the tokens from ``start`` on into blocks.

    Parameters
    ----------
    x : ``[B, H, N, D]``.
    start : int64 ``[B | 1]``, index of the first token of each sequence; None: 0.

    Returns
    -------
    Tensor
        ``[B, H, T, block_size, D]``, a view if ``N`` is a multiple of ``block_size`` and ``start`` is None. A partial block is
        filled with the last token, which leaves its maximum and minimum unchanged.
    """
    tokens = x.shape[2]
    blocks = -(-tokens // block_size)
    if start is not None or tokens % block_size:
        start = torch.zeros(1, dtype=torch.long, device=x.device) if start is None else start
        index = (start[:, None] + torch.arange(blocks * block_size, device=x.device)).clamp(max=tokens - 1)
        x = x.gather(2, index[:, None, :, None].expand(x.shape[0], x.shape[1], -1, x.shape[3]))
    return x.unflatten(2, (blocks, block_size))


def sparsity(selected: Tensor, candidates: Candidates) -> Tensor:
    """Returns the share of the causally visible blocks that is not read: a float scalar on the device of ``selected``.

    ``selected`` is bool ``[B, H, Tr, Tc]``, or uint8 zooms of that shape: a block at zoom z counts as 1 / z of a block.
    """
    copies = selected.numel() // candidates.visible.numel()
    return 1 - blocks_read(selected) / (candidates.num_visible * (EIGHTHS * copies))
