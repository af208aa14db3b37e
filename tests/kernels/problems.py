"""Problems on which the kernels are tested, and tolerances of gradients; see
``kernels/testing.py``.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from msattn.kernels import bench
from msattn.kernels.common.fp8 import FP8, dequantize, quantize
from msattn.kernels.testing import assert_within_budget, random_pages, random_qkv, starts, visible
from msattn.kernels.types import PagedKeys

SMALL = bench.Shape(
    130, batch=2, q_heads=6, kv_heads=2, head_size=16, dtype=torch.float32, device="cpu"
)
Numbers = int | Sequence[int]  # of all sequences, or of each
ANY_LENGTHS = {  # of queries, and of so many more keys
    "n": st.integers(1, 150),
    "more": st.integers(-20, 90),
    "causal": st.booleans(),
    "block": st.sampled_from([16, 64]),
    "softcap": st.sampled_from([None, 0.5, 5.0]),
}


def random_buckets(
    batch: int,
    heads: int,
    num_keys: int,
    num_buckets: int,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> Tensor:
    """Draws the bucket of each key, ``int32 [B, H, M]``.

    Buckets have very unequal sizes; some are empty, and some keys are in no bucket (-1).
    """
    generator = torch.Generator().manual_seed(seed)
    skewed = torch.rand(batch, heads, num_keys, generator=generator) ** 2 * (num_buckets + 1) - 1
    return skewed.floor().int().to(device)


def keys_read(
    buckets: Tensor, probes: Tensor, recent: Numbers, sink: int, begin: Numbers, end: Numbers
) -> Tensor:
    """Returns the keys that a decoding step reads by definition, ``bool [B, Hkv, M]``.

    The first and the number of newest keys, and the end, are those of each sequence, or of all.
    """
    position = torch.arange(buckets.shape[2], device=buckets.device)
    first, stop, newest = (
        torch.as_tensor(x, device=buckets.device).view(-1, 1, 1) for x in (begin, end, recent)
    )
    probed = (buckets[..., None] == probes[:, :, None]).any(-1) & (buckets >= 0)
    return (
        (probed | (position < first + sink) | (position >= stop - newest))
        & (position >= first)
        & (position < stop)
    )


def in_pages(
    k: Tensor,
    v: Tensor,
    unread: Tensor,
    lengths: Sequence[int],
    page_size: int,
    by_head: bool | None = None,
    by_position: Sequence[Tensor] = (),
    seed: int = 0,
) -> tuple[PagedKeys, list[Tensor], tuple[Tensor, Tensor]]:
    """Returns pages of keys and values ``[B, Hkv, M, D]``, others by slot, and the numbers that the
    pages hold.

    Keys that are ``unread [B, Hkv or 1, M, 1]`` are NaN. With ``by_head`` the pages are in FP8,
    with one scale for each head or one for all, and some numbers are saturated.
    """
    stored, exact, in_fp8 = (k, v), (k, v), {}
    if by_head is not None:
        heads = torch.arange(k.shape[1] if by_head else 1, device=k.device)
        scales = 0.007 * 1.3**heads, 0.02 / (1 + heads)
        held = [quantize(x, scale) for x, scale in zip((k, v), scales, strict=True)]
        stored = held[0].float(), held[1].float()
        exact_k, exact_v = (
            dequantize(x, scale, torch.float64) for x, scale in zip(held, scales, strict=True)
        )
        exact = exact_k, exact_v
        in_fp8 = {"k_scale": scales[0], "v_scale": scales[1] if by_head else scales[1][0]}
    wide_k, wide_v = (x.masked_fill(unread, torch.nan) for x in stored)
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=k.device)
    cache, slots = random_pages(wide_k, wide_v, kv_len, page_size, by_position, seed)
    if in_fp8:
        cache = cache._replace(k=cache.k.to(FP8), v=cache.v.to(FP8), **in_fp8)
    return cache, slots, exact


class Case(NamedTuple):
    """Problem of an attention operation; ``padding`` counts padded positions."""

    batch: int
    q_heads: int
    kv_heads: int
    num_queries: int
    num_keys: int
    head_size: int
    dtype: torch.dtype = torch.float32
    causal: bool = True
    padding: tuple[int, ...] | None = None
    block_size: int = 64
    key_block_size: int | None = None

    @property
    def blocks(self) -> tuple[int, int]:
        """Number of row blocks and of column blocks."""
        return -(-self.num_queries // self.block_size), -(
            -self.num_keys // (self.key_block_size or self.block_size)
        )

    def qkv(self, device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Draws q, k, v as transposed views, like a model's."""
        return random_qkv(*self[:6], self.dtype, device, seed)

    def visible(self, device: str = "cpu") -> Tensor:
        """Returns the mask of visible keys, ``bool [B, 1, N, M]``."""
        kv_start = starts(self.padding, device)
        return visible(self.batch, self.num_queries, self.num_keys, self.causal, kv_start, device)

    def options(self, device: str = "cpu") -> dict[str, Any]:
        """Returns the keyword arguments of the operation."""
        key_block = {} if self.key_block_size is None else {"key_block_size": self.key_block_size}
        return {
            "block_size": self.block_size,
            **key_block,
            "causal": self.causal,
            "kv_start": starts(self.padding, device),
        }


