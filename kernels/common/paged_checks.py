"""Argument checks of operations on a paged cache; see :mod:`.checks`."""

import torch
from torch import Tensor

from msattn.kernels.common.checks import check_device, check_tensor, check_tokens, check_vector
from msattn.kernels.common.fp8 import FP8
from msattn.kernels.common.primitives import capability
from msattn.kernels.types import PagedKeys

MAX_BUCKETS = 2**15  # limit of int16 ids
FP8_CAPABILITY = 89  # Triton converts e4m3 from here on


def check_paged_keys(cache: PagedKeys, heads: int, q: Tensor) -> None:
    """Checks a paged cache for queries of ``heads`` heads, whose last dimension is the head
    size.
    """
    for name, x in (("cache.k", cache.k), ("cache.v", cache.v)):
        if x.dim() != 4 or min(x.shape) < 1 or x.shape[3] != q.shape[-1] or x.stride(3) != 1:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and strides {x.stride()}: expected [pages, "
                f"page size, heads, {q.shape[-1]}], q's head size, each size at least 1 and the "
                "last dimension contiguous"
            )
        if x.dtype not in (q.dtype, FP8) or x.dtype != cache.k.dtype:
            raise ValueError(
                f"{name}.dtype={x.dtype}: expected q's dtype, {q.dtype}, or {FP8}, the same for "
                f"cache.k and cache.v"
            )
        check_device(name, x, "q", q)
    if cache.k.shape != cache.v.shape:
        raise ValueError(
            f"cache.v.shape={tuple(cache.v.shape)}: expected cache.k's shape, "
            f"{tuple(cache.k.shape)}"
        )
    if heads % cache.k.shape[2]:
        raise ValueError(
            f"q has {heads} heads, cache.k has {cache.k.shape[2]}: expected q's to be a multiple "
            f"of cache.k's"
        )
    check_table("cache.", cache.table, cache.kv_len, "q", q)
    check_scales("cache.", cache.k, cache.k_scale, cache.v_scale)


def check_scales(prefix: str, k: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Checks the scales of a cache with keys ``k [..., Hkv, D]``, and that its GPU can read it."""
    if k.dtype == FP8 and k.is_cuda and capability(k.device) < FP8_CAPABILITY:
        raise ValueError(
            f"{prefix}k.dtype={FP8}: expected a GPU of compute capability 8.9 or later; this one "
            f"has {capability(k.device) / 10}"
        )
    for name, scale in ((f"{prefix}k_scale", k_scale), (f"{prefix}v_scale", v_scale)):
        if scale is not None and k.dtype != FP8:
            raise ValueError(f"{name}: expected None for keys and values in {k.dtype}")
        check_scale(name, scale, k.shape[-2], f"{prefix}k", k)


def check_scale(
    name: str, scale: Tensor | None, heads: int, other_name: str, other: Tensor
) -> None:
    """Checks the scale of keys or values of so many key/value heads, on the device of ``other``."""
    if scale is None:
        return
    if scale.dtype != torch.float32 or tuple(scale.shape) not in ((), (1,), (heads,)):
        raise ValueError(
            f"{name} is {scale.dtype} {tuple(scale.shape)}: expected float32 with one element, or "
            f"({heads},), one for each key/value head"
        )
    check_vector(name, scale)
    check_device(name, scale, other_name, other)


def check_table(prefix: str, table: Tensor, kv_len: Tensor, other_name: str, other: Tensor) -> None:
    """Checks the pages and lengths of sequences, on the device of ``other``."""
    if table.dtype != torch.int32 or table.dim() != 2 or min(table.shape) < 1:
        raise ValueError(
            f"{prefix}table is {table.dtype} {tuple(table.shape)}: expected int32 [batch, pages], "
            f"each at least 1"
        )
    check_device(f"{prefix}table", table, other_name, other)
    check_tensor(
        f"{prefix}kv_len",
        kv_len,
        torch.int32,
        (len(table),),
        other_name,
        other,
        "one for each sequence",
    )


def check_paged_decode(q: Tensor, cache: PagedKeys) -> None:
    """Checks ``q [B, Hq, N, D]`` and the paged cache of a decoding step."""
    check_tokens("q", q)
    check_paged_keys(cache, q.shape[1], q)
    if cache.table.shape[0] != q.shape[0]:
        raise ValueError(
            f"cache.table.shape={tuple(cache.table.shape)}: expected q's batch size, {q.shape[0]}"
        )
