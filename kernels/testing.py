"""Inputs, exact results and tolerances for tests and benchmarks of the kernels.

Tolerances are derived from rounding, not tuned. A kernel is compared with fp64 attention over the
same inputs; its error may be that of eager PyTorch in the kernel's precision plus a rounding band
(:func:`assert_within_budget`).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels.common.checks import query_offset
from msattn.kernels.types import PagedKeys


class Attention(NamedTuple):
    """``out [B, Hq, N, D]``, ``lse [B, Hq, N]`` and ``probs [B, Hq, N, M]``."""

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
    """Draws normal ``q [B, Hq, N, D]`` and ``k, v [B, Hkv, M, D]``.

    ``strided`` makes them transposed views, like the outputs of a model's projections.
    """
    generator = torch.Generator().manual_seed(seed)
    num_keys = num_queries if num_keys is None else num_keys

    def draw(heads: int, tokens: int) -> Tensor:
        x = (
            torch.randn(batch, tokens, heads, head_size, generator=generator)
            .to(device, dtype)
            .transpose(1, 2)
        )
        return x if strided else x.contiguous()

    return draw(q_heads, num_queries), draw(kv_heads, num_keys), draw(kv_heads, num_keys)


def starts(padding: Sequence[int] | None, device: str | torch.device = "cpu") -> Tensor | None:
    """Returns ``kv_start``, int32 ``[B]``, from numbers of padded positions."""
    return None if padding is None else torch.tensor(padding, dtype=torch.int32, device=device)


def random_block_mask(
    batch: int,
    heads: int,
    row_blocks: int,
    col_blocks: int,
    density: float,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> Tensor:
    """Draws ``bool [B, H, Tr, Tc]`` with the given share of True blocks.

    The bottom-right aligned diagonal is always True.
    """
    generator = torch.Generator(device).manual_seed(seed)
    mask = (
        torch.rand(batch, heads, row_blocks, col_blocks, generator=generator, device=device)
        < density
    )
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
    """Returns the mask of visible keys ``bool [B, 1, N, M]``.

    A query sees the keys after the padding and, if ``causal``, none after itself.
    """
    positions = torch.arange(num_queries, device=device)[:, None] + query_offset(
        num_queries, num_keys, causal
    )
    keys = torch.arange(num_keys, device=device)[None, :]
    start = torch.zeros(batch, dtype=torch.int32, device=device) if kv_start is None else kv_start
    start = start[:, None, None, None]
    mask = (keys >= start) & (positions >= start)
    return mask & (keys <= positions) if causal else mask


def block_numbers(
    batch: int,
    num_queries: int,
    num_keys: int,
    causal: bool,
    kv_start: Tensor | None,
    block_size: int,
    key_block_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the row block of each query and the column block of each key, which have equal sizes
    by default.

    They are ``int64 [B, N]`` and ``int64 [B, M]``, -1 in the padding.
    """
    device = "cpu" if kv_start is None else kv_start.device
    start = torch.zeros(batch, dtype=torch.int64) if kv_start is None else kv_start.long()
    offset = query_offset(num_queries, num_keys, causal)
    rows = torch.arange(num_queries, device=device) + offset - start.clamp(min=offset)[:, None]
    cols = torch.arange(num_keys, device=device) - start[:, None]
    return torch.where(rows < 0, -1, rows // block_size), torch.where(
        cols < 0, -1, cols // (key_block_size or block_size)
    )


def tokens_of_blocks(
    block_mask: Tensor,
    batch: int,
    q_heads: int,
    num_queries: int,
    num_keys: int,
    causal: bool,
    kv_start: Tensor | None,
    block_size: int,
    key_block_size: int | None = None,
) -> Tensor:
    """Expands a block mask to tokens: ``bool [B, Hq, N, M]``, False in the padding.

    ``block_mask`` is ``[B | 1, Hq | Hkv | 1, Tr, Tc]``.
    """
    rows, cols = block_numbers(
        batch, num_queries, num_keys, causal, kv_start, block_size, key_block_size
    )
    rows, cols = rows.to(block_mask.device), cols.to(block_mask.device)
    mask = block_mask.repeat_interleave(q_heads // block_mask.shape[1], dim=1).expand(
        batch, -1, -1, -1
    )
    mask = torch.stack([mask[b][:, rows[b]][:, :, cols[b]] for b in range(batch)])
    return mask & (rows >= 0)[:, None, :, None] & (cols >= 0)[:, None, None, :]