def full_product(
    head_size: int, dtype: torch.dtype, lengths: Sequence[tuple[int, int]], block_size: int = 64
) -> Iterator[Case]:
    """Yields all combinations of shapes on which a compiled kernel is tested.

    They have group sizes 1, 4 and 7, each with all ``lengths`` (queries, keys), padded and not.
    Triton compiles a kernel for each kind of length (1, a multiple of 16, other), padding and
    causality. To limit compilations, only the lengths in ``NOT_CAUSAL`` also run without a causal
    mask.
    """
    for (q_heads, kv_heads), (n, m) in itertools.product([(2, 2), (8, 2), (7, 1)], lengths):
        variants: list[Any] = [(1, True, None), (2, True, (0, 30))] if m > 1 else [(1, True, None)]
        if (n, m) in NOT_CAUSAL:
            variants += [(1, False, None), (2, False, (0, 30))]
        for batch, causal, padding in variants:
            yield Case(
                batch, q_heads, kv_heads, n, m, head_size, dtype, causal, padding, block_size
            )


NOT_CAUSAL = [(63, 63), (111, 300)]

# Most pairs of values of dtype, head size, group, lengths, causality, padding and block size occur
# in some row.
CASES = [
    Case(1, 2, 1, 1, 1, 64),
    Case(2, 4, 1, 63, 63, 80, torch.float16, True, (0, 40), 32),
    Case(1, 7, 1, 65, 65, 128, torch.float32, True, None, 64),
    Case(1, 1, 1, 111, 111, 64, torch.float16, False, None, 32),
    Case(2, 2, 2, 111, 300, 128, torch.float16, True, (70, 200), 64),
    Case(2, 7, 1, 65, 129, 80, torch.float32, False, (3, 129), 64),
    Case(1, 4, 4, 1, 130, 64, torch.float16, True, None, 128),
    Case(1, 8, 2, 200, 200, 64, torch.float32, True, (7,), 128),
    Case(2, 4, 1, 130, 65, 128, torch.float32, True, (0, 30), 64),
    Case(1, 2, 2, 130, 65, 80, torch.float16, False, (20,), 16),
    Case(1, 1, 1, 257, 257, 256, torch.float16, True, None, 64),
    Case(1, 2, 1, 40, 90, 8, torch.float32, True, (60,), 16),
    Case(1, 2, 1, 70, 70, 512, torch.float16, True, (5,), 64),
]

CAPPED_SCALE = 0.5  # scale of soft-capped scores: some exceed a limit of 5


class Rounding(NamedTuple):
    """Parameters of the rounding band of a gradient; see :func:`assert_within_budget`."""

    term: float
    count: int


def gradient_rounding(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float
) -> tuple[Rounding, Rounding, Rounding]:
    """Returns the rounding parameters of the gradients of q, k and v.

    The gradients of a key and a value are sums over the queries of the whole group.
    """
    queries, keys = q.shape[2] * (q.shape[1] // k.shape[1]), k.shape[2]
    return (
        Rounding(largest_term(dout, v, k, scale), keys),
        Rounding(largest_term(dout, v, q, scale), queries),
        # P is recomputed from an fp32 LSE and rounds with the scores
        Rounding(dout.abs().max().item(), queries),
    )


def largest_term(dout: Tensor, v: Tensor, other: Tensor, scale: float) -> float:
    """Returns the largest term of ``scale * dP . other`` with ``dP = dO V^T``.

    This is the size of the terms that cancel in the gradients of queries and keys.
    ``dS = P * (dP - rowsum(dO * O))`` is a difference of two sums over the head size, so it has the
    rounding error of dP even where it is 0, as for a query with one key. Eager code sums ``P * dP``
    and gets an exact 0 there.
    """
    dp = dout.float() @ v.float().repeat_interleave(dout.shape[1] // v.shape[1], dim=1).mT
    return scale * (dp.abs().max() * other.abs().max()).item()


def assert_sum_within_budget(
    name: str, actual: Tensor, parts: Tensor, eager: Tensor, *, term: float = 1.0, count: int = 1
) -> None:
    """Asserts that a sum over queries is as accurate as ``eager``, up to a band.

    The exact addends are ``parts [N, ...]``. The error of one sum of thousands of rounded numbers
    is a poor estimate of the error in another summation order. The band of
    :func:`assert_within_budget` is therefore widened by 4 standard deviations of the sum, where
    every part is off by one unit in the last place of ``actual``'s dtype.
    """
    exact = parts.double().sum(0)
    spread = 4 * torch.finfo(actual.dtype).eps * parts.double().norm(dim=0).max()
    assert_within_budget(
        name,
        actual,
        exact,
        exact + (eager.double() - exact).abs().max() + spread,
        term=term,
        count=count,
    )
