"""What tests and benchmarks of the kernels share: inputs, the exact answer, and how far from it a kernel may be.

The budget is derived, not chosen: a kernel is compared with fp64 attention over the same inputs, and may be off by as
much as the plain eager form in the kernel's own precision is, plus a rounding band (:func:`assert_within_budget`).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msattn.kernels.common.checks import query_offset


class Attention(NamedTuple):
    """Dense attention with nothing left out: ``out [B, Hq, N, D]``, ``lse [B, Hq, N]``, ``probs [B, Hq, N, M]``."""

    out: Tensor
    lse: Tensor
    probs: Tensor


def random_qkv(
    batch: int = 1,
    q_heads: int = 2,
    kv_heads: int = 1,
    num_queries: int = 64,
    num_keys: int | None = None,
    head_size: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    strided: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal ``q [B, Hq, N, D]`` and ``k, v [B, Hkv, M, D]``; ``strided``: transposed views, as projections give."""
    generator = torch.Generator().manual_seed(seed)
    num_keys = num_queries if num_keys is None else num_keys

    def draw(heads: int, tokens: int) -> Tensor:
        x = torch.randn(batch, tokens, heads, head_size, generator=generator).to(device, dtype).transpose(1, 2)
        return x if strided else x.contiguous()

    return draw(q_heads, num_queries), draw(kv_heads, num_keys), draw(kv_heads, num_keys)


def starts(padding: Sequence[int] | None, device: str | torch.device = "cpu") -> Tensor | None:
    """``kv_start`` (or any other int32 ``[B]``) from numbers of padded positions."""
    return None if padding is None else torch.tensor(padding, dtype=torch.int32, device=device)


