"""Tests `paged_block_sparse_attention`: agreement with fp64, edge cases."""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msattn.kernels.common.block_bits import pack_blocks
from msattn.kernels.common.block_lists import compact_packed_rows, compact_rows
from msattn.kernels.paged import block_sparse_attention as module
from msattn.kernels.paged import paged_block_sparse_attention
from msattn.kernels.testing import capped, random_qkv
from msattn.kernels.types import Backend, PagedKeys, SparseAttention
from tests.kernels import shared
from tests.kernels.problems import CAPPED_SCALE, in_pages
from tests.kernels.shared import BACKENDS, FULL, HALF


class Case(NamedTuple):
    """One problem; ``sequences`` have (cached, new) tokens, ``mask_heads`` of 0 means no mask."""

    page_size: int
    block_size: int
    q_heads: int
    kv_heads: int
    head_size: int
    mask_heads: int
    sequences: tuple[tuple[int, int], ...]
    dtype: torch.dtype = torch.float32
    key_block_size: int | None = None

    @property
    def key_block(self) -> int:
        return self.key_block_size or self.block_size

    @property
    def new(self) -> list[int]:
        """Number of queries of each sequence."""
        return [new for _, new in self.sequences]


class Problem(NamedTuple):
    """Inputs of a case, and its keys and values in one piece, ``[B, Hkv, M, D]``."""

    q: Tensor
    cache: PagedKeys
    cu_queries: Tensor
    mask: Tensor | None
    k: Tensor
    v: Tensor

    def options(self, case: Case) -> dict[str, int]:
        """Returns the keyword arguments of the operation."""
        key_block = {} if case.key_block_size is None else {"key_block_size": case.key_block_size}
        return {"max_queries": max(1, *case.new), "block_size": case.block_size, **key_block}


