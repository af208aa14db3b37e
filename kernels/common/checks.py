"""Checks of arguments that every operation shares: plain PyTorch, metadata only, so that nothing waits for a device.

Values that live on the device (``kv_start``, zoom levels, probes) are not looked at: that would stall the stream.
The references, which run where looking is free, check them.
"""

import math
import os
from importlib.util import find_spec

import torch
from torch import Tensor

from msattn.kernels.types import Backend, BucketIndex, ScoreMod

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_SIZE = 256
HAS_TRITON = find_spec("triton") is not None
BLOCK_SIZES = (16, 32, 64, 128)
MAX_CONV_SIZE = 32
ZOOMS = (1, 2, 4, 8)


def resolve_backend(backend: Backend | None, q: Tensor, name: str = "q") -> Backend:
    """The backend that serves ``q``: Triton on CUDA, the reference on CPU, unless one is named.

    Raises
    ------
    ValueError
        For an unknown name, and for ``"triton"`` where it cannot run: no triton, fp64, or a CPU tensor without
        the interpreter.
    """
    if backend not in (None, "triton", "torch"):
        raise ValueError(f"backend={backend!r}: expected 'triton', 'torch' or None")
    chosen = backend or ("triton" if q.is_cuda else "torch")
    if chosen == "triton":
        if not HAS_TRITON:
            raise ValueError("backend='triton': triton is not installed here, use backend='torch'")
        if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"backend='triton' for a tensor on {q.device}: expected CUDA, or TRITON_INTERPRET=1 set before start"
            )
        if q.dtype not in FLOATS:
            raise ValueError(f"{name}.dtype={q.dtype}: the Triton kernels take float32, float16 and bfloat16")
    return chosen


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """``q [B, Hq, N, D]`` fits ``k, v [B, Hkv, M, D]``: sizes, head ratio, head size, dtype, device; else ValueError."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name}.shape={tuple(x.shape)}: expected 4 dimensions [batch, heads, tokens, head size]")
        if min(x.shape) < 1:
            raise ValueError(f"{name}.shape={tuple(x.shape)}: expected every size to be at least 1")
        if x.dtype != q.dtype or x.dtype not in (*FLOATS, torch.float64):
            raise ValueError(f"{name}.dtype={x.dtype}, q.dtype={q.dtype}: expected one floating dtype of 16 bits or more")
        if x.device != q.device:
            raise ValueError(f"{name}.device={x.device}: expected q's device, {q.device}")
    if k.shape != v.shape:
        raise ValueError(f"v.shape={tuple(v.shape)}: expected k's shape, {tuple(k.shape)}")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k.shape={tuple(k.shape)}: expected q's batch size, {q.shape[0]}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k.shape={tuple(k.shape)}: expected q's head size, {q.shape[3]}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, k {k.shape[1]}: expected a multiple (groups of query heads share one)")
    if q.shape[3] % 8 or q.shape[3] > MAX_HEAD_SIZE:
        raise ValueError(f"head size {q.shape[3]}: expected a multiple of 8 up to {MAX_HEAD_SIZE}")


def check_per_sequence(name: str, x: Tensor | None, q: Tensor) -> None:
    """``kv_start`` and ``kv_len``: None, or int32 ``[B]`` on q's device; else ValueError."""
    if x is None:
        return
    if x.dtype != torch.int32 or tuple(x.shape) != (q.shape[0],):
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}: expected int32 ({q.shape[0]},), one for each sequence")
    if x.device != q.device:
        raise ValueError(f"{name}.device={x.device}: expected q's device, {q.device}")


def check_block_size(block_size: int) -> None:
    """Blocks are as long as a tile can be: a power of two from 16 to 128; else ValueError."""
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size={block_size!r}: expected one of {', '.join(map(str, BLOCK_SIZES))}")


def check_block_mask(block_mask: Tensor, q: Tensor, k: Tensor, block_size: int) -> None:
    """``block_mask`` is bool ``[B | 1, Hq | Hkv | 1, Tr, Tc]`` on q's device, and ``block_size`` fits; else ValueError."""
    _check_block_map("block_mask", block_mask, torch.bool, q, k, block_size)


def check_zoom(zoom: Tensor, q: Tensor, k: Tensor, block_size: int) -> None:
    """``zoom`` is uint8 ``[B | 1, Hq | Hkv | 1, Tr, Tc]`` on q's device, and ``block_size`` fits; else ValueError."""
    _check_block_map("zoom", zoom, torch.uint8, q, k, block_size)


