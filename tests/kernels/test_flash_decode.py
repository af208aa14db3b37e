"""Tests of `flash_decode` and `paged_flash_decode`: agreement with fp64, score_mod, edge cases."""

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msattn.kernels.common import dense_decode
from msattn.kernels.common.checks import query_offset
from msattn.kernels.common.fp8 import FP8
from msattn.kernels.common.primitives import tl, triton
from msattn.kernels.flash_decode import flash_decode
from msattn.kernels.flash_decode.score_mod import alibi, sliding_window, softcap
from msattn.kernels.paged import paged_flash_decode
from msattn.kernels.testing import random_pages, random_qkv, starts
from msattn.kernels.tuned import Tile
from msattn.kernels.types import Backend, ScoreMod, Variant
from tests.kernels import shared
from tests.kernels.problems import CAPPED_SCALE, in_pages
from tests.kernels.shared import BACKENDS, FULL, HALF

VARIANTS: list[Variant] = ["partial", "global"]
CAP, WIDTH = 5.0, 40


@triton.jit
def _bias_kernel(score, b, h, i, j, bias, num_keys, factor):
    """A custom modification: a bias per key that decays with the query's distance."""
    return score + tl.load(bias + b * num_keys + j) * factor / (1 + tl.abs(i - j))


def _bias(score, b, h, i, j, bias, num_keys, factor):
    return score + bias.to(score.dtype)[b, j] * factor / (1 + (i - j).abs())


class Case(NamedTuple):
    """One problem; ``padding`` and ``filled`` hold a number per sequence.

    With a ``page_size`` the keys are in pages, in FP8 with ``by_head``.
    """

    batch: int
    q_heads: int
    kv_heads: int
    num_queries: int
    num_keys: int
    head_size: int
    dtype: torch.dtype = FULL
    causal: bool = False
    mod: str | None = None
    padding: tuple[int, ...] | None = None
    filled: tuple[int, ...] | None = None
    splits: int | None = None
    cap: float = CAP
    page_size: int | None = None
    by_head: bool | None = None

    def score_mod(self, device: str) -> ScoreMod | None:
        """Returns the modification named by ``mod``."""
        if self.mod in ("bias", "nothing"):
            bias = torch.linspace(-2, 2, self.batch * self.num_keys, device=device).view(
                self.batch, self.num_keys
            )
            bias[:, slice(3, None, 7) if self.mod == "bias" else slice(None)] = -math.inf
            return ScoreMod(_bias_kernel, _bias, (bias,), (self.num_keys, 0.7))
        slopes = 2.0 ** -torch.arange(1, self.q_heads + 1, device=device)
        return {
            None: None,
            "softcap": softcap(self.cap),
            "alibi": alibi(slopes),
            "sliding_window": sliding_window(WIDTH),
        }[self.mod]

    def options(self, device: str) -> dict[str, Any]:
        """Returns keyword arguments of the operation."""
        lengths = {"kv_start": starts(self.padding, device), "kv_len": starts(self.filled, device)}
        return {
            "causal": self.causal,
            "score_mod": self.score_mod(device),
            "splits": self.splits,
            **lengths,
        }