def make(case: Case, device: str, seed: int = 0, by_head: bool | None = None) -> Problem:
    """With ``by_head`` the cache is in FP8, with scales by head or for all."""
    lengths = [cached + new for cached, new in case.sequences]
    # and a query after the last sequence
    batch, num_keys, num_queries = len(lengths), max(lengths) + 5, sum(case.new) + 1
    q, _, _ = random_qkv(
        1, case.q_heads, 1, num_queries, 1, case.head_size, case.dtype, device, seed
    )
    _, k, v = random_qkv(
        batch, 1, case.kv_heads, 1, num_keys, case.head_size, case.dtype, device, seed
    )
    ends = torch.tensor(lengths, device=device)[:, None, None, None]
    unfilled = torch.arange(num_keys, device=device)[:, None] >= ends
    cache, _, (k, v) = in_pages(k, v, unfilled, lengths, case.page_size, by_head, seed=seed)
    cu_queries = torch.tensor(
        [0, *itertools.accumulate(case.new)], dtype=torch.int32, device=device
    )
    row_blocks = -(-max(1, *case.new) // case.block_size)
    col_blocks = -(-cache.table.shape[1] * case.page_size // case.key_block)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(batch, case.mask_heads, row_blocks, col_blocks, generator=generator) < 0.5
    return Problem(
        q[0].transpose(0, 1), cache, cu_queries, mask.to(device) if case.mask_heads else None, k, v
    )


def keys_seen(case: Case, mask: Tensor | None, b: int, device: str) -> Tensor:
    """Returns the keys that each query of a sequence sees by definition, bool
    ``[1, Hq or 1, n, kv_len]``.
    """
    cached, new = case.sequences[b]
    i, j = torch.arange(new, device=device)[:, None], torch.arange(cached + new, device=device)
    seen = (j <= cached + i)[None]
    if mask is not None:
        of_head = mask[b].repeat_interleave(case.q_heads // mask.shape[1], 0)
        seen = seen & of_head[:, i // case.block_size, j // case.key_block]
    return seen[None]


def check(
    case: Case,
    backend: Backend,
    device: str,
    softcap: float | None = None,
    by_head: bool | None = None,
) -> None:
    """Compares each sequence with dense attention over its keys in fp64."""
    q, cache, cu_queries, mask, k, v = problem = make(case, device, by_head=by_head)
    scale = case.head_size**-0.5 if softcap is None else CAPPED_SCALE
    options = {**problem.options(case), "scale": scale, "softcap": softcap, "backend": backend}
    got = paged_block_sparse_attention(q, cache, cu_queries, mask, **options)
    end = 0
    for b, (cached, new) in enumerate(case.sequences):
        begin, end, length = end, end + new, cached + new
        if new == 0:
            continue
        inputs = (
            q[begin:end].transpose(0, 1)[None],
            k[b : b + 1, :, :length],
            v[b : b + 1, :, :length],
        )
        own = SparseAttention(got.out[begin:end].transpose(0, 1)[None], got.lse[begin:end].T[None])
        shared.assert_agrees(own, *inputs, keys_seen(case, mask, b, device), scale, capped(softcap))
    assert got.out.shape == q.shape
    assert (got.out[end:] == 0).all()
    assert (got.lse[end:] == -torch.inf).all()


# Pages smaller than a block, equal to one, larger, and no multiple; chunks that begin at, before
# and after a block's first key.
CASES = [
    Case(16, 64, 4, 1, 64, 4, ((0, 1), (63, 65), (0, 0), (111, 63)), HALF),
    Case(64, 64, 7, 1, 80, 1, ((64, 65), (1, 111)), FULL),
    Case(256, 64, 2, 2, 128, 0, ((65, 63), (0, 111), (200, 1)), HALF),
    Case(16, 64, 4, 2, 80, 2, ((111, 65),), HALF),
    Case(16, 16, 2, 1, 128, 2, ((1, 63), (64, 1)), FULL),
    Case(64, 128, 4, 4, 64, 1, ((63, 111), (0, 65), (1, 1)), FULL),
    Case(256, 128, 8, 2, 80, 2, ((0, 63), (300, 65)), HALF),
    Case(48, 32, 4, 1, 64, 4, ((65, 65), (0, 0)), FULL),
    Case(64, 16, 7, 7, 64, 0, ((111, 1), (63, 63)), HALF),
    Case(256, 64, 2, 1, 256, 2, ((64, 64),), FULL),
    Case(16, 32, 2, 1, 8, 0, ((1, 65), (0, 1)), HALF),
    Case(16, 64, 4, 1, 64, 4, ((0, 1), (63, 65), (0, 0), (111, 63)), HALF, 16),
    Case(64, 64, 3, 1, 80, 1, ((64, 65), (1, 111)), HALF, 16),
    Case(48, 64, 2, 2, 64, 2, ((111, 65),), HALF, 32),
    Case(256, 16, 7, 1, 64, 7, ((0, 63), (300, 65)), HALF, 64),
    Case(16, 128, 4, 2, 16, 1, ((63, 111), (0, 65)), FULL, 32),
    Case(16, 64, 2, 1, 64, 0, ((1, 65), (0, 130)), HALF, 16),
]


# Groups of 1, 3, 4 and 7; pages that descriptors read and others.
FP8 = [CASES[0], CASES[1], CASES[12], CASES[14], CASES[2]]
CAPPED = [(CASES[4], 5.0), (CASES[0], 50.0), (CASES[5], 5.0)]


@pytest.mark.interpreted
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "softcap"), [CAPPED[0], *((case, None) for case in CASES), *CAPPED[1:]], ids=str
)
def test_agrees_with_fp64(
    case: Case, softcap: float | None, backend: Backend, device: str, poisoned: None
) -> None:
    """Slots that are not filled, and the spare page, hold NaN."""
    check(case, backend, device, softcap)


@pytest.mark.interpreted
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "by_head", "softcap"),
    [
        (CASES[5], True, 5.0),
        (CASES[4], False, None),
        *((case, True, None) for case in FP8),
        *(
            pytest.param(case._replace(dtype=torch.bfloat16), True, None, marks=pytest.mark.gpu)
            for case in FP8
        ),
    ],
    ids=str,
)
def test_fp8_agrees_with_fp64(
    case: Case, by_head: bool, softcap: float | None, backend: Backend, device: str, poisoned: None
) -> None:
    check(case, backend, device, softcap, by_head)