def _check_block_map(name: str, x: Tensor, dtype: torch.dtype, q: Tensor, k: Tensor, block_size: int) -> None:
    check_block_size(block_size)
    if x.dtype != dtype or x.dim() != 4:
        expected = str(dtype).removeprefix("torch.")
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}: expected {expected}, 4 dimensions")
    accepted = [
        (q.shape[0], 1),
        (q.shape[1], k.shape[1], 1),
        ((q.shape[2] + block_size - 1) // block_size,),
        ((k.shape[2] + block_size - 1) // block_size,),
    ]
    for size, sizes, what in zip(x.shape, accepted, ("batch", "heads", "row blocks", "column blocks"), strict=True):
        if size not in sizes:
            raise ValueError(f"{name}.shape={tuple(x.shape)}: {what} must be {' or '.join(map(str, sizes))}")
    if x.device != q.device:
        raise ValueError(f"{name}.device={x.device}: expected q's device, {q.device}")


def check_states(outs: Tensor, lses: Tensor) -> None:
    """``outs [S, B, H, N, D]`` and ``lses [S, B, H, N]`` are parts of one result; else ValueError."""
    if outs.dim() != 5 or min(outs.shape) < 1 or outs.dtype not in (*FLOATS, torch.float64):
        raise ValueError(f"outs is {outs.dtype} {tuple(outs.shape)}: expected a float [parts, batch, heads, tokens, head size]")
    statistics = statistics_dtype(outs)
    if lses.dtype != statistics or lses.shape != outs.shape[:4]:
        raise ValueError(f"lses is {lses.dtype} {tuple(lses.shape)}: expected {statistics} {tuple(outs.shape[:4])}")
    if lses.device != outs.device:
        raise ValueError(f"lses.device={lses.device}: expected outs' device, {outs.device}")


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Precision of sums, maxima and LSEs: fp32, and fp64 for fp64 input."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def resolve_scale(scale: float | None, head_size: int) -> float:
    """The factor of the scores, ``head_size ** -0.5`` unless given; positive, so that the largest score stays largest."""
    if scale is None:
        return head_size**-0.5
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale!r}: expected a positive, finite number")
    return float(scale)


def query_offset(num_queries: int, num_keys: int, causal: bool) -> int:
    """Position of query 0 among the keys.

    Causal attention is bottom-right aligned: with more queries than keys, the first queries stand before the first key
    and see nothing. Without a causal order all queries see the keys, and positions only say where the padding ends.
    """
    offset = num_keys - num_queries
    return offset if causal else max(offset, 0)


def first_query(num_queries: int, num_keys: int, kv_start: Tensor | None, device: torch.device) -> Tensor | None:
    """Index of the first causal query that sees a key, int64 ``[B | 1]``; None when that is query 0 everywhere."""
    if kv_start is None and num_queries <= num_keys:
        return None
    start = torch.zeros(1, dtype=torch.long, device=device) if kv_start is None else kv_start.long()
    return (start - (num_keys - num_queries)).clamp(min=0)


def has_aligned_rows(x: Tensor) -> bool:
    """Whether the last dimension is contiguous, and every row of it starts at a multiple of 16 bytes.

    For use inside a custom operator: it looks at addresses, which a traced tensor does not have.
    """
    apart = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in apart)


def check_layout(**tensors: Tensor) -> None:
    """What the kernels ask of memory: contiguous, aligned rows (views are welcome); else ValueError."""
    for name, x in tensors.items():
        if not has_aligned_rows(x):
            raise ValueError(
                f"{name}.stride()={x.stride()}, address {x.data_ptr()}: expected rows that are contiguous, aligned to 16 bytes"
            )


def check_bucket_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: BucketIndex,
    probes: Tensor,
    recent: int | Tensor,
    sink: int,
    kv_start: Tensor | None,
    kv_len: Tensor | None,
) -> None:
    """One query ``q [B, Hq, 1, D]`` a sequence; index and probes are int32 and have k's batch and heads; else ValueError."""
    check_qkv(q, k, v)
    if q.shape[2] != 1:
        raise ValueError(f"q.shape={tuple(q.shape)}: expected one query a sequence, [batch, heads, 1, head size]")
    for name, x, least in (("index.offsets", index.offsets, 2), ("index.order", index.order, 0), ("probes", probes, 0)):
        if x.dtype != torch.int32 or x.dim() != 3 or x.shape[:2] != k.shape[:2] or x.shape[2] < least:
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}: expected int32 {(*k.shape[:2], f'{least} or more')}")
        if x.device != q.device:
            raise ValueError(f"{name}.device={x.device}: expected q's device, {q.device}")
    check_per_sequence("kv_start", kv_start, q)
    check_per_sequence("kv_len", kv_len, q)
    if isinstance(recent, Tensor):
        check_per_sequence("recent", recent, q)
    for name, x in (("recent", recent), ("sink", sink)):
        if not isinstance(x, Tensor) and x < 0:
            raise ValueError(f"{name}={x!r}: expected a number of keys, 0 or more")