def positions(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """Returns positions in the cache of queries ``[B, 1, N, 1]`` and keys ``[M]``."""
    filled = case.filled or [case.num_keys] * case.batch
    offset = torch.tensor(
        [query_offset(case.num_queries, end, case.causal) for end in filled], device=device
    )
    i = offset[:, None] + torch.arange(case.num_queries, device=device)
    return i[:, None, :, None], torch.arange(case.num_keys, device=device)


def visible(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """Returns the keys that are visible ``[B, 1, N, M]``, and those that may be read."""
    i, j = positions(case, device)
    padding = torch.tensor(case.padding or [0] * case.batch, device=device)[:, None, None, None]
    filled = torch.tensor(case.filled or [case.num_keys] * case.batch, device=device)[
        :, None, None, None
    ]
    real = (j >= padding) & (j < filled)
    if case.mod == "sliding_window":
        real = real & (j > i[:, :, :1] - WIDTH)
    seen = real & (i >= padding)
    return seen & (j <= i) if case.causal else seen, real


def modified(scores: Tensor, case: Case) -> Tensor:
    """Applies the case's modification to scores ``[B, Hq, N, M]``, by its formula."""
    i, j = positions(case, str(scores.device))
    if case.mod == "softcap":
        return case.cap * torch.tanh(scores / case.cap)
    if case.mod == "alibi":
        slopes = 2.0 ** -torch.arange(1, case.q_heads + 1, device=scores.device).to(scores.dtype)
        return scores - slopes[:, None, None] * (i - j)
    if case.mod == "sliding_window":
        return scores.masked_fill(i - j >= WIDTH, -math.inf)
    if case.mod in ("bias", "nothing"):
        mod = case.score_mod(str(scores.device))
        assert mod is not None
        return scores + 0.7 * mod.tensors[0].to(scores.dtype)[:, None, None] / (1 + (i - j).abs())
    return scores


def check(case: Case, variant: Variant, backend: Backend, device: str) -> None:
    q, k, v = random_qkv(*case[:6], case.dtype, device)
    seen, real = visible(case, device)
    unread = ~real[:, :, 0, :, None]  # these keys may hold any value
    capped = case.mod == "softcap"
    options: dict[str, Any] = {"scale": CAPPED_SCALE if capped else None, "backend": backend}
    if case.page_size is None:
        wide_k, wide_v = (x.masked_fill(unread, torch.nan) for x in (k, v))
        got = flash_decode(q, wide_k, wide_v, variant=variant, **case.options(device), **options)
    else:
        lengths = case.filled or [case.num_keys] * case.batch
        cache, _, (k, v) = in_pages(k, v, unread, lengths, case.page_size, case.by_head)
        got = paged_flash_decode(q, cache, softcap=case.cap if capped else None, **options)
    shared.assert_agrees(got, q, k, v, seen, options["scale"], lambda s: modified(s, case))


# Covers nearly all pairs of values of length, head size, dtype, group, causality and modification.
CASES = [
    Case(1, 1, 1, 1, 1, 64),
    Case(1, 4, 1, 1, 63, 80, HALF, True, "softcap"),
    Case(2, 7, 1, 5, 65, 128, FULL, True, "alibi", padding=(0, 30)),
    Case(2, 4, 4, 2, 111, 64, HALF, False, "sliding_window", filled=(111, 40), splits=2),
    Case(2, 8, 2, 16, 130, 128, HALF, True, None, padding=(7, 0), filled=(100, 130), splits=3),
    Case(1, 7, 7, 1, 111, 80, FULL, False, "bias"),
    Case(3, 4, 1, 3, 65, 64, FULL, True, "bias", padding=(65, 10, 3), filled=(65, 12, 6)),
    Case(1, 2, 1, 16, 63, 128, HALF, False, "alibi", splits=5),
    Case(1, 1, 1, 3, 111, 256, FULL, True, "softcap", splits=40),
    Case(2, 20, 1, 9, 65, 8, HALF, True, "sliding_window", padding=(20, 60), filled=(64, 65)),
    Case(2, 2, 1, 5, 63, 80, FULL, False, None, padding=(2, 0), filled=(3, 0)),
    Case(2, 4, 1, 16, 12, 64, HALF, True, "alibi", filled=(12, 4)),
    Case(1, 4, 1, 16, 70, 512, HALF, True, "softcap", splits=2),
    Case(2, 4, 2, 3, 40, 64, FULL, True, "nothing"),  # a modification that gives -inf
    Case(1, 2, 1, 1, 4200, 16, HALF, splits=40),  # more splits than maxima that are read at a time
]


def paged(
    lengths: tuple[int, ...],
    q_heads: int,
    kv_heads: int,
    num_queries: int,
    head_size: int,
    page_size: int | None,
    dtype: torch.dtype = FULL,
    **options: Any,
) -> Case:
    """A problem of filled pages."""
    sizes = q_heads, kv_heads, num_queries, max(1, *lengths), head_size, dtype, True
    return Case(len(lengths), *sizes, filled=lengths, page_size=page_size, **options)


CAPPED: dict[str, Any] = {"mod": "softcap"}
PAGED = [
    paged((300, 65), 7, 1, 3, 128, 64, **CAPPED),
    paged((111, 0, 300), 4, 1, 1, 80, 16, HALF),
    paged((300, 65), 7, 1, 3, 128, 64),
    paged((1,), 4, 4, 16, 64, 256, HALF),
    paged((300, 63), 8, 2, 4, 128, 256, HALF),
    paged((111,), 1, 1, 1, 80, 48),
    paged((63, 1), 2, 2, 2, 64, 64),
    paged((65, 111), 7, 7, 1, 256, 16),
    paged((300, 111), 7, 1, 16, 64, 128, HALF),
    paged((111, 0, 300), 4, 1, 1, 80, 16, HALF, **CAPPED, cap=50.0),
    paged((300, 63), 8, 2, 4, 128, 256, HALF, **CAPPED),
]
IN_FP8 = [  # groups of 1, 3, 4 and 7
    paged((300, 63), 8, 2, 4, 128, 256, HALF, **CAPPED, by_head=True),
    paged((63, 1), 2, 2, 2, 64, 64, by_head=False),
    paged((111, 0, 300), 4, 1, 1, 80, 16, HALF, by_head=True),
    paged((300, 65), 7, 1, 3, 128, 64, by_head=True),
    paged((65, 111), 6, 2, 2, 24, 16, HALF, by_head=True),  # rows that are not aligned
    paged((257,), 3, 3, 1, 256, 64, HALF, by_head=True),
]


@pytest.mark.interpreted(by="operation")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("operation", "case", "variant"),
    [
        *(("flash_decode", case, variant) for case in CASES for variant in VARIANTS),
        *(("paged", case, "partial") for case in PAGED),
        *(("paged in FP8", case, "partial") for case in IN_FP8),
        *(
            pytest.param(
                "paged in FP8",
                case._replace(dtype=torch.bfloat16),
                "partial",
                marks=pytest.mark.gpu,
            )
            for case in IN_FP8
        ),
    ],
    ids=str,
)
def test_agrees_with_fp64(
    operation: str, case: Case, variant: Variant, backend: Backend, device: str, poisoned: None
) -> None:
    check(case, variant, backend, device)


@pytest.mark.gpu
def test_large_queries_over_fp8() -> None:
    """Of products with FP8, queries beyond the range of fp16 are saturated, and infinite ones make
    their own rows NaN.
    """
    q, k, v = (x.bfloat16() for x in random_qkv(1, 4, 1, 1, 100, 64, device="cuda"))
    cache, _ = random_pages(k, v, starts([100], "cuda"), 16)
    cache = cache._replace(k=cache.k.to(FP8), v=cache.v.to(FP8))
    q[0, 0], q[0, 1, 0, 3] = q[0, 0] * 1e6, math.inf
    out = paged_flash_decode(q, cache).out[0, :, 0].float()
    expected = paged_flash_decode(q.float().clamp(-65504, 65504), cache, backend="torch").out
    assert out[1].isnan().all()
    torch.testing.assert_close(out[::2], expected[0, ::2, 0], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=2),
    page=st.sampled_from([None, 1, 5, 16, 64]),
    num_queries=st.integers(1, 5),
    mod=st.sampled_from([None, "softcap"]),
)
def test_any_lengths(
    backend: Backend,
    device: str,
    lengths: list[int],
    page: int | None,
    num_queries: int,
    mod: str | None,
) -> None:
    case = paged(tuple(lengths), 2, 1, num_queries, 16, page, mod=mod)
    check(case, "partial", backend, device)


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_full_product(dtype: torch.dtype, head_size: int, poisoned: None) -> None:
    """All modifications for one query, then some problems that fill larger tiles."""
    variants = [
        (None, False, False),
        (None, True, True),
        ("softcap", True, False),
        ("alibi", False, True),
    ]
    variants += [("sliding_window", True, True), ("bias", True, True)]
    few = itertools.product([(2, 2, 1), (4, 1, 1), (7, 1, 2)], variants)
    many = itertools.product([(7, 1, 5), (4, 1, 16), (7, 1, 16)], variants[1:3])
    for ((q_heads, kv_heads, n), (mod, causal, padded)), m in itertools.product(
        [*few, *many], [1, 63, 65, 111, 4095]
    ):
        padding, filled = ((m // 2, 0), (m, m - m // 3)) if padded else (None, None)
        case = Case(2, q_heads, kv_heads, n, m, head_size, dtype, causal, mod, padding, filled)
        for variant in VARIANTS:
            check(case, variant, "triton", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [1, 63, 65, 111, 4095])
@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("dtype", [FULL, HALF, torch.bfloat16], ids=str)
def test_full_product_of_pages(
    dtype: torch.dtype, page: int, num_keys: int, poisoned: None
) -> None:
    for head_size, (q_heads, kv_heads), num_queries in itertools.product(
        [64, 80, 128, 256], [(2, 2), (4, 1), (7, 1)], [1, 4, 16]
    ):
        lengths, options = (num_keys, num_keys // 2), CAPPED if q_heads == 7 else {}
        for by_head in (None, q_heads == 4):
            sizes = q_heads, kv_heads, num_queries, head_size, page, dtype
            case = paged(lengths, *sizes, by_head=by_head, **options)
            check(case, "partial", "triton", "cuda")


@pytest.mark.parametrize("limit", [0.5, 30.0])
def test_softcap_is_accurate(limit: float, device: str) -> None:
    """Compares the kernel's tanh through the LSE of a single key, which is its score."""
    scores = (
        torch.linspace(-12 * limit, 12 * limit, 63).tolist()
        + torch.linspace(-limit, limit, 65).tolist()
    )
    q = torch.zeros(1, len(scores), 1, 16, device=device)
    q[0, :, 0, 0] = torch.tensor(scores)
    k = torch.zeros(1, 1, 1, 16, device=device)
    k[..., 0] = 1
    got = flash_decode(q, k, k, scale=1.0, score_mod=softcap(limit), backend="triton").lse.flatten()
    want = limit * torch.tanh(q[0, :, 0, 0].double() / limit)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-7 * limit)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_custom_modification_inside_a_compiled_function(backend: Backend, device: str) -> None:
    """A custom modification breaks the graph and gives the eager result."""
    case = Case(1, 2, 1, 2, 20, 64, mod="bias")
    q, k, v = random_qkv(*case[:6], device=device)
    options = case.options(device)

    def twice(q: Tensor) -> Tensor:
        return flash_decode(q * 2, k, v, **options, backend=backend).out * 2

    shared.assert_same(torch.compile(twice, backend="aot_eager")(q), twice(q))


@pytest.mark.parametrize("backend", BACKENDS)
def test_custom_modification_has_no_gradient(backend: Backend, device: str) -> None:
    case = Case(1, 2, 1, 1, 20, 64, mod="bias")
    q, k, v = random_qkv(*case[:6], device=device)
    got = flash_decode(q.requires_grad_(), k, v, **case.options(device), backend=backend)
    with pytest.raises(NotImplementedError, match="no gradient"):
        got.out.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_cuda_graph(variant: Variant) -> None:
    """A captured step follows in-place changes of lengths."""
    q, k, v = random_qkv(2, 8, 2, 4, 500, 128, torch.bfloat16, "cuda")
    kv_len = torch.tensor([400, 300], dtype=torch.int32, device="cuda")
    options: dict[str, Any] = {
        "variant": variant,
        "causal": True,
        "score_mod": sliding_window(100),
        "kv_len": kv_len,
    }
    shared.assert_cuda_graph(
        lambda: flash_decode(q, k, v, **options), lambda: kv_len.copy_(torch.tensor([500, 1]))
    )


@pytest.mark.gpu
def test_cuda_graph_of_pages() -> None:
    """A captured step follows in-place changes of pages and lengths."""
    q, k, v = random_qkv(2, 8, 2, 1, 4095, 128, torch.bfloat16, "cuda")
    cache, _ = random_pages(k, v, torch.tensor([4095, 1000], device="cuda").int(), 256)
    other, _ = random_pages(k, v, torch.tensor([17, 4000], device="cuda").int(), 256, seed=1)
    shared.assert_cuda_graph(
        lambda: paged_flash_decode(q, cache),
        lambda: [x.copy_(y) for x, y in zip(cache[:4], other[:4], strict=True)],
    )


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_is_deterministic(variant: Variant) -> None:
    q, k, v = random_qkv(1, 32, 8, 4, 20000, 128, torch.bfloat16, "cuda")
    shared.assert_reproducible(lambda: flash_decode(q, k, v, variant=variant, causal=True), runs=20)


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """The last head starts beyond 2**31 elements and gives the same result alone."""
    num_keys = 2**23 + 100
    cache = torch.randn(1, 3, num_keys, 128, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(1, 3, 1, 128, dtype=torch.bfloat16, device="cuda")
    for variant in VARIANTS:
        got = flash_decode(q, cache, cache, variant=variant, splits=64)
        alone = flash_decode(q[:, 2:], cache[:, 2:], cache[:, 2:], variant=variant, splits=64)
        assert torch.equal(got.out[:, 2:], alone.out)
        assert torch.equal(got.lse[:, 2:], alone.lse)


@pytest.mark.parametrize(
    ("tile", "page_size", "in_fp8", "expected"),
    [
        (128, 64, False, (64, 5, 2)),
        (128, 256, False, (128, 5, 1)),
        (64, 16, False, (64, 5, 1)),
        (16, 48, False, (16, 5, 1)),
        (128, 256, True, (128, 3, 2)),
        (128, 64, True, (64, 5, 2)),
    ],
)
def test_tiles_divide_pages_or_cross_them(
    tile: int, page_size: int, in_fp8: bool, expected: tuple[int, int, int]
) -> None:
    """``expected`` are keys, stages and programs."""
    got = dense_decode._tile_of_pages(Tile(16, tile, 4, 3), page_size, in_fp8)
    assert (got.keys, got.stages, got.programs) == expected