def test_rows_that_are_not_aligned(device: str, poisoned: None) -> None:
    """Descriptors need rows that begin at multiples of 16 bytes."""
    case = Case(64, 64, 4, 2, 64, 4, ((64, 130),), HALF)
    q, cache, cu_queries, mask, *_ = problem = make(case, device)
    k, v = (torch.nn.functional.pad(x, (1, 0))[..., 1:] for x in (cache.k, cache.v))
    arguments = {**problem.options(case), "backend": "triton"}
    expected = paged_block_sparse_attention(q, cache, cu_queries, mask, **arguments)
    got = paged_block_sparse_attention(q, cache._replace(k=k, v=v), cu_queries, mask, **arguments)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
@settings(max_examples=10, deadline=None)
@given(
    page_size=st.sampled_from([16, 40, 64, 256]),
    block_size=st.sampled_from([16, 64]),
    mask_heads=st.sampled_from([0, 1, 2]),
    sequences=st.lists(st.tuples(st.integers(0, 130), st.integers(0, 80)), min_size=1, max_size=3),
    softcap=st.sampled_from([None, 2.0]),
)
def test_any_lengths(
    backend: Backend,
    device: str,
    page_size: int,
    block_size: int,
    mask_heads: int,
    sequences: Any,
    softcap: float | None,
) -> None:
    check(
        Case(page_size, block_size, 2, 1, 16, mask_heads, tuple(sequences)),
        backend,
        device,
        softcap,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 48, 64, 256])
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_full_product(dtype: torch.dtype, head_size: int, page_size: int, poisoned: None) -> None:
    chunks = tuple(itertools.product([0, 1, 63, 64, 65, 111], [1, 63, 65, 111]))
    for (q_heads, kv_heads), block_size in itertools.product(
        [(2, 2), (8, 2), (7, 1)], [16, 64, 128]
    ):
        check(
            Case(page_size, block_size, q_heads, kv_heads, head_size, q_heads, chunks, dtype, 16),
            "triton",
            "cuda",
        )
        for mask_heads in {q_heads, kv_heads, 1, 0}:
            case = Case(
                page_size, block_size, q_heads, kv_heads, head_size, mask_heads, chunks, dtype
            )
            for by_head in (None, q_heads == 8):
                check(case, "triton", "cuda", by_head=by_head)
    for mask_heads, softcap in itertools.product((8, 0), (None, 5.0)):
        sequences = (2047, 2048), (0, 4095), (4094, 1), (3000, 0)
        check(
            Case(page_size, 64, 8, 2, head_size, mask_heads, sequences, dtype),
            "triton",
            "cuda",
            softcap,
        )


def test_compacted_lists(device: str) -> None:
    """The lists of packed sequences are those of each sequence alone."""
    case = Case(16, 16, 4, 2, 16, 2, ((0, 33), (63, 1), (40, 0), (111, 20)))
    _, cache, cu_queries, mask, _, _ = make(case, device)
    assert mask is not None
    capacity = cache.table.shape[1] * case.page_size
    lists, lengths = compact_packed_rows(
        mask, cu_queries, cache.kv_len, sum(case.new), capacity, case.block_size, case.block_size
    )
    for b, (cached, new) in enumerate(case.sequences):
        wanted, sizes = compact_rows(
            mask[b : b + 1], None, new, cached + new, cached, case.block_size, case.block_size, True
        )
        assert torch.equal(lengths[b], sizes[0])
        for h, r in itertools.product(range(2), range(mask.shape[2])):
            count = sizes[0, h, r, 1]
            assert torch.equal(lists[b, h, r, :count], wanted[0, h, r, :count])
    assert lengths[:, :, :, 1].sum((1, 2)).tolist()[2] == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("block", "dtype"), [(32, FULL), (16, HALF)])