def check_probe_buckets(
    q: Tensor, weight_in: Tensor, bias_in: Tensor, weight_out: Tensor, bias_out: Tensor, kv_heads: int, probes: int
) -> None:
    """One query a sequence; classifiers that divide its heads, and are divided by or divide the groups; else ValueError."""
    check_qkv(q, q, q)
    heads = q.shape[1]
    if q.shape[2] != 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"q.shape={tuple(q.shape)}: expected [batch, heads, 1, head size], heads a multiple of kv_heads={kv_heads}"
        )
    if weight_in.dim() != 3 or weight_out.dim() != 3 or heads % max(1, len(weight_in)):
        raise ValueError(f"weight_in.shape={tuple(weight_in.shape)}: expected [H, D, F], H a divisor of q's {heads} heads")
    classifiers, hidden, num_buckets = len(weight_in), weight_in.shape[2], weight_out.shape[2]
    for name, x, shape in (
        ("weight_in", weight_in, (classifiers, q.shape[3], hidden)),
        ("bias_in", bias_in, (classifiers, 1, hidden)),
        ("weight_out", weight_out, (classifiers, hidden, num_buckets)),
        ("bias_out", bias_out, (classifiers, 1, num_buckets)),
    ):
        if x.shape != shape or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}: expected {q.dtype} {shape} on {q.device}")
    if not 0 <= probes <= num_buckets:
        raise ValueError(f"probes={probes!r}: expected 0 to {num_buckets}, the number of buckets")


def check_bucket_mass(
    q: Tensor,
    k: Tensor,
    buckets: Tensor,
    num_buckets: int,
    min_distance: int | None,
    q_pos: Tensor | None,
    k_pos: Tensor | None,
) -> None:
    """``buckets [B, Hkv, n_k]`` and positions ``[n_q]``, ``[n_k]`` are int32 and fit q and k; else ValueError."""
    check_qkv(q, k, k)
    for name, x, shape in (
        ("buckets", buckets, k.shape[:3]),
        ("q_pos", q_pos, q.shape[2:3]),
        ("k_pos", k_pos, k.shape[2:3]),
    ):
        if x is not None and (x.dtype != torch.int32 or x.shape != shape):
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}: expected int32 {tuple(shape)}")
        if x is not None and x.device != q.device:
            raise ValueError(f"{name}.device={x.device}: expected q's device, {q.device}")
    if num_buckets < 1:
        raise ValueError(f"num_buckets={num_buckets!r}: expected 1 or more")
    if min_distance is not None and min_distance < 0:
        raise ValueError(f"min_distance={min_distance!r}: expected a number of tokens, 0 or more")


def check_nearest_centroid(k: Tensor, centroids: Tensor) -> None:
    """``k [B, H, M, D]`` and ``centroids [H, C, D]``, fp32 (fp64 with fp64 keys), on one device; else ValueError."""
    check_tokens("k", k)
    shape = tuple(centroids.shape)
    if len(shape) != 3 or shape[0] != k.shape[1] or shape[1] < 1 or shape[2] != k.shape[3]:
        raise ValueError(f"centroids.shape={shape}: expected [{k.shape[1]}, C, {k.shape[3]}], as k's heads and head size")
    if centroids.dtype != statistics_dtype(k):
        raise ValueError(f"centroids.dtype={centroids.dtype}: expected {statistics_dtype(k)} for k of {k.dtype}")
    if centroids.device != k.device:
        raise ValueError(f"centroids.device={centroids.device}: expected k's device, {k.device}")


def check_bucket_sums(k: Tensor, buckets: Tensor, num_buckets: int) -> None:
    """``k [B, H, M, D]`` and ``buckets`` int32 ``[B, H, M]`` on one device; else ValueError."""
    check_tokens("k", k)
    if buckets.dtype != torch.int32 or buckets.shape != k.shape[:3]:
        raise ValueError(f"buckets is {buckets.dtype} {tuple(buckets.shape)}: expected int32 {tuple(k.shape[:3])}")
    if buckets.device != k.device:
        raise ValueError(f"buckets.device={buckets.device}: expected k's device, {k.device}")
    if num_buckets < 1:
        raise ValueError(f"num_buckets={num_buckets!r}: expected 1 or more")