def pool_over_blocks(
    probs: Tensor, rows: Tensor, cols: Tensor, blocks: tuple[int, int], pool: str = "max"
) -> Tensor:
    """Returns the block map of probabilities, ``[B, H, Tr, Tc]``; ``pool`` is that of
    ``maxpool_attention``.

    ``probs`` is ``[B, H, N, M]``; ``rows`` and ``cols`` are those of :func:`block_numbers`.
    """
    over_keys, over_queries = {
        "max": ("amax", "amax"),
        "mass": ("sum", "amax"),
        "mean_mass": ("sum", "sum"),
    }[pool]
    rows, cols = (
        x.where(x >= 0, count).to(probs.device)
        for x, count in zip((rows, cols), blocks, strict=True)
    )
    batch, heads, num_queries, _ = probs.shape
    # the extra last block collects the padding
    by_col = probs.new_zeros((batch, heads, num_queries, blocks[1] + 1))
    by_col.scatter_reduce_(3, cols[:, None, None].expand_as(probs), probs, over_keys)
    block_map = probs.new_zeros((batch, heads, blocks[0] + 1, blocks[1] + 1))
    block_map.scatter_reduce_(2, rows[:, None, :, None].expand_as(by_col), by_col, over_queries)
    if pool == "mean_mass":
        queries = torch.zeros_like(block_map[:, 0, :, 0]).scatter_add_(
            1, rows, torch.ones_like(rows, dtype=probs.dtype)
        )
        block_map /= queries.clamp(min=1)[:, None, :, None]
    return block_map[..., :-1, :-1]


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
    score_mod: Callable[[Tensor], Tensor] | None = None,
    sinks: Tensor | None = None,
) -> Attention:
    """Softmax attention with materialized scores, in ``dtype`` as in eager PyTorch.

    ``seen`` is a boolean mask that broadcasts to ``[B, Hq, N, M]``; a row that sees no key has
    ``out = 0, lse = -inf``. Softmax statistics are in fp32 or fp64, products have inputs and
    outputs in ``dtype``. ``score_mod`` modifies the scaled scores ``[B, Hq, N, M]`` before masking.
    ``sinks [Hq]`` are the scores of one more column, which has no value.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = (x.to(dtype) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).to(statistics) * factor
    scores = (scores if score_mod is None else score_mod(scores)).masked_fill(~seen, -math.inf)
    columns = (
        [scores]
        if sinks is None
        else [scores, sinks.to(statistics)[:, None, None].expand_as(scores[..., :1])]
    )
    lse = torch.cat(columns, -1).logsumexp(-1)
    probs = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    return Attention(probs.to(dtype) @ v, lse, probs)


def capped(softcap: float | None) -> Callable[[Tensor], Tensor] | None:
    """Returns the ``score_mod`` of :func:`dense_attention` that caps scores."""
    return None if softcap is None else lambda scores: softcap * torch.tanh(scores / softcap)


def assert_within_budget(
    name: str, actual: Tensor, exact: Tensor, eager: Tensor, *, term: float = 1.0, count: int = 1
) -> None:
    """Asserts that ``actual`` is as accurate as ``eager``, up to a rounding band.

    The largest error of ``actual`` may be that of ``eager`` plus the band. Errors are absolute
    differences from ``exact``. Let L be the largest absolute value of ``exact``, at least 1. The
    band is the sum of

    - ``eps * L``: one unit in the last place of ``actual``'s dtype, for rounding the result;
    - ``2 ** -24 * sqrt(count) * L``: half an ulp of the sum for each of ``count`` sequential
      additions, which eager code does in blocks;
    - ``3 * 2 ** -21 * max(L, term)``, where ``term`` is the largest term that cancels, for the
      differences between fp32 kernels and eager code: ``exp2`` of the hardware (2 ulp of 1), scores
      in base 2 (1 ulp of scores up to 8; about 10^8 pairs of normal inputs reach 6.8), and sums
      rescaled at each tile (2 ulp of 1).

    Infinities must be at the same positions, and NaN is never accepted.
    """
    assert actual.shape == exact.shape, (
        f"{name}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    )
    assert not actual.isnan().any(), f"{name}: {int(actual.isnan().sum())} NaN"
    finite = exact.isfinite()
    assert torch.equal(actual[~finite].double(), exact[~finite].double()), (
        f"{name}: infinities at the wrong positions"
    )
    if not finite.any():
        return
    expected = exact[finite].double()
    error = (actual[finite].double() - expected).abs().max().item()
    eager_error = (eager[finite].double() - expected).abs().max().item()
    largest = max(expected.abs().max().item(), 1.0)
    band = (torch.finfo(actual.dtype).eps + 2**-24 * count**0.5) * largest + 3 * 2**-21 * max(
        largest, term
    )
    assert error <= eager_error + band, (
        f"{name}: error {error:.3e} exceeds eager's {eager_error:.3e} + band {band:.3e}"
    )


def random_pages(
    k: Tensor,
    v: Tensor,
    kv_len: Tensor,
    page_size: int,
    others: Sequence[Tensor] = (),
    seed: int = 0,
) -> tuple[PagedKeys, list[Tensor]]:
    """Distributes a cache over shuffled pages, and ``others [B, Hkv, M]`` by slot.

    ``k, v [B, Hkv, M, D]`` become strided views of one buffer, whose other slots hold NaN. Entries
    of the table past the end of a sequence are -1. The others become ``[P, page_size, Hkv]``, with
    -1 in other slots.
    """
    batch, _, num_keys, _ = k.shape
    shape = batch, -(-num_keys // page_size)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(batch * shape[1] + 2, generator=generator)[:-2].view(shape).to(k.device)
    position = torch.arange(num_keys, device=k.device)
    page, offset = table[:, position // page_size], position % page_size

    def distribute(x: Tensor, fill: float) -> Tensor:
        pages = x.new_full((batch * shape[1] + 2, page_size, x.shape[1], *x.shape[3:]), fill)
        pages[page, offset] = x.transpose(1, 2)
        return pages

    k, v = torch.stack([distribute(x, math.nan) for x in (k, v)], 1).unbind(1)
    unused = torch.arange(shape[1], device=k.device) * page_size >= kv_len[:, None]
    cache = PagedKeys(k, v, table.masked_fill(unused, -1).int(), kv_len)
    return cache, [distribute(x, -1) for x in others]