class Case(NamedTuple):
    """One situation for an attention operation; ``padding`` holds the padded positions of each sequence."""

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

    @property
    def blocks(self) -> tuple[int, int]:
        """Row blocks and column blocks."""
        return -(-self.num_queries // self.block_size), -(-self.num_keys // self.block_size)

    def qkv(self, device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Random inputs, strided as a model's."""
        return random_qkv(*self[:6], self.dtype, device, seed)

    def visible(self, device: str = "cpu") -> Tensor:
        """Which keys the queries see, ``bool [B, 1, N, M]``."""
        kv_start = starts(self.padding, device)
        return visible(self.batch, self.num_queries, self.num_keys, self.causal, kv_start, device)

    def options(self, device: str = "cpu") -> dict[str, Any]:
        """Keyword arguments of the operation."""
        return {"block_size": self.block_size, "causal": self.causal, "kv_start": starts(self.padding, device)}


def full_product(
    head_size: int, dtype: torch.dtype, lengths: Sequence[tuple[int, int]], block_size: int = 64
) -> Iterator[Case]:
    """What a compiled kernel is held to: groups of 1, 4 and 7 with ``lengths`` (queries, keys), causal or not, with padding.

    Each kind of length (1, a multiple of 16, any) makes a compilation of its own, once for each kind of padding and order:
    where attention is not causal, two pairs of lengths stand for all.
    """
    for (q_heads, kv_heads), (n, m) in itertools.product([(2, 2), (8, 2), (7, 1)], lengths):
        turns: list[Any] = [(1, True, None), (2, True, (0, 30))] if m > 1 else [(1, True, None)]
        if (n, m) in NOT_CAUSAL:
            turns += [(1, False, None), (2, False, (0, 30))]
        for batch, causal, padding in turns:
            yield Case(batch, q_heads, kv_heads, n, m, head_size, dtype, causal, padding, block_size)


NOT_CAUSAL = [(63, 63), (111, 300)]

# Chosen by hand, so that most pairs of dtype, head size, group, lengths, order, padding and block meet in some row.
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
]


def random_block_mask(
    batch: int,
    heads: int,
    row_blocks: int,
    col_blocks: int,
    density: float,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> Tensor:
    """Random ``bool [B, H, Tr, Tc]`` with the given share of True blocks; the bottom-right diagonal is True."""
    generator = torch.Generator(device).manual_seed(seed)
    mask = torch.rand(batch, heads, row_blocks, col_blocks, generator=generator, device=device) < density
    rows = torch.arange(row_blocks, device=device)
    mask[:, :, rows, (rows + col_blocks - row_blocks).clamp(0, col_blocks - 1)] = True
    return mask


def visible(
    batch: int,
    num_queries: int,
    num_keys: int,
    causal: bool,
    kv_start: Tensor | None,
    device: str | torch.device = "cpu",
) -> Tensor:
    """Which keys a query sees, ``bool [B, 1, N, M]``: those after the padding and, if causal, none after itself."""
    positions = torch.arange(num_queries, device=device)[:, None] + query_offset(num_queries, num_keys, causal)
    keys = torch.arange(num_keys, device=device)[None, :]
    start = torch.zeros(batch, dtype=torch.int32, device=device) if kv_start is None else kv_start
    start = start[:, None, None, None]
    seen = (keys >= start) & (positions >= start)
    return seen & (keys <= positions) if causal else seen


def block_numbers(
    batch: int, num_queries: int, num_keys: int, causal: bool, kv_start: Tensor | None, block_size: int
) -> tuple[Tensor, Tensor]:
    """Row block of each query ``int64 [B, N]`` and column block of each key ``int64 [B, M]``; -1 in the padding."""
    device = "cpu" if kv_start is None else kv_start.device
    start = torch.zeros(batch, dtype=torch.int64) if kv_start is None else kv_start.long()
    offset = query_offset(num_queries, num_keys, causal)
    rows = torch.arange(num_queries, device=device) + offset - start.clamp(min=offset)[:, None]
    cols = torch.arange(num_keys, device=device) - start[:, None]
    return tuple(torch.where(x < 0, -1, x // block_size) for x in (rows, cols))  # type: ignore[return-value]


def tokens_of_blocks(
    block_mask: Tensor,
    batch: int,
    q_heads: int,
    num_queries: int,
    num_keys: int,
    causal: bool,
    kv_start: Tensor | None,
    block_size: int,
) -> Tensor:
    """``block_mask [B | 1, Hq | Hkv | 1, Tr, Tc]`` spread over tokens: ``bool [B, Hq, N, M]``, False in the padding."""
    rows, cols = block_numbers(batch, num_queries, num_keys, causal, kv_start, block_size)
    rows, cols = rows.to(block_mask.device), cols.to(block_mask.device)
    mask = block_mask.repeat_interleave(q_heads // block_mask.shape[1], dim=1).expand(batch, -1, -1, -1)
    mask = torch.stack([mask[b][:, rows[b]][:, :, cols[b]] for b in range(batch)])
    return mask & (rows >= 0)[:, None, :, None] & (cols >= 0)[:, None, None, :]


def max_over_blocks(probs: Tensor, rows: Tensor, cols: Tensor, blocks: tuple[int, int]) -> Tensor:
    """Block map ``[B, H, Tr, Tc]`` of probabilities ``[B, H, N, M]``, given the block numbers of queries and keys."""
    rows, cols = (x.where(x >= 0, count).to(probs.device) for x, count in zip((rows, cols), blocks, strict=True))
    batch, heads, num_queries, _ = probs.shape
    by_col = probs.new_zeros((batch, heads, num_queries, blocks[1] + 1))  # the last block collects the padding
    by_col.scatter_reduce_(3, cols[:, None, None].expand_as(probs), probs, "amax")
    block_map = probs.new_zeros((batch, heads, blocks[0] + 1, blocks[1] + 1))
    block_map.scatter_reduce_(2, rows[:, None, :, None].expand_as(by_col), by_col, "amax")
    return block_map[..., :-1, :-1]


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
    score_mod: Callable[[Tensor], Tensor] | None = None,
) -> Attention:
    """Softmax attention, everything in memory at once, computed in ``dtype`` as eager PyTorch would.

    ``seen`` is a boolean mask that broadcasts to ``[B, Hq, N, M]``; a row that sees nothing has ``out = 0, lse = -inf``.
    Statistics are kept in fp32 at least; products take and give ``dtype``, as those of an eager model do. ``score_mod`` acts
    on the scaled scores ``[B, Hq, N, M]`` before they are masked.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = (x.to(dtype) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).to(statistics) * factor
    scores = (scores if score_mod is None else score_mod(scores)).masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    probs = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    return Attention(probs.to(dtype) @ v, lse, probs)


class Rounding(NamedTuple):
    """What the band of a gradient depends on (:func:`assert_within_budget`)."""

    term: float
    count: int


def gradient_rounding(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float) -> tuple[Rounding, Rounding, Rounding]:
    """For the gradients of q, k and v: of keys and values, the queries of a whole group are added up."""
    queries, keys = q.shape[2] * (q.shape[1] // k.shape[1]), k.shape[2]
    return (
        Rounding(largest_term(dout, v, k, scale), keys),
        Rounding(largest_term(dout, v, q, scale), queries),
        Rounding(dout.abs().max().item(), queries),  # P, made again from an LSE in fp32, rounds with the scores
    )


def largest_term(dout: Tensor, v: Tensor, other: Tensor, scale: float) -> float:
    """Largest term of ``scale * dP . other``, ``dP = dO V^T``: the size of what cancels in gradients of queries and keys.

    ``dS = P * (dP - rowsum(dO * O))`` is a difference of two sums over the head size, so that its rounding is that of dP, also
    where it is 0, as for a query with one key; eager code sums ``P * dP`` and gets an exact 0 there.
    """
    dp = dout.float() @ v.float().repeat_interleave(dout.shape[1] // v.shape[1], dim=1).mT
    return scale * (dp.abs().max() * other.abs().max()).item()


def assert_within_budget(name: str, actual: Tensor, exact: Tensor, eager: Tensor, *, term: float = 1.0, count: int = 1) -> None:
    """``actual`` is as near to ``exact`` as the eager form of its own precision, up to a rounding band.

    The band: one unit in the last place of ``actual``'s dtype, for rounding the result, relative to the largest exact value
    (or 1); and, relative to that or to ``term``, the largest of the terms that cancel, ``3 * 2 ** -21``, for what fp32 kernels
    do otherwise than eager code: ``exp2`` of the hardware (2 ulp of 1), scores taken to base 2 (1 ulp of scores up to 8:
    normal inputs of some 10^8 pairs reach 6.8), and sums rebased tile by tile (2 ulp of 1). Where ``count`` terms are added up
    one after another, which eager code does in blocks, each addition rounds, half an ulp of the sum: ``2 ** -24 sqrt(count)``.
    Infinities must stand at the same places; NaN is never right.
    """
    assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    assert not actual.isnan().any(), f"{name}: {int(actual.isnan().sum())} NaN"
    finite = exact.isfinite()
    assert torch.equal(actual[~finite].double(), exact[~finite].double()), f"{name}: infinities at the wrong places"
    if not finite.any():
        return
    want = exact[finite].double()
    error = (actual[finite].double() - want).abs().max().item()
    eager_error = (eager[finite].double() - want).abs().max().item()
    largest = max(want.abs().max().item(), 1.0)
    band = (torch.finfo(actual.dtype).eps + 2**-24 * count**0.5) * largest + 3 * 2**-21 * max(largest, term)
    assert error <= eager_error + band, f"{name}: error {error:.3e} above eager's {eager_error:.3e} + band {band:.3e}"


def assert_sum_within_budget(
    name: str, actual: Tensor, parts: Tensor, eager: Tensor, *, term: float = 1.0, count: int = 1
) -> None:
    """Like :func:`assert_within_budget`, for a sum over queries whose exact ``parts`` are given, ``[N, ...]``.

    A sum of thousands of rounded numbers, of which there may be one or two, says little about the rounding that another order
    gives. So the band has 4 standard deviations more, were every part off by one unit in the last place of ``actual``'s dtype.
    """
    exact = parts.double().sum(0)
    spread = 4 * torch.finfo(actual.dtype).eps * parts.double().norm(dim=0).max()
    assert_within_budget(name, actual, exact, exact + (eager.double() - exact).abs().max() + spread, term=term, count=count)


def random_buckets(
    batch: int, heads: int, num_keys: int, num_buckets: int, device: str | torch.device = "cpu", seed: int = 0
) -> Tensor:
    """Random ``int32 [B, H, M]`` bucket of each key, of very unequal sizes, some empty; -1 (in no bucket) among them."""
    generator = torch.Generator().manual_seed(seed)
    skewed = torch.rand(batch, heads, num_keys, generator=generator) ** 2 * (num_buckets + 1) - 1
    return skewed.floor().int().to(device)