def check_tokens(name: str, x: Tensor) -> None:
    """``x [B, H, T, D]`` of a floating dtype, with a head size that is served; else ValueError."""
    if x.dim() != 4 or min(x.shape) < 1:
        raise ValueError(f"{name}.shape={tuple(x.shape)}: expected [batch, heads, tokens, head size], each at least 1")
    if x.dtype not in (*FLOATS, torch.float64):
        raise ValueError(f"{name}.dtype={x.dtype}: expected a floating dtype of 16 bits or more")
    if x.shape[3] % 8 or x.shape[3] > MAX_HEAD_SIZE:
        raise ValueError(f"head size {x.shape[3]}: expected a multiple of 8 up to {MAX_HEAD_SIZE}")


def check_flash_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: str,
    score_mod: ScoreMod | None,
    kv_start: Tensor | None,
    kv_len: Tensor | None,
    splits: int | None,
) -> None:
    """A variant that exists, at least one split, a score_mod whose tensors lie where q does; else ValueError."""
    check_qkv(q, k, v)
    check_per_sequence("kv_start", kv_start, q)
    check_per_sequence("kv_len", kv_len, q)
    if variant not in ("partial", "global"):
        raise ValueError(f"variant={variant!r}: expected 'partial' or 'global'")
    if splits is not None and splits < 1:
        raise ValueError(f"splits={splits!r}: expected a number of parts, 1 or more, or None")
    for n, x in enumerate(score_mod.tensors if score_mod else ()):
        if x.device != q.device:
            raise ValueError(f"score_mod.tensors[{n}].device={x.device}: expected q's device, {q.device}")
    if score_mod and score_mod.built_in == "alibi" and score_mod.tensors[0].shape != q.shape[1:2]:
        raise ValueError(f"score_mod: {len(score_mod.tensors[0])} slopes, expected one for each of q's {q.shape[1]} heads")


def check_conv_weight(weight: Tensor, q: Tensor) -> None:
    """``weight [Hq, c_q, c_k]`` of q's dtype or fp32 on q's device, its kernels no larger than 32 x 32; else ValueError."""
    sizes = weight.shape[1:] if weight.dim() == 3 else (0,)
    if weight.dim() != 3 or weight.shape[0] != q.shape[1] or not 1 <= min(sizes) <= max(sizes) <= MAX_CONV_SIZE:
        raise ValueError(
            f"weight.shape={tuple(weight.shape)}: expected [{q.shape[1]}, c_q, c_k], one kernel for each of q's heads, "
            f"of 1 to {MAX_CONV_SIZE} queries and keys"
        )
    _check_weight(weight, q)


def check_head_weight(weight: Tensor, q: Tensor) -> None:
    """``weight [Hq, Hq]`` of q's dtype or fp32 on q's device; else ValueError."""
    if weight.shape != (q.shape[1], q.shape[1]):
        raise ValueError(f"weight.shape={tuple(weight.shape)}: expected {(q.shape[1],) * 2}, a row for each of q's heads")
    _check_weight(weight, q)


def _check_weight(weight: Tensor, q: Tensor) -> None:
    if weight.dtype not in (q.dtype, torch.float32):
        raise ValueError(f"weight.dtype={weight.dtype}: expected q's dtype, {q.dtype}, or torch.float32")
    if weight.device != q.device:
        raise ValueError(f"weight.device={weight.device}: expected q's device, {q.device}")


def key_taps_before(weight: Tensor) -> int:
    """Keys before its own that a convolved score is made of; an even kernel reaches one further after than before."""
    return (weight.shape[2] - 1) // 2


def key_taps_after(weight: Tensor) -> int:
    """Keys after its own that a convolved score is made of."""
    return weight.shape[2] - 1 - key_taps_before(weight)


def check_conv_decode(
    q_window: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    kv_start: Tensor | None,
    kv_len: Tensor | None,
    splits: int | None,
) -> None:
    """The window holds as many queries as the kernel does; at least one split; else ValueError."""
    check_qkv(q_window, k, v)
    check_conv_weight(weight, q_window)
    check_per_sequence("kv_start", kv_start, q_window)
    check_per_sequence("kv_len", kv_len, q_window)
    if q_window.shape[2] != weight.shape[1]:
        raise ValueError(f"q_window.shape={tuple(q_window.shape)}: expected {weight.shape[1]} queries, as many as the kernel's")
    if splits is not None and splits < 1:
        raise ValueError(f"splits={splits!r}: expected a number of parts, 1 or more, or None")