def test_reads_only_selected_blocks(
    block: int, dtype: torch.dtype, backend: Backend, device: str
) -> None:
    case = Case(16, 32, 2, 1, 64, 1, ((64, 64),), dtype, block)
    q, cache, cu_queries, _, _, _ = problem = make(case, device)
    of_32 = torch.zeros(1, 1, 2, 5, dtype=torch.bool, device=device)
    of_32[:, :, :, 0] = of_32[:, :, 1, 2] = True
    of_32[:, :, :, 4] = True  # past the end
    mask = of_32.repeat_interleave(32 // block, 3)[
        ..., : -(-cache.table.shape[1] * case.page_size // block)
    ]
    options: dict[str, Any] = {**problem.options(case), "backend": backend}
    want = paged_block_sparse_attention(q, cache, cu_queries, mask, **options)
    for page in cache.table[0, [2, 3, 6, 7]].tolist():  # of the second and the last block
        for x in (cache.k, cache.v):
            x[page] = torch.nan
    got = paged_block_sparse_attention(q, cache, cu_queries, mask, **options)
    assert got.out.isfinite().all()
    shared.assert_same(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_are_a_mask(backend: Backend, device: str) -> None:
    case = Case(16, 32, 4, 2, 16, 2, ((500, 70), (0, 33)), FULL, 16)
    given = make(case, device)
    assert given.mask is not None
    assert given.mask.shape[3] > 32  # several words
    shared.assert_same(
        *(
            paged_block_sparse_attention(
                given.q,
                given.cache,
                given.cu_queries,
                mask,
                **given.options(case),
                backend=backend,
            )
            for mask in (given.mask, pack_blocks(given.mask))
        )
    )


def test_the_cache_is_not_copied(device: str) -> None:
    case = Case(16, 32, 2, 1, 64, 0, ((5, 9),))
    q, cache, cu_queries, _, _, _ = problem = make(case, device)
    buffer = torch.stack([cache.k, cache.v], 2)
    views = cache._replace(k=buffer[:, :, 0], v=buffer[:, :, 1], table=cache.table.T.contiguous().T)

    def step() -> SparseAttention:
        return paged_block_sparse_attention(
            q, views, cu_queries, None, **problem.options(case), backend="triton"
        )

    shared.assert_not_copied(
        module, "_paged_block_sparse_attention_kernel", step, (q, views.k, views.v, views.table)
    )


@pytest.mark.gpu
def test_cuda_graph() -> None:
    """A graph serves other lengths, chunks, pages and masks of the same shapes."""
    chunks = ((500, 300), (0, 200)), ((300, 200), (500, 300))
    cases = [Case(64, 64, 8, 2, 128, 8, sequences, torch.bfloat16) for sequences in chunks]
    problems = (make(case, "cuda", seed) for seed, case in enumerate(cases))
    tensors, others = (
        [x.q, *x.cache[:4], x.cu_queries, *([] if x.mask is None else [x.mask])] for x in problems
    )

    def step(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Tensor,
        kv_len: Tensor,
        cu_queries: Tensor,
        mask: Tensor,
    ) -> Any:
        return paged_block_sparse_attention(
            q, PagedKeys(k, v, table, kv_len), cu_queries, mask, max_queries=300
        )

    shared.assert_cuda_graph(
        lambda: step(*tensors), lambda: [x.copy_(y) for x, y in zip(tensors, others, strict=True)]
    )


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """The last page of 2**31 elements is read as if it were the first."""
    q, k, v = random_qkv(1, 2, 1, 256, 256, 128, torch.bfloat16, "cuda")
    pages = 2**31 // (256 * 128) + 1
    large = torch.empty(2, pages, 256, 1, 128, dtype=torch.bfloat16, device="cuda")
    for x, y in zip(large, (k, v), strict=True):
        x[-1] = y[0].transpose(0, 1)
    lengths = torch.tensor([256], dtype=torch.int32, device="cuda")
    cu_queries = torch.tensor([0, 256], dtype=torch.int32, device="cuda")
    packed = q[0].transpose(0, 1)
    table = torch.tensor([[pages - 1]], dtype=torch.int32, device="cuda")
    cache = PagedKeys(large[0], large[1], table, lengths)
    got = paged_block_sparse_attention(packed, cache, cu_queries, None, max_queries=256)
    small = PagedKeys(large[0, -1:], large[1, -1:], torch.zeros_like(table), lengths)
    want = paged_block_sparse_attention(packed, small, cu_queries, None, max_queries=256)
    shared.assert_same(got, want)
