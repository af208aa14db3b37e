"""Tests multiscale_attention: accuracy against fp64, gradients, edge cases."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.common.block_checks import ZOOMS
from msattn.kernels.common.checks import query_offset
from msattn.kernels.multiscale_attention import forward as module
from msattn.kernels.multiscale_attention import multiscale_attention, zoom_of_mask
from msattn.kernels.testing import (
    Attention,
    assert_within_budget,
    block_numbers,
    random_block_mask,
    random_qkv,
    starts,
    tokens_of_blocks,
)
from msattn.kernels.types import Backend, SparseAttention
from tests.kernels import shared
from tests.kernels.problems import CAPPED_SCALE, CASES, Case, full_product, gradient_rounding
from tests.kernels.shared import BACKENDS

CAPPED = [(2, 5.0), (1, 50.0), (5, 5.0), (8, 5.0)]  # numbers of cases, and limits


def random_zoom(
    batch: int, heads: int, blocks: tuple[int, int], density: float = 0.7, device: str = "cpu", seed: int = 0
) -> Tensor:
    """Returns a random zoom map, ``uint8 [B, H, Tr, Tc]``.

    A share ``density`` of the blocks is read, at uniformly drawn zooms.
    """
    mask = random_block_mask(batch, heads, *blocks, density, device, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    levels = torch.randint(0, 4, mask.shape, generator=generator, device=device, dtype=torch.int32)
    return torch.where(mask, 2**levels, 0).to(torch.uint8)


def zoom_of_tokens(zoom: Tensor, case: Case, device: str) -> Tensor:
    """Returns the zoom at which each query reads each key, by definition.

    The result is ``uint8 [B, Hq, N, M]``, 0 for keys that are not read.
    """
    kv_start = starts(case.padding, device)
    sizes = case.batch, case.q_heads, case.num_queries, case.num_keys, case.causal, kv_start, case.block_size
    by_level = [tokens_of_blocks(zoom == z, *sizes) * z for z in ZOOMS]
    tokens = torch.stack(by_level).sum(0).to(torch.uint8)
    if case.causal:
        start = (torch.zeros(case.batch, dtype=torch.int32, device=device) if kv_start is None else kv_start)[:, None]
        offset = query_offset(case.num_queries, case.num_keys, True)
        rows, cols = block_numbers(case.batch, case.num_queries, case.num_keys, True, kv_start, case.block_size)
        first_query = start.clamp(min=offset) + rows.to(device) * case.block_size  # of the row block, [B, N]
        last_key = (start + (cols.to(device) + 1) * case.block_size).clamp(max=case.num_keys) - 1  # of the block, [B, M]
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
        rows.append(torch.cat([row[:, :start], (sums / sizes).repeat_interleave(z, 1)[:, :length]], 1))
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
        keys, values = (means(x, z, kv_start, case.dtype).repeat_interleave(case.q_heads // case.kv_heads, 1) for x in (k, v))
        level = (q @ keys.mT).to(statistics) * scale
        scores = torch.where(tokens == z, level if softcap is None else softcap * torch.tanh(level / softcap), scores)
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


def gradients(got: Attention | SparseAttention, inputs: list[Tensor], dout: Tensor, dlse: Tensor) -> Gradients:
    """Gradients through out and, for rows with visible keys, lse."""
    dlse = dlse.masked_fill(~got.lse.isfinite(), 0)
    return Gradients(*torch.autograd.grad(got[:2], inputs, [dout.to(got.out), dlse.to(got.lse)]))


def check(
    case: Case, zoom: Tensor, backend: Backend, device: str, with_gradients: bool = True, softcap: float | None = None
) -> None:
    """Checks outputs, and gradients through out and lse, against the definition; padding holds NaN."""
    scale = case.head_size**-0.5 if softcap is None else CAPPED_SCALE
    tokens = zoom_of_tokens(zoom, case, device)
    drawn = q, k, v = case.qkv(device)
    leaves = shared.fill_padding(case, *drawn)
    got = multiscale_attention(*leaves, zoom, **case.options(device), scale=scale, softcap=softcap, backend=backend)
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
    dout, dlse = torch.randn(got.out.shape, device=device).to(case.dtype), torch.randn(got.lse.shape, device=device)
    actual = gradients(got, leaves, dout, dlse)
    exact, eager = (gradients(forms[x], inputs[x], dout, dlse) for x in (torch.float64, case.dtype))
    roundings = gradient_rounding(q, k, v, dout, scale)
    for name, x, y, z, rounding in zip(Gradients._fields, actual, exact, eager, roundings, strict=True):
        assert_within_budget(name, x, y, z, **rounding._asdict())
    assert (actual.dq[unseen] == 0).all()
    unread = (tokens == 0).unflatten(1, (case.kv_heads, -1)).all(dim=3).all(dim=2)
    assert (actual.dk[unread] == 0).all()
    assert (actual.dv[unread] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("number", "softcap"), [CAPPED[0], *((n, None) for n in range(len(CASES))), *CAPPED[1:]], ids=str)
def test_agrees_with_fp64(number: int, softcap: float | None, backend: Backend, device: str, poisoned: None) -> None:
    """Covers maps shared by batch or heads, and rows without a block."""
    case = CASES[number]
    heads = (case.q_heads, case.kv_heads, 1)[number % 3]
    zoom = random_zoom(case.batch if number % 2 else 1, heads, case.blocks, device=device)
    if number % 4 == 3:
        zoom[:, :, -1] = 0
    # Interpreted gradients take most of the time, so every second case checks the outputs alone.
    with_gradients = device == "cuda" or backend == "torch" or number % 2 == 1
    check(case, zoom, backend, device, with_gradients, softcap)


@settings(max_examples=8, deadline=None)
@given(
    n=st.integers(1, 100),
    more=st.integers(-20, 90),
    causal=st.booleans(),
    block=st.sampled_from([16, 64]),
    softcap=st.sampled_from([None, 1.0]),
    seed=st.integers(0, 99),
)
def test_any_lengths(n: int, more: int, causal: bool, block: int, softcap: float | None, seed: int) -> None:
    case = Case(1, 2, 1, n, max(1, n + more), 16, causal=causal, block_size=block)
    check(case, random_zoom(1, 2, case.blocks, seed=seed), "torch", "cpu", softcap=softcap)


@pytest.mark.slow
@pytest.mark.parametrize("last", [8, 4, 2, 0])
def test_tiles_of_means_across_zooms(last: int, device: str) -> None:
    """Tiles lie within one zoom or span several; the last group is smaller."""
    case = Case(1, 1, 1, 16, 493, 16, causal=False, block_size=16)
    for zooms in ((8, 4, 2), (8, 8, 8, 8, 4, 2), (4, 1)):
        zoom = torch.tensor(zooms, dtype=torch.uint8, device=device).repeat(31)[:31].repeat(1, 1, 1, 1)
        zoom[..., -1] = last
        check(case, zoom, "triton", device, with_gradients=False)


@pytest.mark.gpu
def test_reference_at_4095_tokens(device: str) -> None:
    case = Case(1, 1, 1, 4095, 4095, 64)
    check(case, random_zoom(1, 1, case.blocks, 0.2, device), "torch", device, with_gradients=False)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_size", "block_size"), [*itertools.product([64, 80, 128], [16, 64, 128]), (256, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_full_product(dtype: torch.dtype, head_size: int, block_size: int, poisoned: None) -> None:
    lengths = [(1, 1), (63, 63), (65, 65), (1, 333), (111, 300), (1100, 1100), (130, 65)]
    if head_size == 256:  # an unusual size that takes minutes to compile in fp32
        lengths = [(65, 65), (111, 300), (130, 65)]
    limits = itertools.cycle([None, 5.0, None, 50.0, None])
    for case in full_product(head_size, dtype, lengths, block_size):
        check(case, random_zoom(1, case.q_heads, case.blocks, 0.5, "cuda"), "triton", "cuda", softcap=next(limits))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_reads_only_selected_blocks(backend: Backend, device: str) -> None:
    q, k, v = random_qkv(1, 2, 2, 200, head_size=16, device=device)
    zoom = torch.zeros(1, 2, 4, 4, dtype=torch.uint8, device=device)
    zoom[:, 0, :, 0] = 1
    zoom[:, 1, :, 0] = zoom[:, :, 2, 1] = 8
    want = multiscale_attention(q, k, v, zoom, backend=backend)
    k[:, :, 128:], v[:, :, 128:] = float("nan"), float("nan")  # above the diagonal or not selected
    got = multiscale_attention(q, k, v, zoom, backend=backend)
    shared.assert_same(got, want)


def test_masks_of_the_paper_are_zooms() -> None:
    mask = torch.tensor([[1.0, 0.5], [0.25, 0.125], [0.0, 1.0]])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        zoom = zoom_of_mask(mask.to(dtype))
        assert (zoom.dtype, zoom.tolist()) == (torch.uint8, [[1, 2], [4, 8], [0, 1]])
    assert zoom_of_mask(torch.tensor([True, False])).tolist() == [1, 0]
    with pytest.raises(ValueError, match=r"mask has the values \[0.0, 2.0\]: expected \[0.0, 0.125"):
        zoom_of_mask(torch.tensor([2, 0]))


def test_smaller_blocks_repeat_the_map() -> None:
    """Repeating the map of larger blocks, rows or columns, reads the same groups."""
    q, k, v = random_qkv(1, 2, 1, 128, 256, 16)
    zoom = torch.tensor([1, 2, 4, 8, 0, 8, 2, 1], dtype=torch.uint8).view(1, 1, 2, 4)  # column blocks of 64
    whole = multiscale_attention(q, k, v, zoom, block_size=64, causal=False)
    finer = multiscale_attention(q, k, v, zoom.repeat_interleave(2, 2).repeat_interleave(2, 3), block_size=32, causal=False)
    torch.testing.assert_close(finer, whole)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_selected(backend: Backend, device: str) -> None:
    q, k, v = inputs = [x.requires_grad_() for x in random_qkv(1, 2, 1, 20, head_size=16, device=device)]
    zoom = torch.zeros(1, 1, 2, 2, dtype=torch.uint8, device=device)
    got = multiscale_attention(q, k, v, zoom, block_size=16, backend=backend)
    assert (got.out == 0).all()
    assert (got.lse == -torch.inf).all()
    assert all((x == 0).all() for x in torch.autograd.grad(got.out.sum(), inputs))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_operator(backend: Backend, device: str) -> None:
    q, k, v = inputs = [x.requires_grad_() for x in random_qkv(1, 2, 1, 40, head_size=16, device=device)]
    zoom = random_zoom(1, 1, (2, 2), device=device)

    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return multiscale_attention(q, k, v, zoom, block_size=32, backend=backend)

    arguments = (q, k, v, zoom, starts([3], device), 32, True, 0.1, 5.0, backend)
    shared.assert_operator(module._operator, arguments, step, q, k, v)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    shared.assert_same(*(torch.autograd.grad([x.square().sum() for x in f(q, k, v)], inputs) for f in (compiled, step)))


@pytest.mark.slow
def test_accepts_output_gradients_of_any_layout(device: str) -> None:
    """Covers expanded and misaligned ones."""
    q, k, v = inputs = [x.requires_grad_() for x in random_qkv(1, 2, 1, 40, head_size=16, device=device)]
    out = multiscale_attention(q, k, v, random_zoom(1, 1, (2, 2), device=device), block_size=32, backend="triton").out
    dout = torch.ones_like(out).contiguous()
    misaligned = torch.cat([dout.new_zeros(1), dout.flatten()])[1:].view_as(dout)
    layouts = dout, misaligned, dout[..., :1].expand_as(dout)
    want, *others = (torch.autograd.grad(out, inputs, x, retain_graph=True) for x in layouts)
    for got in others:
        shared.assert_same(got, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 48}, "block_size=48"),
        ({"zoom": torch.ones(1, 2, 1, 1)}, "zoom is torch.float32"),
        ({"zoom": torch.ones(1, 2, 1, 1, dtype=torch.bool)}, "zoom is torch.bool"),
        ({"zoom": torch.ones(1, 2, 2, 1, dtype=torch.uint8)}, "row blocks must be 1"),
        ({"zoom": torch.ones(1, 3, 1, 1, dtype=torch.uint8)}, "heads must be 4 or 2 or 1"),
        ({"zoom": torch.full((1, 2, 1, 1), 3, dtype=torch.uint8)}, "zoom holds 3: expected 0 .skip., 1, 2, 4 or 8"),
        ({"kv_start": torch.zeros(2, dtype=torch.int32)}, "kv_start"),
        ({"kv_start": starts([21])}, "kv_start=.21."),
        ({"scale": float("nan")}, "scale=nan"),
    ],
)
def test_rejects_bad_arguments(change: dict[str, Any], message: str) -> None:
    q, k, v = random_qkv(1, 4, 2, 20)
    arguments: dict[str, Any] = {"zoom": torch.ones(1, 2, 1, 1, dtype=torch.uint8)} | change
    for attention in (multiscale_attention, reference.multiscale_attention):
        with pytest.raises(ValueError, match=message):
            attention(q, k, v, **arguments)


def step_of(inputs: Sequence[Tensor], zoom: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Returns a forward and backward pass on the same inputs."""
    q, k, v = leaves = [x.requires_grad_() for x in inputs]

    def step() -> tuple[Tensor, ...]:
        got = multiscale_attention(q, k, v, zoom)
        return *got, *torch.autograd.grad(got.out.sum() + got.lse.sum(), leaves)

    return step


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitwise_reproducible(dtype: torch.dtype) -> None:
    inputs = random_qkv(2, 8, 2, 2000, head_size=128, dtype=dtype, device="cuda")
    shared.assert_reproducible(step_of(inputs, random_zoom(2, 8, (32, 32), 0.4, "cuda")))


