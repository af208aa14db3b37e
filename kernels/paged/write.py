"""Writes the keys and values of new tokens to a paged cache, with their buckets.

By indexing, PyTorch launches a kernel for each of the three, which move single elements; this is
one kernel that copies rows. It also quantizes them for a cache in FP8. Buckets and pooled keys are
then those of the keys that such a cache holds, which another kernel computes first.

Plain functions of tensors, no registered operations; their forms in PyTorch are in this file too.
Tiles: BT tokens, BD channels. Prefixes: o_ offset, m_ mask. Grid: (block of tokens, key/value
head).
"""

import torch
from torch import Tensor

from msattn.kernels.common.checks import (
    check_device,
    check_no_gradient,
    check_tensor,
    resolve_backend,
)
from msattn.kernels.common.fp8 import (
    FP8,
    dequantize,
    head_stride,
    load_scale,
    quantize,
    to_fp8,
)
from msattn.kernels.common.paged_checks import check_scale, check_scales
from msattn.kernels.common.primitives import (
    pdl_args,
    pdl_launch_dependents,
    pdl_wait,
    row_tile,
    tl,
    triton,
)
from msattn.kernels.types import Backend


def write_pages(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    offsets: Tensor,
    ids: Tensor | None = None,
    buckets: Tensor | None = None,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """Writes each new token to a slot of its page.

    ``k`` and ``v [Hkv, T, D]`` are those of the new tokens; strided views are not copied. The
    cache, ``keys`` and ``values [P, page_size, Hkv, D]`` with any strides, is in the dtype of k, or
    in FP8 with the scales of :class:`~msattn.kernels.types.PagedKeys`: numbers are divided by them,
    rounded to even and saturated. It is written at the slots of the tokens only. ``pages`` and
    ``offsets``, int64 ``[T]``, whose values are not checked, are the page of each token and its
    offset in it; a slot that several tokens share, as those of padding, has undefined content.
    ``ids``, int32 or int64 ``[Hkv, T]``, are the buckets of the keys, which go to ``buckets``,
    int16 ``[P, page_size, Hkv]``. Raises ValueError for an invalid argument, NotImplementedError if
    a gradient is required.
    """
    check_no_gradient("write_pages", k, v)
    _check_keys(k)
    heads, tokens, size = k.shape
    check_tensor("v", v, k.dtype, k.shape, "k", k)
    for name, x in (("keys", keys), ("values", values)):
        if (
            x.dtype not in (k.dtype, FP8)
            or x.dtype != keys.dtype
            or x.dim() != 4
            or x.shape != keys.shape
            or x.shape[2:] != (heads, size)
        ):
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)}: expected {k.dtype} or {FP8}, as keys, [P, "
                f"page_size, {heads}, {size}]"
            )
        check_device(name, x, "k", k)
    check_scales("", keys, k_scale, v_scale)
    for name, x in (("pages", pages), ("offsets", offsets)):
        check_tensor(name, x, torch.int64, (tokens,), "k", k)
    if (ids is None) != (buckets is None):
        raise ValueError("ids and buckets: expected both or neither")
    if ids is not None and (
        ids.dtype not in (torch.int32, torch.int64) or ids.shape != (heads, tokens)
    ):
        raise ValueError(
            f"ids is {ids.dtype} {tuple(ids.shape)}: expected int32 or int64 ({heads}, {tokens})"
        )
    if ids is not None:
        check_device("ids", ids, "k", k)
    if buckets is not None:
        check_tensor("buckets", buckets, torch.int16, keys.shape[:3], "k", k)
    if resolve_backend(backend, k, "k") == "triton":
        with torch.cuda.device_of(k):
            launch(k, v, keys, values, pages, offsets, ids, buckets, k_scale, v_scale)
        return
    if keys.dtype == FP8:
        k, v = quantize(k, k_scale), quantize(v, v_scale)
    keys[pages, offsets], values[pages, offsets] = k.transpose(0, 1), v.transpose(0, 1)
    if ids is not None and buckets is not None:
        buckets[pages, offsets] = ids.T.to(buckets.dtype)


def round_keys(
    k: Tensor, k_scale: Tensor | None = None, *, backend: Backend | None = None
) -> Tensor:
    """Returns keys ``[Hkv, T, D]`` as a cache in FP8 holds them, in their own dtype.

    ``k_scale`` is that of :class:`~msattn.kernels.types.PagedKeys`. Writing the result to the cache
    does not change it further. Raises ValueError for an invalid argument, NotImplementedError if a
    gradient is required.
    """
    check_no_gradient("round_keys", k)
    _check_keys(k)
    check_scale("k_scale", k_scale, k.shape[0], "k", k)
    if resolve_backend(backend, k, "k") == "triton":
        with torch.cuda.device_of(k):
            return launch_rounding(k, k_scale)
    return dequantize(quantize(k, k_scale), k_scale, k.dtype)


