"""Random block maps, and the check of the operations that read them."""

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from msattn.kernels.block_sparse_attention import block_sparse_attention
from msattn.kernels.block_sparse_attention import forward as block_sparse_module
from msattn.kernels.common.checks import query_offset
from msattn.kernels.common.choices import ZOOMS
from msattn.kernels.multiscale_attention import forward as multiscale_module
from msattn.kernels.multiscale_attention import multiscale_attention
from msattn.kernels.testing import (
    Attention,
    assert_within_budget,
    block_numbers,
    random_block_mask,
    starts,
    tokens_of_blocks,
)
from msattn.kernels.types import Backend, SparseAttention
from tests.kernels import shared
from tests.kernels.problems import CAPPED_SCALE, Case, gradient_rounding


def random_mask(
    batch: int,
    heads: int,
    blocks: tuple[int, int],
    density: float = 0.4,
    device: str = "cpu",
    seed: int = 0,
) -> Tensor:
    return random_block_mask(batch, heads, *blocks, density, device, seed)


def random_zoom(
    batch: int,
    heads: int,
    blocks: tuple[int, int],
    density: float = 0.7,
    device: str = "cpu",
    seed: int = 0,
) -> Tensor:
    """Returns a random zoom map, ``uint8 [B, H, Tr, Tc]``.

    A share ``density`` of the blocks is read, at uniformly drawn zooms.
    """
    mask = random_block_mask(batch, heads, *blocks, density, device, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    levels = torch.randint(0, 4, mask.shape, generator=generator, device=device, dtype=torch.int32)
    return torch.where(mask, 2**levels, 0).to(torch.uint8)


class Operation(NamedTuple):
    """Attention over a map of blocks: the operation, its module, the name and dtype of the map, and
    how to draw one.
    """

    attend: Callable[..., SparseAttention]
    module: ModuleType
    map: str
    dtype: torch.dtype
    draw: Callable[..., Tensor]


BLOCK_SPARSE = Operation(
    block_sparse_attention, block_sparse_module, "block_mask", torch.bool, random_mask
)
MULTISCALE = Operation(multiscale_attention, multiscale_module, "zoom", torch.uint8, random_zoom)
each_operation = pytest.mark.parametrize(
    "operation", [BLOCK_SPARSE, MULTISCALE], ids=lambda operation: operation.attend.__name__
)


def zoom_of_tokens(blocks: Tensor, case: Case, device: str) -> Tensor:
    """Returns the zoom at which each query reads each key, by definition; a mask has zoom 1.

    The result is ``uint8 [B, Hq, N, M]``, 0 for keys that are not read.
    """
    kv_start = starts(case.padding, device)
    sizes = (
        case.batch,
        case.q_heads,
        case.num_queries,
        case.num_keys,
        case.causal,
        kv_start,
        *case[-2:],
    )
    by_level = [tokens_of_blocks(blocks == z, *sizes) * z for z in ZOOMS]
    tokens = torch.stack(by_level).sum(0).to(torch.uint8)
    if case.causal:
        start = (
            torch.zeros(case.batch, dtype=torch.int32, device=device)
            if kv_start is None
            else kv_start
        )[:, None]
        offset = query_offset(case.num_queries, case.num_keys, True)
        rows, cols = block_numbers(
            case.batch, case.num_queries, case.num_keys, True, kv_start, case.block_size
        )
        # of the row block, [B, N]
        first_query = start.clamp(min=offset) + rows.to(device) * case.block_size
        # of the block, [B, M]
        last_key = (start + (cols.to(device) + 1) * case.block_size).clamp(max=case.num_keys) - 1
        ahead = last_key[:, None, None, :] > first_query[:, None, :, None]
        tokens = tokens.where(~ahead, tokens.clamp(max=1))
    return tokens * case.visible(device)


def means(x: Tensor, z: int, kv_start: Tensor | None, rounded_to: torch.dtype) -> Tensor:
    """Replaces each token of ``x [B, H, M, D]`` by the mean of its group of z.

    Means are rounded, their gradients are not.
    """
    rows = []
    for b, row in enumerate(x.to(torch.promote_types(x.dtype, torch.float32))):
        start = 0 if kv_start is None else int(kv_start[b])
        length = x.shape[2] - start
        groups = -(-length // z)
        padded = torch.nn.functional.pad(row[:, start:], (0, 0, 0, groups * z - length))
        sums = padded.reshape(x.shape[1], groups, z, x.shape[3]).sum(2)
        sizes = torch.full((groups, 1), z, device=x.device)
        sizes[-1:] = length - (groups - 1) * z
        rows.append(
            torch.cat([row[:, :start], (sums / sizes).repeat_interleave(z, 1)[:, :length]], 1)
        )
    mean = torch.stack(rows)
    return (mean + (mean.to(rounded_to).to(mean) - mean).detach()).to(x.dtype)


def dense_definition(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, case: Case, scale: float, softcap: float | None
) -> Attention:
    """Attention by definition, in the dtype of q, with all scores in memory.

    A mean of n keys with n times the weight equals n copies of the mean.
    """
    statistics = torch.promote_types(q.dtype, torch.float32)
    kv_start = starts(case.padding, str(q.device))
    scores = torch.full(tokens.shape, -math.inf, dtype=statistics, device=q.device)
    views = []
    for z in ZOOMS:
        keys, values = (
            means(x, z, kv_start, case.dtype).repeat_interleave(case.q_heads // case.kv_heads, 1)
            for x in (k, v)
        )
        level = (q @ keys.mT).to(statistics) * scale
        scores = torch.where(
            tokens == z, level if softcap is None else softcap * torch.tanh(level / softcap), scores
        )
        views.append((tokens == z, values))
    nothing = (tokens == 0).all(-1)
    lse = scores.masked_fill(nothing[..., None], 0).logsumexp(-1)
    probs = (scores - lse[..., None]).exp()
    out = torch.stack([(probs * seen).to(q.dtype) @ values for seen, values in views]).sum(0)
    return Attention(out, lse.masked_fill(nothing, -math.inf), probs)


class Gradients(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor


def gradients(
    got: Attention | SparseAttention,
    inputs: Sequence[Tensor],
    dout: Tensor,
    dlse: Tensor,
    of_nothing: float = 0.0,
) -> Gradients:
    """Gradients through out and lse; ``of_nothing`` arrives at the lse of rows without visible
    keys, and may be any number.
    """
    dlse = dlse.masked_fill(~got.lse.isfinite(), of_nothing)
    return Gradients(*torch.autograd.grad(got[:2], inputs, [dout.to(got.out), dlse.to(got.lse)]))


def check(
    operation: Operation,
    case: Case,
    blocks: Tensor,
    backend: Backend,
    device: str,
    with_gradients: bool = True,
    softcap: float | None = None,
) -> None:
    """Checks outputs, and gradients through out and lse, against the definition; padding holds NaN.

    Gradients of queries without visible keys, and of keys that no query reads, are exactly 0.
    """
    # Capped scores spread as much at each head size: dS has the rounding of out, times keys, scale
    # and root of the head size.
    scale = case.head_size**-0.5 if softcap is None else CAPPED_SCALE * (64 / case.head_size) ** 0.5
    tokens = zoom_of_tokens(blocks, case, device)
    drawn = q, k, v = case.qkv(device)
    leaves = shared.fill_padding(case, *drawn)
    got = operation.attend(
        *leaves, blocks, **case.options(device), scale=scale, softcap=softcap, backend=backend
    )
    assert got.out.dtype == case.dtype
    assert got.lse.dtype == torch.float32
    inputs, forms = {}, {}
    for dtype in {torch.float64, torch.float32, case.dtype}:
        inputs[dtype] = [x.to(dtype).requires_grad_(with_gradients) for x in drawn]
        leaf_q, leaf_k, leaf_v = inputs[dtype]
        forms[dtype] = dense_definition(leaf_q, leaf_k, leaf_v, tokens, case, scale, softcap)
    assert_within_budget("out", got.out, forms[torch.float64].out, forms[case.dtype].out)
    assert_within_budget("lse", got.lse, forms[torch.float64].lse, forms[torch.float32].lse)
    unseen = (tokens == 0).all(-1)
    assert (got.out[unseen] == 0).all()
    if not with_gradients:
        return
    dout = torch.randn(got.out.shape, device=device).to(case.dtype)
    dlse = torch.randn(got.lse.shape, device=device)
    actual = gradients(got, leaves, dout, dlse, torch.nan)
    exact, eager = (gradients(forms[x], inputs[x], dout, dlse) for x in (torch.float64, case.dtype))
    roundings = gradient_rounding(q, k, v, dout, scale)
    for name, x, y, z, rounding in zip(
        Gradients._fields, actual, exact, eager, roundings, strict=True
    ):
        assert x.dtype == case.dtype
        assert_within_budget(name, x, y, z, **rounding._asdict())
    assert (actual.dq[unseen] == 0).all()
    unread = (tokens == 0).unflatten(1, (case.kv_heads, -1)).all(dim=3).all(dim=2)
    assert (actual.dk[unread] == 0).all()
    assert (actual.dv[unread] == 0).all()
