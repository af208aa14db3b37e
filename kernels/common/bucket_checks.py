"""Argument checks of operations on key buckets; see :mod:`.checks`."""

import math

import torch
from torch import Tensor

from msattn.kernels.common.checks import (
    check_device,
    check_per_sequence,
    check_qkv,
    check_tensor,
    check_tokens,
    statistics_dtype,
)
from msattn.kernels.types import BucketIndex


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
    counts: Tensor | None,
) -> None:
    """Checks the arguments of ``bucket_decode``, among them one query per sequence."""
    check_qkv(q, k, v)
    if q.shape[2] != 1:
        raise ValueError(f"q.shape={tuple(q.shape)}: expected one query per sequence, [batch, heads, 1, head size]")
    for name, x, least in (("index.offsets", index.offsets, 2), ("index.order", index.order, 0), ("probes", probes, 0)):
        check_lists(name, x, k.shape[1], least, q)
    check_per_sequence("kv_start", kv_start, q)
    check_per_sequence("kv_len", kv_len, q)
    check_dense_window(recent, sink, q)
    check_counts(counts, k.shape[1], q)


def check_lists(name: str, x: Tensor, kv_heads: int, least: int, q: Tensor) -> None:
    """Checks that ``x`` is int32 ``[B, Hkv, n]`` with n at least ``least``."""
    if x.dtype != torch.int32 or x.dim() != 3 or x.shape[:2] != (len(q), kv_heads) or x.shape[2] < least:
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}: expected int32 [{len(q)}, {kv_heads}, at least {least}]")
    check_device(name, x, "q", q)


def check_dense_window(recent: int | Tensor, sink: int, q: Tensor) -> None:
    """Checks the numbers of keys in the dense window."""
    if isinstance(recent, Tensor):
        check_per_sequence("recent", recent, q)
    for name, x in (("recent", recent), ("sink", sink)):
        if not isinstance(x, Tensor) and x < 0:
            raise ValueError(f"{name}={x!r}: expected a number of keys, 0 or more")


def check_counts(counts: Tensor | None, kv_heads: int, q: Tensor) -> None:
    """Checks the counter of keys: None, or contiguous int64 ``[B, Hkv]``."""
    if counts is None:
        return
    if counts.dtype != torch.int64 or counts.shape != (len(q), kv_heads) or not counts.is_contiguous():
        raise ValueError(
            f"counts is {counts.dtype} {tuple(counts.shape)} with strides {counts.stride()}: "
            f"expected int64 ({len(q)}, {kv_heads}), contiguous"
        )
    check_device("counts", counts, "q", q)


def check_probe_buckets(
    q: Tensor,
    weight_in: Tensor,
    bias_in: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
    kv_heads: int,
    probes: int,
    sizes: Tensor | None,
    threshold: float | None,
) -> None:
    """Checks the arguments of ``probe_buckets``; classifiers must share heads evenly."""
    check_qkv(q, q, q)
    heads = q.shape[1]
    if q.shape[2] != 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"q.shape={tuple(q.shape)}: expected [batch, heads, 1, head size], heads a multiple of kv_heads={kv_heads}"
        )
    if weight_in.dim() != 3 or weight_out.dim() != 3 or heads % max(1, len(weight_in)):
        raise ValueError(
            f"weight_in.shape={tuple(weight_in.shape)}, weight_out.shape={tuple(weight_out.shape)}: "
            f"expected [H, D, F] and [H, F, C], H a divisor of q's {heads} heads"
        )
    classifiers, hidden, num_buckets = len(weight_in), weight_in.shape[2], weight_out.shape[2]
    for name, x, shape in (
        ("weight_in", weight_in, (classifiers, q.shape[3], hidden)),
        ("bias_in", bias_in, (classifiers, 1, hidden)),
        ("weight_out", weight_out, (classifiers, hidden, num_buckets)),
        ("bias_out", bias_out, (classifiers, 1, num_buckets)),
    ):
        check_tensor(name, x, q.dtype, shape, "q", q)
    if not 0 <= probes <= num_buckets:
        raise ValueError(f"probes={probes!r}: expected 0 to {num_buckets}, the number of buckets")
    if (sizes is None) != (threshold is None):
        raise ValueError(f"threshold={threshold!r}: expected a number with sizes, and None without")
    if threshold is not None and not 0 <= threshold < math.inf:
        raise ValueError(f"threshold={threshold!r}: expected a finite number, 0 or more")
    if sizes is not None:
        check_tensor("sizes", sizes, torch.int32, (len(q), kv_heads, num_buckets), "q", q)


def check_bucket_mass(
    q: Tensor,
    k: Tensor,
    buckets: Tensor,
    num_buckets: int,
    min_distance: int | None,
    q_pos: Tensor | None,
    k_pos: Tensor | None,
) -> None:
    """Checks the arguments of ``bucket_mass``."""
    check_qkv(q, k, k)
    check_tensor("buckets", buckets, torch.int32, k.shape[:3], "q", q)
    if q_pos is not None:
        check_tensor("q_pos", q_pos, torch.int32, q.shape[2:3], "q", q)
    if k_pos is not None:
        check_tensor("k_pos", k_pos, torch.int32, k.shape[2:3], "q", q)
    _check_num_buckets(num_buckets)
    if min_distance is not None and min_distance < 0:
        raise ValueError(f"min_distance={min_distance!r}: expected a number of tokens, 0 or more")


def check_nearest_centroid(k: Tensor, centroids: Tensor) -> None:
    """Checks the arguments of ``nearest_centroid``."""
    check_tokens("k", k)
    shape = tuple(centroids.shape)
    if len(shape) != 3 or shape[0] != k.shape[1] or shape[1] < 1 or shape[2] != k.shape[3]:
        raise ValueError(f"centroids.shape={shape}: expected [{k.shape[1]}, C, {k.shape[3]}], with k's heads and head size")
    if centroids.dtype != statistics_dtype(k):
        raise ValueError(f"centroids.dtype={centroids.dtype}: expected {statistics_dtype(k)} for k.dtype={k.dtype}")
    check_device("centroids", centroids, "k", k)


def check_bucket_sums(k: Tensor, buckets: Tensor, num_buckets: int) -> None:
    """Checks the arguments of ``bucket_sums``."""
    check_tokens("k", k)
    check_tensor("buckets", buckets, torch.int32, k.shape[:3], "k", k)
    _check_num_buckets(num_buckets)


def _check_num_buckets(num_buckets: int) -> None:
    if num_buckets < 1:
        raise ValueError(f"num_buckets={num_buckets!r}: expected 1 or more")