def _check_keys(k: Tensor) -> None:
    if not k.is_floating_point() or k.dim() != 3 or min(k.shape) < 1:
        raise ValueError(
            f"k is {k.dtype} {tuple(k.shape)}: expected floating point [Hkv, T, D], each at least 1"
        )


def launch(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    offsets: Tensor,
    ids: Tensor | None,
    buckets: Tensor | None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Launches the kernel; the grid depends only on shapes."""
    heads, tokens, size = k.shape
    rows, padded = row_tile(size)
    _write_kernel[(triton.cdiv(tokens, rows), heads)](
        k, v, keys, values, pages, offsets, ids, buckets, k_scale, v_scale, tokens,
        *k.stride(), *v.stride(), *keys.stride(), *values.stride(), pages.stride(0),
        offsets.stride(0),
        *((0, 0) if ids is None else ids.stride()),
        *((0, 0, 0) if buckets is None else buckets.stride()),
        head_stride(k_scale), head_stride(v_scale),
        SIZE=size, BT=rows, BD=padded, TO_FP8=keys.dtype == FP8,
        **pdl_args(k.device),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["tokens", "stride_pages", "stride_offsets", "stride_ih", "stride_it"]
)
def _write_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, pages_ptr, offsets_ptr, ids_ptr, buckets_ptr,
    k_scale_ptr, v_scale_ptr, tokens,
    stride_kh, stride_kt, stride_kd, stride_vh, stride_vt, stride_vd,
    stride_keys_p, stride_keys_s, stride_keys_h, stride_keys_d,
    stride_values_p, stride_values_s, stride_values_h, stride_values_d,
    stride_pages, stride_offsets, stride_ih, stride_it,
    stride_bp, stride_bs, stride_bh, stride_k_scale, stride_v_scale,
    SIZE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, TO_FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    head, token = (
        tl.program_id(1).to(tl.int64),
        (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64),
    )
    o_d, m_token = tl.arange(0, BD)[None, :], token < tokens
    mask = m_token[:, None] & (o_d < SIZE)
    page = tl.load(pages_ptr + token * stride_pages, mask=m_token, other=0)
    offset = tl.load(offsets_ptr + token * stride_offsets, mask=m_token, other=0)
    k = tl.load(k_ptr + head * stride_kh + token[:, None] * stride_kt + o_d * stride_kd, mask=mask)
    v = tl.load(v_ptr + head * stride_vh + token[:, None] * stride_vt + o_d * stride_vd, mask=mask)
    if TO_FP8:
        k = to_fp8(k, load_scale(k_scale_ptr, head, stride_k_scale))
        v = to_fp8(v, load_scale(v_scale_ptr, head, stride_v_scale))
    o_keys = page * stride_keys_p + offset * stride_keys_s + head * stride_keys_h
    o_values = page * stride_values_p + offset * stride_values_s + head * stride_values_h
    tl.store(keys_ptr + o_keys[:, None] + o_d * stride_keys_d, k, mask=mask)
    tl.store(values_ptr + o_values[:, None] + o_d * stride_values_d, v, mask=mask)
    if ids_ptr is not None:
        bucket = tl.load(ids_ptr + head * stride_ih + token * stride_it, mask=m_token)
        tl.store(
            buckets_ptr + page * stride_bp + offset * stride_bs + head * stride_bh,
            bucket.to(tl.int16),
            mask=m_token,
        )


def launch_rounding(k: Tensor, k_scale: Tensor | None) -> Tensor:
    """Launches the kernel of :func:`round_keys`."""
    heads, tokens, size = k.shape
    rows, padded = row_tile(size)
    out = torch.empty_like(k)
    _round_kernel[(triton.cdiv(tokens, rows), heads)](
        k, out, k_scale, tokens, *k.stride(), *out.stride(), head_stride(k_scale),
        SIZE=size, BT=rows, BD=padded, **pdl_args(k.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])
def _round_kernel(
    k_ptr, out_ptr, k_scale_ptr, tokens,
    stride_kh, stride_kt, stride_kd, stride_oh, stride_ot, stride_od, stride_k_scale,
    SIZE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    head = tl.program_id(1).to(tl.int64)
    token = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)[:, None]
    o_d = tl.arange(0, BD)[None, :]
    mask = (token < tokens) & (o_d < SIZE)
    k = tl.load(k_ptr + head * stride_kh + token * stride_kt + o_d * stride_kd, mask=mask)
    k_scale = load_scale(k_scale_ptr, head, stride_k_scale)
    k = to_fp8(k, k_scale).to(tl.float32) * k_scale
    out_ptrs = out_ptr + head * stride_oh + token * stride_ot + o_d * stride_od
    tl.store(out_ptrs, k.to(out_ptr.dtype.element_ty), mask=mask)
