"""Prepared keys, diagonal band and their gradients for conv_attention.

For head h, with kernel ``W [c_q, c_k]``, ``p = (c_k - 1) // 2``, positions q' and k', and unscaled
scores:

    prepared keys   y_a[j] = sum_c W[a, c] k[j - p + c]                   ``[B, H * c_q, M, D]``
    band            A[i, i - d] = sum_{a, c} W[a, c] S[q', k']            ``[B, H, N, w]`` fp32
                    over k' <= q', 0 <= d < w
                    where q' = i - (c_q - 1) + a, k' = i - d - p + c, S[q', k'] = q[q'] . k[k']
                    and w = (c_q - 1) + (c_k - 1 - p): for d >= w every k' <= q'
    with mask="key" the sum is over k' <= i, and w = c_k - 1 - p

The band needs the scores ``S[q', q' - e]``, ``0 <= e < c_k - 1 + a``, or
``a - (c_q - 1) <= e < c_k - 1`` with ``mask="key"``. They are not stored: a program owns a tile of
rows and computes the scores of one e after another, by dot products in fp32. Each row is read about
c_q * c_k times, mostly from the L1 cache, which costs little compared with the products over all
keys.

Tiles: BR rows, BC taps along keys, BA taps along queries, BW columns of the band. Row i of the
queries has position ``i + offset``. Grid: (row or key tile, head, sequence).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels.common.checks import query_offset
from msattn.kernels.common.primitives import padded_head, sequence_span, tl, triton
from msattn.kernels.multi_token.checks import key_taps_after, key_taps_before

TILE_ROWS = 32


class Convolution(NamedTuple):
    """Inputs of the convolution for H heads; ``weight`` is ``[H, c_q, c_k]``."""

    q: Tensor
    k: Tensor
    weight: Tensor
    kv_start: Tensor | None
    causal: bool
    mask: str

    @property
    def window(self) -> int:
        """Number of taps along queries, c_q."""
        return self.weight.shape[1]

    @property
    def width(self) -> int:
        """Width w of the band; 0 without a causal mask.

        Outside the band, convolved scores depend on no score that counts as 0.
        """
        earlier_queries = self.window - 1 if self.mask == "query" else 0
        return earlier_queries + key_taps_after(self.weight) if self.causal else 0

    def size_args(self) -> tuple[int, ...]:
        """Returns the size arguments that all kernels share.

        They are the query group's size, the numbers of queries and keys, the position of query 0,
        c_q, c_k, the number of taps before the current key, and the width of the band.
        """
        num_queries, num_keys = self.q.shape[2], self.k.shape[2]
        offset = query_offset(num_queries, num_keys, self.causal)
        group = self.q.shape[1] // self.k.shape[1]
        return (
            group,
            num_queries,
            num_keys,
            offset,
            *self.weight.shape[1:],
            key_taps_before(self.weight),
            self.width,
        )

    def constexprs(self) -> dict[str, int]:
        """Returns the compile-time sizes that all kernels share."""
        _, window, taps = (triton.next_power_of_2(size) for size in self.weight.shape)
        head = self.q.shape[3]
        return {"HEAD": head, "COLS": padded_head(head), "BR": TILE_ROWS, "BA": window, "BC": taps}


def prepare_keys(conv: Convolution) -> Tensor:
    """Computes prepared keys ``[B, H * c_q, M, D]``, rounded once to the dtype of k."""
    q, k, weight = conv.q, conv.k, conv.weight
    keys = k.new_empty((q.shape[0], q.shape[1] * conv.window, *k.shape[2:]))
    _prepare_kernel[(triton.cdiv(k.shape[2], TILE_ROWS), q.shape[1], q.shape[0])](
        k, weight, keys, conv.kv_start, *k.stride()[:3], *conv.size_args(), **conv.constexprs()
    )
    return keys


def make_band(conv: Convolution) -> Tensor | None:
    """Computes convolved scores ``[B, H, N, w]`` of the last w keys; None if w is 0."""
    if conv.width == 0:
        return None
    q, k = conv.q, conv.k
    band = q.new_empty((*q.shape[:3], conv.width), dtype=torch.float32)
    _band_kernel[(triton.cdiv(q.shape[2], TILE_ROWS), q.shape[1], q.shape[0])](
        q, k, conv.weight, band, conv.kv_start, *q.stride()[:3], *k.stride()[:3], *conv.size_args(),
        **conv.constexprs(),
        BW=triton.next_power_of_2(conv.width), KEY_MASK=conv.mask == "key",
    )  # fmt: skip
    return band


def query_gradient(conv: Convolution, dq: Tensor, dband: Tensor, out: Tensor) -> Tensor:
    """Writes ``out = dq + contribution of the band``.

    Returns the contribution of the band to dweight, by row tile: ``[B, H, tiles, c_q, c_k]``.
    """
    q, k = conv.q, conv.k
    tiles = triton.cdiv(q.shape[2], TILE_ROWS)
    partial = dq.new_empty((*q.shape[:2], tiles, *conv.weight.shape[1:]))
    _band_query_kernel[(tiles, q.shape[1], q.shape[0])](
        q, k, conv.weight, dband, dq, out, partial, conv.kv_start,
        *q.stride()[:3], *k.stride()[:3], *out.stride()[:3], *conv.size_args(), **conv.constexprs(),
        KEY_MASK=conv.mask == "key",
    )  # fmt: skip
    return partial


def key_gradient(conv: Convolution, dkeys: Tensor, dband: Tensor | None, out: Tensor) -> None:
    """Writes the gradient of k, from those of the prepared keys and of the band."""
    q, k = conv.q, conv.k
    _key_kernel[(triton.cdiv(k.shape[2], TILE_ROWS), k.shape[1], k.shape[0])](
        q, conv.weight, dkeys, dband, out, conv.kv_start,
        *q.stride()[:3], *out.stride()[:3], *conv.size_args(), **conv.constexprs(),
        KEY_MASK=conv.mask == "key",
    )  # fmt: skip


def weight_gradient(conv: Convolution, dkeys: Tensor) -> Tensor:
    """Computes the contribution of prepared keys to dweight.

    The result is by key tile: ``[B, H, tiles, c_q, c_k]``.
    """
    q, k = conv.q, conv.k
    tiles = triton.cdiv(k.shape[2], TILE_ROWS)
    partial = dkeys.new_empty((*q.shape[:2], tiles, *conv.weight.shape[1:]))
    _weight_kernel[(tiles, q.shape[1], q.shape[0])](
        k, dkeys, partial, conv.kv_start, *k.stride()[:3], *conv.size_args(), **conv.constexprs()
    )
    return partial


UNSPECIALIZED = ["group", "window", "taps", "before", "width"]


@triton.jit
def _load_rows(
    ptr, b, h, row, first, end, stride_b, stride_h, stride_n, HEAD: tl.constexpr, COLS: tl.constexpr
):
    """Loads rows ``[BR]`` of a head in fp32; 0 outside of ``first <= row < end``."""
    d = tl.arange(0, COLS)
    rows = (
        ptr
        + b.to(tl.int64) * stride_b
        + h.to(tl.int64) * stride_h
        + row.to(tl.int64)[:, None] * stride_n
    )
    inside = ((row >= first) & (row < end))[:, None] & (d < HEAD)[None, :]
    return tl.load(rows + d[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(
    ptr, tile, b, h, row, end, stride_b, stride_h, stride_n, HEAD: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    d = tl.arange(0, COLS)
    rows = (
        ptr
        + b.to(tl.int64) * stride_b
        + h.to(tl.int64) * stride_h
        + row.to(tl.int64)[:, None] * stride_n
    )
    tl.store(
        rows + d[None, :],
        tile.to(ptr.dtype.element_ty),
        mask=(row < end)[:, None] & (d < HEAD)[None, :],
    )


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _prepare_kernel(
    k_ptr, weight_ptr, keys_ptr, kv_start_ptr, stride_kb, stride_kh, stride_kn,
    group, num_queries, num_keys, offset, window, taps, before, width,
    HEAD: tl.constexpr, COLS: tl.constexpr, BR: tl.constexpr, BA: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(1), tl.program_id(2)
    first_key, _, _, _, _ = sequence_span(kv_start_ptr, b, num_queries, num_keys, offset)
    j = tl.program_id(0) * BR + tl.arange(0, BR)
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    for a in tl.range(0, window):  # type: ignore[misc]
        y = tl.zeros([BR, COLS], tl.float32)
        for c in tl.range(0, taps):  # type: ignore[misc]
            k = _load_rows(
                k_ptr,
                b,
                h // group,
                j - before + c,
                first_key,
                num_keys,
                stride_kb,
                stride_kh,
                stride_kn,
                HEAD,
                COLS,
            )
            y += tl.load(weight_ptr + (h * window + a) * taps + c).to(tl.float32) * k
        _store_rows(
            keys_ptr + (head * window + a) * num_keys * HEAD,
            y,
            b,
            h,
            j,
            num_keys,
            0,
            0,
            HEAD,
            HEAD,
            COLS,
        )


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _band_kernel(
    q_ptr, k_ptr, weight_ptr, band_ptr, kv_start_ptr,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    group, num_queries, num_keys, offset, window, taps, before, width,
    HEAD: tl.constexpr, COLS: tl.constexpr, BR: tl.constexpr,
    BA: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr,
    KEY_MASK: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(1), tl.program_id(2)
    first_key, first_query, _, _, _ = sequence_span(kv_start_ptr, b, num_queries, num_keys, offset)
    i, d = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BW)
    band = tl.zeros([BR, BW], tl.float32)
    for a in tl.range(0, window):  # type: ignore[misc]
        row = i - (window - 1) + a
        q = _load_rows(
            q_ptr, b, h, row, first_query, num_queries, stride_qb, stride_qh, stride_qn, HEAD, COLS
        )
        first = a - (window - 1) if KEY_MASK else 0
        for e in tl.range(first, taps - 1 if KEY_MASK else taps - 1 + a):  # type: ignore[misc]
            key = row + offset - e
            k = _load_rows(
                k_ptr,
                b,
                h // group,
                key,
                first_key,
                num_keys,
                stride_kb,
                stride_kh,
                stride_kn,
                HEAD,
                COLS,
            )
            c = d + before - (window - 1) + a - e
            w = tl.load(
                weight_ptr + (h * window + a) * taps + c, mask=(c >= 0) & (c < taps), other=0.0
            ).to(tl.float32)
            band += tl.sum(q * k, 1)[:, None] * w[None, :]
    place = ((b * tl.num_programs(1) + h).to(tl.int64) * num_queries + i)[:, None] * width + d[
        None, :
    ]
    tl.store(band_ptr + place, band, mask=(i < num_queries)[:, None] & (d < width)[None, :])


@triton.jit
def _load_dband(
    dband_ptr,
    row,
    e,
    a,
    num_queries,
    window,
    before,
    width,
    BC: tl.constexpr,
    KEY_MASK: tl.constexpr,
):
    """Loads gradients ``[BR, BC]`` of the band elements that S[row, row - e] enters.

    Column c is the gradient of the element to which the score contributes with weight ``W[a, c]``.
    """
    i = row + (window - 1) - a
    d = e + tl.arange(0, BC) - before + (window - 1) - a
    inside = ((row >= 0) & (i < num_queries))[:, None] & ((d >= 0) & (d < width))[None, :]
    if KEY_MASK:
        inside &= e >= a - (window - 1)
    return tl.load(dband_ptr + i.to(tl.int64)[:, None] * width + d[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _band_query_kernel(
    q_ptr, k_ptr, weight_ptr, dband_ptr, dq_ptr, out_ptr, partial_ptr, kv_start_ptr,
    stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_kn, stride_ob, stride_oh, stride_on,
    group, num_queries, num_keys, offset, window, taps, before, width,
    HEAD: tl.constexpr, COLS: tl.constexpr, BR: tl.constexpr, BA: tl.constexpr, BC: tl.constexpr,
    KEY_MASK: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(1), tl.program_id(2)
    first_key, first_query, _, _, _ = sequence_span(kv_start_ptr, b, num_queries, num_keys, offset)
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    rows, columns = tl.arange(0, BA), tl.arange(0, BC)
    dband_ptr += head * num_queries * width
    dq_ptr += head * num_queries * HEAD
    q = _load_rows(
        q_ptr, b, h, row, first_query, num_queries, stride_qb, stride_qh, stride_qn, HEAD, COLS
    )
    dq = _load_rows(dq_ptr, b, h, row, first_query, num_queries, 0, 0, HEAD, HEAD, COLS)
    dweight = tl.zeros([BA, BC], tl.float32)
    first = 1 - window if KEY_MASK else 0
    for e in tl.range(first, first + window + taps - 2):  # type: ignore[misc]
        k = _load_rows(
            k_ptr,
            b,
            h // group,
            row + offset - e,
            first_key,
            num_keys,
            stride_kb,
            stride_kh,
            stride_kn,
            HEAD,
            COLS,
        )
        s = tl.sum(q * k, 1)
        ds = tl.zeros([BR], tl.float32)
        for a in tl.range(0, window):  # type: ignore[misc]
            dband = _load_dband(
                dband_ptr, row, e, a, num_queries, window, before, width, BC, KEY_MASK
            )
            w = tl.load(
                weight_ptr + (h * window + a) * taps + columns, mask=columns < taps, other=0.0
            ).to(tl.float32)
            ds += tl.sum(dband * w[None, :], 1)
            dweight += tl.where((rows == a)[:, None], tl.sum(s[:, None] * dband, 0)[None, :], 0.0)
        dq += ds[:, None] * k
    dq = tl.where((row >= first_query)[:, None], dq, 0.0)
    _store_rows(out_ptr, dq, b, h, row, num_queries, stride_ob, stride_oh, stride_on, HEAD, COLS)
    partial_ptr += (head * tl.num_programs(0) + tl.program_id(0)) * window * taps
    inside = (rows < window)[:, None] & (columns < taps)[None, :]
    tl.store(partial_ptr + rows[:, None] * taps + columns[None, :], dweight, mask=inside)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _key_kernel(
    q_ptr, weight_ptr, dkeys_ptr, dband_ptr, out_ptr, kv_start_ptr,
    stride_qb, stride_qh, stride_qn, stride_ob, stride_oh, stride_on,
    group, num_queries, num_keys, offset, window, taps, before, width,
    HEAD: tl.constexpr, COLS: tl.constexpr, BR: tl.constexpr, BA: tl.constexpr, BC: tl.constexpr,
    KEY_MASK: tl.constexpr,
):  # fmt: skip
    kv_head, b = tl.program_id(1), tl.program_id(2)
    first_key, first_query, _, _, _ = sequence_span(kv_start_ptr, b, num_queries, num_keys, offset)
    j, columns = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BC)
    dk = tl.zeros([BR, COLS], tl.float32)
    for g in tl.range(0, group):  # type: ignore[misc]
        h = kv_head * group + g
        head = (b * tl.num_programs(1) * group + h).to(tl.int64)
        for n in tl.range(0, window * taps):  # type: ignore[misc]
            a, c = n // taps, n % taps
            y_ptr = dkeys_ptr + (head * window + a) * num_keys * HEAD
            dy = _load_rows(
                y_ptr, b, h, j + before - c, first_key, num_keys, 0, 0, HEAD, HEAD, COLS
            )
            dk += tl.load(weight_ptr + h * window * taps + n).to(tl.float32) * dy
        if dband_ptr is not None:
            first = 1 - window if KEY_MASK else 0
            for e in tl.range(first, first + window + taps - 2):  # type: ignore[misc]
                row = j + e - offset
                q = _load_rows(
                    q_ptr,
                    b,
                    h,
                    row,
                    first_query,
                    num_queries,
                    stride_qb,
                    stride_qh,
                    stride_qn,
                    HEAD,
                    COLS,
                )
                ds = tl.zeros([BR], tl.float32)
                for a in tl.range(0, window):  # type: ignore[misc]
                    dband = _load_dband(
                        dband_ptr + head * num_queries * width,
                        row,
                        e,
                        a,
                        num_queries,
                        window,
                        before,
                        width,
                        BC,
                        KEY_MASK,
                    )
                    w = tl.load(
                        weight_ptr + (h * window + a) * taps + columns,
                        mask=columns < taps,
                        other=0.0,
                    )
                    ds += tl.sum(dband * w.to(tl.float32)[None, :], 1)
                dk += ds[:, None] * q
    dk = tl.where((j >= first_key)[:, None], dk, 0.0)
    _store_rows(out_ptr, dk, b, kv_head, j, num_keys, stride_ob, stride_oh, stride_on, HEAD, COLS)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _weight_kernel(
    k_ptr, dkeys_ptr, partial_ptr, kv_start_ptr, stride_kb, stride_kh, stride_kn,
    group, num_queries, num_keys, offset, window, taps, before, width,
    HEAD: tl.constexpr, COLS: tl.constexpr, BR: tl.constexpr, BA: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(1), tl.program_id(2)
    first_key, _, _, _, _ = sequence_span(kv_start_ptr, b, num_queries, num_keys, offset)
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    j = tl.program_id(0) * BR + tl.arange(0, BR)
    partial_ptr += (head * tl.num_programs(0) + tl.program_id(0)) * window * taps
    for a in tl.range(0, window):  # type: ignore[misc]
        dy = _load_rows(
            dkeys_ptr + (head * window + a) * num_keys * HEAD,
            b,
            h,
            j,
            0,
            num_keys,
            0,
            0,
            HEAD,
            HEAD,
            COLS,
        )
        for c in tl.range(0, taps):  # type: ignore[misc]
            k = _load_rows(
                k_ptr,
                b,
                h // group,
                j - before + c,
                first_key,
                num_keys,
                stride_kb,
                stride_kh,
                stride_kn,
                HEAD,
                COLS,
            )
            tl.store(partial_ptr + a * taps + c, tl.sum(tl.sum(dy * k, 1), 0))
