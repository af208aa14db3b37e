"""Argument checks of operations on key buckets; see :mod:`.checks`."""

import torch
from torch import Tensor

from msattn.kernels.common.checks import check_device, check_per_sequence


def check_one_query(q: Tensor) -> None:
    """Checks that there is one query per sequence."""
    if q.shape[2] != 1:
        raise ValueError(
            f"q.shape={tuple(q.shape)}: expected one query per sequence, [batch, heads, 1, head "
            f"size]"
        )


def check_lists(name: str, x: Tensor, kv_heads: int, least: int, q: Tensor) -> None:
    """Checks that ``x`` is int32 ``[B, Hkv, n]`` with n at least ``least``."""
    if (
        x.dtype != torch.int32
        or x.dim() != 3
        or x.shape[:2] != (len(q), kv_heads)
        or x.shape[2] < least
    ):
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)}: expected int32 [{len(q)}, {kv_heads}, at "
            f"least {least}]"
        )
    check_device(name, x, "q", q)


def check_dense_window(recent: int | Tensor, sink: int, q: Tensor) -> None:
    """Checks the numbers of keys in the dense window."""
    if isinstance(recent, Tensor):
        check_per_sequence(q, recent=recent)
    for name, x in (("recent", recent), ("sink", sink)):
        if not isinstance(x, Tensor) and x < 0:
            raise ValueError(f"{name}={x!r}: expected a number of keys, 0 or more")


def check_counts(counts: Tensor | None, kv_heads: int, q: Tensor) -> None:
    """Checks the counter of keys: None, or contiguous int64 ``[B, Hkv]``."""
    if counts is None:
        return
    if (
        counts.dtype != torch.int64
        or counts.shape != (len(q), kv_heads)
        or not counts.is_contiguous()
    ):
        raise ValueError(
            f"counts is {counts.dtype} {tuple(counts.shape)} with strides {counts.stride()}: "
            f"expected int64 ({len(q)}, {kv_heads}), contiguous"
        )
    check_device("counts", counts, "q", q)


def check_num_buckets(num_buckets: int) -> None:
    """Checks that there is a bucket."""
    if num_buckets < 1:
        raise ValueError(f"num_buckets={num_buckets!r}: expected 1 or more")
