"""Multi-scale attention in PyTorch, by gathering means, and its gradient.

Means of K and V are appended to them. The result has the *entries*
``[keys | means of 2 | of 4 | of 8]``, counted from the start of a sequence. A block at zoom 8 has
an eighth as many entries as keys. Blocks are listed in parts of an eighth of a block, so that the
length of a list is proportional to the number of entries at every zoom.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels.common.checks import resolve_scale, resolve_softcap, statistics_dtype
from msattn.kernels.common.choices import ZOOMS
from msattn.kernels.reference.common import (
    masked_attention,
    masked_attention_backward,
    row_lists,
    sequences,
)
from msattn.kernels.types import SparseAttention

PARTS = max(ZOOMS)  # parts of a block


class _Rows(NamedTuple):
    """R row blocks and the S entries that each reads.

    Sequences and entries are counted within a part of the batch.
    """

    b: Tensor  # [R, 1]
    h: Tensor  # query heads [R, 1]
    i: Tensor  # queries [R, block]; the last one repeated past the end
    j: Tensor  # entries [R, S] of `_with_means`
    exists: Tensor  # mask of the queries that exist [R, block]
    seen: Tensor  # mask of the entries that they see [R, block, S]
    bias: Tensor  # log of the number of keys in an entry [R, 1, S]


def multiscale_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    zoom: Tensor,
    *,
    block_size: int = 64,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    kv_start: Tensor | None = None,
) -> SparseAttention:
    """Reference of :func:`msattn.kernels.multiscale_attention`.

    It gathers the selected keys and means, and supports autograd.
    """
    _check_values(zoom)
    scale, softcap = resolve_scale(scale, q.shape[3]), resolve_softcap(softcap)
    statistics = statistics_dtype(q)
    group = q.shape[1] // k.shape[1]
    zoom_of = zoom.expand(q.shape[0], -1, -1, -1)
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=statistics)
    for batch, first_query, first_key, delta in sequences(q, k, kv_start, causal):
        queries, keys, values = (
            q[batch, :, first_query:],
            *(_with_means(x[batch, :, first_key:]) for x in (k, v)),
        )
        part_out, part_lse = out[batch, :, first_query:], lse[batch, :, first_query:]
        for x in _selected_chunks(
            queries, k.shape[2] - first_key, zoom_of[batch], block_size, causal, delta
        ):
            read, place = (x.b, x.h // group, x.j), (x.b, x.h, x.i)
            row_q, row_k, row_v = (
                tensor[at].to(statistics)
                for tensor, at in ((queries, place), (keys, read), (values, read))
            )
            rows_out, rows_lse = masked_attention(
                row_q, row_k, row_v, x.seen, scale, x.bias, softcap
            )
            rows = tuple(index.expand_as(x.i)[x.exists] for index in place)
            part_out[rows] = rows_out[x.exists].to(q.dtype)
            part_lse[rows] = rows_lse[x.exists]
    return SparseAttention(out, lse)


def multiscale_attention_backward(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    zoom: Tensor,
    *,
    block_size: int,
    causal: bool,
    scale: float,
    softcap: float | None,
    kv_start: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v."""
    statistics = statistics_dtype(q)
    group = q.shape[1] // k.shape[1]
    zoom_of = zoom.expand(q.shape[0], -1, -1, -1)
    dq, dk, dv = (torch.zeros_like(x, dtype=statistics) for x in (q, k, v))
    for batch, first_query, first_key, delta in sequences(q, k, kv_start, causal):
        queries, douts, outs, dlses, lses = (
            x[batch, :, first_query:] for x in (q, dout, out, dlse, lse)
        )
        keys, values = (_with_means(x[batch, :, first_key:]) for x in (k, v))
        dqueries = dq[batch, :, first_query:]
        dkeys, dvalues = (torch.zeros_like(x, dtype=statistics) for x in (keys, values))
        for x in _selected_chunks(
            queries, k.shape[2] - first_key, zoom_of[batch], block_size, causal, delta
        ):
            read, place = (x.b, x.h // group, x.j), (x.b, x.h, x.i)
            row_q, row_dout, row_out = (
                tensor[place].to(statistics) for tensor in (queries, douts, outs)
            )
            row_k, row_v = (tensor[read].to(statistics) for tensor in (keys, values))
            row_dq, row_dk, row_dv = masked_attention_backward(
                row_dout,
                dlses[place],
                row_q,
                row_k,
                row_v,
                row_out,
                lses[place],
                x.seen,
                scale,
                x.bias,
                softcap,
            )
            dqueries[tuple(index.expand_as(x.i)[x.exists] for index in place)] = row_dq[x.exists]
            entry_rows = ((x.b * k.shape[1] + x.h // group) * keys.shape[2] + x.j).flatten()
            # deterministic on a CPU
            dkeys.view(-1, k.shape[3]).index_add_(0, entry_rows, row_dk.flatten(0, 1))
            dvalues.view(-1, k.shape[3]).index_add_(0, entry_rows, row_dv.flatten(0, 1))
        dk[batch, :, first_key:] = _distribute_gradient(dkeys, k.shape[2] - first_key)
        dv[batch, :, first_key:] = _distribute_gradient(dvalues, k.shape[2] - first_key)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _check_values(zoom: Tensor) -> None:
    invalid = sorted({*zoom.unique().tolist()} - {0, *ZOOMS})
    if invalid:
        raise ValueError(
            f"zoom holds {', '.join(map(str, invalid))}: expected 0 (skip), 1, 2, 4 or 8"
        )


def _with_means(x: Tensor) -> Tensor:
    """Returns ``x [B, H, m, D]``, followed by its means of 2, 4 and 8 tokens.

    The last group of a zoom may be smaller. Means are rounded once.
    """
    levels = [x]
    exact = x.to(statistics_dtype(x))
    for z in ZOOMS[1:]:
        whole = x.shape[2] // z * z
        head, tail = exact[:, :, :whole].unflatten(2, (-1, z)).mean(3), exact[:, :, whole:]
        levels.append(head.to(x.dtype))
        if tail.shape[2]:
            levels.append(tail.mean(2, keepdim=True).to(x.dtype))
    return torch.cat(levels, 2)


def _distribute_gradient(dx: Tensor, m: int) -> Tensor:
    """Returns the gradient of m keys from the gradient of :func:`_with_means`.

    The gradient of a mean is divided equally among its keys.
    """
    tokens = torch.arange(m, device=dx.device)
    levels = dx.split([-(-m // z) for z in ZOOMS], 2)
    return sum(  # type: ignore[return-value]
        level[:, :, tokens // z] / (m - tokens // z * z).clamp(max=z)[:, None]
        for z, level in zip(ZOOMS, levels, strict=True)
    )


def _selected_chunks(
    queries: Tensor, m: int, zoom: Tensor, block_size: int, causal: bool, delta: int
) -> Iterator[_Rows]:
    """Yields the entries that row blocks of ``queries [B, Hq, n, D]`` read.

    ``queries`` belong to a part of the batch with m keys.
    """
    n, device = queries.shape[2], queries.device
    first_t, first_u = (torch.arange(x, device=device) * block_size for x in zoom.shape[2:])
    exists = (first_t < n)[:, None] & (first_u < m)
    if causal:
        exists = exists & (first_u < (first_t + block_size).clamp(max=n)[:, None] + delta)
        whole = (first_u + block_size).clamp(max=m) <= first_t[:, None] + delta + 1
        zoom = zoom.where(whole, zoom.clamp(max=1))
    # [B, Hq, Tr, Tc]
    zoom = zoom.where(exists, 0).repeat_interleave(queries.shape[1] // zoom.shape[1], dim=1)

    size = block_size // PARTS
    part = torch.arange(PARTS, device=device)
    parts_of = torch.tensor(
        [PARTS // z if z in ZOOMS else 0 for z in range(PARTS + 1)], device=device
    )
    begin_of = torch.zeros(PARTS + 1, dtype=torch.int64, device=device)  # first entry of each zoom
    begin_of[list(ZOOMS)] = torch.tensor(
        [0, *(-(-m // z) for z in ZOOMS[:-1])], device=device
    ).cumsum(0)
    selected = (part < parts_of[zoom.int()][..., None]).flatten(3)  # [B, Hq, Tr, Tc * PARTS]
    for rows, c in row_lists(selected.flatten(0, 2), block_size * size):
        b, h, r = torch.unravel_index(rows, zoom.shape[:3])
        z = zoom[b[:, None], h[:, None], r[:, None], c // PARTS].long()
        first = c // PARTS * (block_size // z)  # entry of the block, which exists
        g = (first + c % PARTS * size)[..., None] + torch.arange(size, device=device)
        z, first, g = z.repeat_interleave(size, 1), first.repeat_interleave(size, 1), g.flatten(1)
        count = (m - g * z).clamp(max=z)  # number of keys in the entry
        t = r[:, None] * block_size + torch.arange(block_size, device=device)
        seen = (t < n)[..., None] & (count > 0)[:, None]
        if causal:
            seen = seen & ((g * z + count - 1)[:, None] <= t[..., None] + delta)
        j = begin_of[z] + g.where(count > 0, first)
        bias = count.clamp(min=1).to(statistics_dtype(queries)).log()[:, None]
        yield _Rows(b[:, None], h[:, None], t.clamp(max=n - 1), j, t < n, seen, bias)
