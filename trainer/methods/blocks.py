"""Positions of row and column blocks, and the blocks that are causally visible.

Positions are relative to the start of each sequence, so left padding does not shift blocks. Column
block ``c`` holds keys ``[c * size, (c + 1) * size)``, where ``size``, the keys of a block, is at
most the number of its queries. Row blocks are counted from the first query that sees a key. Without
padding the leading size of masks and positions is 1 instead of ``B``.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from msattn.kernels.best_blocks import best_blocks
from msattn.kernels.common.block_counts import add_share_left_out
from msattn.trainer.config.sizes import BlockSizes

if TYPE_CHECKING:
    from msattn.trainer.models.layer_attention import LayerInputs


class RowSpan(NamedTuple):
    """First and last query position of each row block, int64 ``[B | 1, Tr]``; ``last`` is -1 for an
    empty block.
    """

    first: Tensor
    last: Tensor


def row_span(
    num_queries: int, num_keys: int, block_size: int, kv_start: Tensor | None, device: torch.device
) -> RowSpan:
    """Returns the row blocks of the last ``num_queries`` of ``num_keys`` positions (bottom-right
    aligned).
    """
    steps = torch.arange(0, num_queries, block_size, device=device)[None]
    # no block is empty, and this form needs fewer kernel launches
    if kv_start is None and num_queries <= num_keys:
        first = steps + (num_keys - num_queries)
        return RowSpan(first, (first + (block_size - 1)).clamp(max=num_keys - 1))
    start = torch.zeros(1, dtype=torch.long, device=device) if kv_start is None else kv_start.long()
    first = steps + (num_keys - num_queries - start).clamp(min=0)[:, None]
    last = torch.minimum(first + block_size, num_keys - start[:, None]) - 1
    return RowSpan(first, last.where(first <= last, -1))


def visible_blocks(x: "LayerInputs", sizes: BlockSizes) -> Tensor:
    """Returns the column blocks with a key that some query of the row block may see: bool
    ``[B | 1, 1, Tr, Tc]``.
    """
    rows = row_span(x.num_queries, x.num_keys, sizes.queries, x.kv_start, x.q.device)
    return _visible(rows, x.num_keys, sizes.keys)


def _visible(rows: RowSpan, num_keys: int, size: int) -> Tensor:
    starts = torch.arange(0, num_keys, size, device=rows.last.device)
    return (starts <= rows.last[..., None])[:, None]


class RowCandidates:
    """Candidate blocks of each row block.

    The first ``ends`` of the ``cols`` column blocks are visible; of these the first ``sink_blocks``
    and those from ``local`` on must be read. ``ends`` and ``local`` are int32
    ``[B | 1, 1, Tr, 1]``; masks, bool ``[B | 1, 1, Tr, Tc]``, are made when they are asked for.
    """

    def __init__(self, ends: Tensor, local: Tensor, sink_blocks: int, cols: int) -> None:
        self.ends, self.local, self.sink_blocks, self.cols = ends, local, sink_blocks, cols
        self._counts: dict[float, Tensor] = {}

    # A cached inference tensor could not be used in training.

    @cached_property
    def visible(self) -> Tensor:
        """The blocks that may be read."""
        with torch.inference_mode(False):
            return torch.arange(self.cols, device=self.ends.device) < self.ends

    @cached_property
    def always(self) -> Tensor:
        """Those among them that must be read, at least one in each row that sees a key."""
        with torch.inference_mode(False):
            columns = torch.arange(self.cols, device=self.ends.device)
            return self.visible & ((columns < self.sink_blocks) | (columns >= self.local))

    @cached_property
    def row_visible(self) -> Tensor:
        """Number of visible blocks of each row: int64 ``[B | 1, 1, Tr, 1]``."""
        return self.ends.long()

    @cached_property
    def num_visible(self) -> Tensor:
        """Number of visible blocks, at least 1: int64 scalar."""
        return self.row_visible.sum().clamp(min=1)

    def rows(self, chosen: slice) -> "RowCandidates":
        """Returns the candidates of some of the rows."""
        ends, local = (x[:, :, chosen] for x in (self.ends, self.local))
        return RowCandidates(ends, local, self.sink_blocks, self.cols)

    def share(self, share: float) -> Tensor:
        """Returns a share of the number of visible blocks of each row, rounded: int32
        ``[B | 1, 1, Tr, 1]``.
        """
        if share not in self._counts:
            self._counts[share] = (self.row_visible.double() * share).round().int()
        return self._counts[share]

    def number(self, blocks: int) -> Tensor:
        """Returns the same number of blocks for each row: int32 ``[B | 1, 1, Tr, 1]``."""
        return torch.full_like(self.row_visible, blocks, dtype=torch.int32)

    def best(self, scores: Tensor, counts: Tensor, **limit: Any) -> Tensor:
        """Selects the ``counts`` best blocks of each row, those that must be read first, and all
        that reach the ``limit``.
        """
        return best_blocks(scores, counts, self.visible, self.always, **limit)


SHORT_PART = 8  # rows may be short in the first one of this many parts of the keys so far


class AlwaysRead(NamedTuple):
    """Numbers of the visible blocks that every row reads in addition to its diagonal ones.

    All of them count blocks of as many keys as a row block has queries, also where blocks of keys
    are smaller.
    """

    # leading blocks: pretrained models put much of their attention on the first tokens
    sink_blocks: int = 1
    local_blocks: int = 1  # blocks before the diagonal ones
    dense_queries: int = 0  # last queries whose rows read every block
    # visible blocks up to which a row reads all of them, if it is in the first part of its sequence
    short_rows: int = 0

    def num_short_rows(self, blocks: int) -> int:
        """Returns the number of visible blocks up to which rows of a sequence of ``blocks`` read
        all of them.
        """
        return min(self.short_rows, blocks // SHORT_PART)


SINK_AND_LOCAL = AlwaysRead()


class _Captured(threading.local):
    """Candidates of the graph that the current thread captures, keyed by numbers of queries and
    keys and by settings.
    """

    candidates: dict[tuple, RowCandidates] | None = None


_captured = _Captured()


@contextmanager
def shared_by_layers() -> Iterator[None]:
    """Shares candidates between all layers of a graph that is captured in the block."""
    _captured.candidates = {}
    try:
        yield
    finally:
        _captured.candidates = None


def candidate_blocks(
    x: "LayerInputs", sizes: BlockSizes, always: AlwaysRead = SINK_AND_LOCAL
) -> RowCandidates:
    """Returns the visible blocks, of which the diagonal ones and those in ``always`` must be read.

    Without padding the result depends only on shapes. It is then cached for the other layers,
    because computing it takes longer than the selection.
    """
    key, device = (x.num_queries, x.num_keys, sizes, always), x.q.device
    if x.kv_start is not None:
        return _candidate_blocks(*key, device, x.kv_start)
    # without values until the graph is replayed
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        found = {} if _captured.candidates is None else _captured.candidates
        if key not in found:
            found[key] = _candidate_blocks(*key, device)
        return found[key]
    with torch.inference_mode(False):  # a cached inference tensor could not be used in training
        return _cached_blocks(*key, device)


def _candidate_blocks(
    num_queries: int,
    num_keys: int,
    sizes: BlockSizes,
    always: AlwaysRead,
    device: torch.device,
    kv_start: Tensor | None = None,
) -> RowCandidates:
    """Computes the result of :func:`candidate_blocks` without a cache.

    Diagonal blocks hold the row block's own tokens: ``sizes.ratio`` per row, or one more if its
    queries start inside a column block. Every query sees a key in them.
    """
    rows = row_span(num_queries, num_keys, sizes.queries, kv_start, device)
    ends = (rows.last + sizes.keys) // sizes.keys  # 0 for an empty row
    local = (rows.first - always.local_blocks * sizes.queries).clamp(min=0) // sizes.keys
    if always.dense_queries:
        is_dense = rows.last > rows.last.amax(1, keepdim=True) - always.dense_queries
        local = local.masked_fill(is_dense, 0)
    if always.short_rows:
        is_short = ends <= always.short_rows * sizes.ratio
        is_short &= SHORT_PART * ends <= ends.amax(1, keepdim=True)
        local = local.masked_fill(is_short, 0)
    ends, local = (x.int()[:, None, :, None] for x in (ends, local))
    return RowCandidates(ends, local, always.sink_blocks * sizes.ratio, -(-num_keys // sizes.keys))


_cached_blocks = lru_cache(maxsize=4)(_candidate_blocks)


def normalize_rows(scores: Tensor) -> Tensor:
    """Divides the rows of block scores ``[..., Tc]``, fp32, by their sums; a row of zeros stays
    zero.
    """
    return scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def aligned_blocks(x: Tensor, start: Tensor | None, block_size: int) -> Tensor:
    """Splits the tokens of queries, keys or values into blocks, after the padding of each sequence.

    Parameters
    ----------
    x : Tensor ``[B, H, N, D]``, of any dtype.
    start : Tensor int64 ``[B | 1]``, the first token that is not padding; None: 0.
    block_size : number of tokens in a block.

    Returns
    -------
    Tensor ``[B, H, T, block_size, D]``
        A view if ``N`` is a multiple of ``block_size`` and ``start`` is None. A partial block is
        filled with the last token, which leaves its maximum and minimum unchanged.
    """
    tokens = x.shape[2]
    blocks = -(-tokens // block_size)
    if start is not None or tokens % block_size:
        start = torch.zeros(1, dtype=torch.long, device=x.device) if start is None else start
        index = (start[:, None] + torch.arange(blocks * block_size, device=x.device)).clamp(
            max=tokens - 1
        )
        x = x.gather(2, index[:, None, :, None].expand(x.shape[0], x.shape[1], -1, x.shape[3]))
    return x.unflatten(2, (blocks, block_size))


def sparsity(selected: Tensor, candidates: RowCandidates, total: Tensor | None = None) -> Tensor:
    """Returns the share of the causally visible blocks that is not read, or adds it to ``total``: a
    float64 scalar.

    ``selected`` is bool ``[B, H, Tr, Tc]``, uint8 zooms of that shape (a block at zoom z counts as
    1 / z of a block), or the bits of a mask, int32 ``[B, H, Tr, ceil(Tc / 32)]``.
    """
    total = selected.new_zeros((), dtype=torch.float64) if total is None else total
    copies = selected.shape[0] * selected.shape[1] // candidates.row_visible.shape[0]
    add_share_left_out(total, selected, candidates.num_visible, copies)
    return total


def sparsity_in_reach(blocks: int, always: AlwaysRead) -> float:
    """Returns the share of the visible keys that are not always read, in a prompt of ``blocks`` row
    blocks.
    """
    least, short = 1 + always.sink_blocks + always.local_blocks, always.num_short_rows(blocks)
    read = sum(
        visible if visible <= short else min(visible, least) for visible in range(1, blocks + 1)
    )
    return 1 - read / (blocks * (blocks + 1) / 2)