@pytest.mark.gpu
def test_cuda_graph() -> None:
    """A captured forward and backward step follows zooms that change in place."""
    zoom = random_zoom(1, 4, (5, 5), 0.4, "cuda")
    step = step_of(random_qkv(1, 4, 2, 300, dtype=torch.bfloat16, device="cuda"), zoom)
    shared.assert_cuda_graph(step, lambda: zoom.copy_(random_zoom(1, 4, (5, 5), 0.8, "cuda", seed=1)))


@pytest.mark.gpu
@pytest.mark.parametrize("long", ["keys", "queries"])
def test_offsets_beyond_32_bits(long: str) -> None:
    """The last tokens give the same results as alone; needs up to 50 GB."""
    tokens, tail, head_size = 2**24 + 192, 192, 128
    num_queries, num_keys = (tail, tokens) if long == "keys" else (tokens, tail)
    q, k, v = (x.cuda() for x in random_qkv(1, 1, 1, tail, head_size=head_size, dtype=torch.bfloat16, strided=False))

    def lengthen(x: Tensor, length: int) -> Tensor:
        wide = torch.zeros(1, 1, length, head_size, dtype=x.dtype, device="cuda")
        wide[:, :, -tail:] = x
        return wide

    causal = long == "keys"
    zoom = random_zoom(1, 1, (3, 3), 1.0, "cuda")
    wide_zoom = torch.zeros(1, 1, -(-num_queries // 64), -(-num_keys // 64), dtype=torch.uint8, device="cuda")
    wide_zoom[:, :, -3:, -3:] = zoom
    dout = torch.randn_like(q)
    results = []
    for length_q, length_k, levels in ((num_queries, num_keys, wide_zoom), (tail, tail, zoom)):
        long_q, long_k, long_v = (lengthen(x, n).requires_grad_() for x, n in ((q, length_q), (k, length_k), (v, length_k)))
        got = multiscale_attention(long_q, long_k, long_v, levels, causal=causal)
        grads = torch.autograd.grad(got.out, (long_q, long_k, long_v), lengthen(dout, length_q))
        results.append([x[:, :, -tail:].clone() for x in (*got, *grads)])
        del long_q, long_k, long_v, got, grads
    torch.testing.assert_close(*results, rtol=0, atol=0)
