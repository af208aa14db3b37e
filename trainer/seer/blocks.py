"""Where blocks stand, and which of them are seen.

Positions are relative to the start of each sequence: left padding moves nothing. Column block ``c`` is keys ``[c * block,
(c + 1) * block)``; row blocks are counted from the first query that sees a key. A batch without padding has leading size 1.
"""

from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels.common.block_counts import WHOLE, blocks_read


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
    return visible_and_diagonal(num_queries, num_keys, block_size, kv_start, device)[0]


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
    starts = torch.arange(0, num_keys, block_size, device=device)
    visible = (starts <= rows.last[..., None])[:, None]
    return visible, visible & (starts + block_size > rows.first[..., None])[:, None]


class Candidates:
    """The blocks of a layer that a policy chooses from.

    Attributes
    ----------
    visible, always : bool ``[B | 1, 1, Tr, Tc]``: those that may be read, and those of them that must be, one in
        each row that sees a key.
    """

    def __init__(self, visible: Tensor, always: Tensor) -> None:
        self.visible, self.always = visible, always
        self._counts: dict[float, Tensor] = {}

    @cached_property
    def seen(self) -> Tensor:
        """How many are visible, 1 at least: int64 scalar."""
        return self.visible.sum().clamp(min=1)

    def share(self, share: float) -> Tensor:
        """How many blocks of each row are a share of the visible ones, rounded: int32 ``[B | 1, 1, Tr, 1]``."""
        if share not in self._counts:
            self._counts[share] = (self.visible.sum(-1, keepdim=True).double() * share).round().int()
        return self._counts[share]


def candidates(
    num_queries: int, num_keys: int, block_size: int, kv_start: Tensor | None, device: torch.device, sink_blocks: int = 0
) -> Candidates:
    """Visible blocks, of which the diagonal ones and the first ``sink_blocks`` must be read.

    Without padding shapes say it all: layers of one shape share the result, which would take longer than choosing blocks.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if kv_start is not None or capturing:  # what a graph makes is not there before its replay
        return _candidates(num_queries, num_keys, block_size, kv_start, device, sink_blocks)
    with torch.inference_mode(False):  # so that any later pass may use it
        return _unpadded(num_queries, num_keys, block_size, device, sink_blocks)


@lru_cache(maxsize=4)
def _unpadded(num_queries: int, num_keys: int, block_size: int, device: torch.device, sink_blocks: int) -> Candidates:
    return _candidates(num_queries, num_keys, block_size, None, device, sink_blocks)


def _candidates(
    num_queries: int, num_keys: int, block_size: int, kv_start: Tensor | None, device: torch.device, sink_blocks: int
) -> Candidates:
    visible, always = visible_and_diagonal(num_queries, num_keys, block_size, kv_start, device)
    always[..., :sink_blocks] = visible[..., :sink_blocks]
    return Candidates(visible, always)


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


def sparsity(chosen: Tensor, among: Candidates) -> Tensor:
    """Share of the causally visible blocks that is not read: a float scalar on the device of ``chosen``.

    ``chosen`` is bool ``[B, H, Tr, Tc]``, or uint8 zooms of that shape: a block at zoom z counts as 1 / z of a block.
    """
    copies = chosen.numel() // among.visible.numel()
    return 1 - blocks_read(chosen) / (among.seen * (WHOLE * copies))
