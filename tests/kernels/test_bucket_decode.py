"""Tests of `bucket_decode` and `paged_bucket_decode`: agreement with fp64, edge cases."""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msattn.kernels import bucket_decode as module
from msattn.kernels.bucket_decode import bucket_decode
from msattn.kernels.common.bucket_index import build_bucket_index
from msattn.kernels.paged import bucket_decode as paged_module
from msattn.kernels.paged import paged_bucket_decode
from msattn.kernels.testing import capped, dense_attention, random_pages, random_qkv, starts
from msattn.kernels.types import Backend, BucketIndex
from tests.kernels import shared
from tests.kernels.problems import CAPPED_SCALE, in_pages, keys_read, random_buckets
from tests.kernels.shared import BACKENDS, FULL, HALF


@pytest.fixture(scope="module", autouse=True)
def _several_tiles_of_a_scan(device: str):
    """The interpreter scans fewer positions of pages at a time, so that short sequences have
    several tiles.
    """
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setattr(paged_module, "SCAN", 32)
        yield


class Case(NamedTuple):
    """One problem; ``padding``, ``filled``, ``recent`` may be given per sequence.

    With a ``page_size`` the keys are in pages, in FP8 with ``by_head``.
    """

    batch: int
    q_heads: int
    kv_heads: int
    num_keys: int
    head_size: int
    dtype: torch.dtype = torch.float32
    num_buckets: int = 10
    num_probes: int = 4
    recent: int | tuple[int, ...] = 9
    sink: int = 1
    padding: tuple[int, ...] | None = None
    filled: tuple[int, ...] | None = None
    softcap: float | None = None
    page_size: int | None = None
    by_head: bool | None = None

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns random q, k, v and buckets ``[B, Hkv, M]``, and probes with repetitions and -1;
        those of pages also with others out of range.
        """
        q, k, v = random_qkv(*self[:3], 1, *self[3:6], device)
        buckets = random_buckets(self.batch, self.kv_heads, self.num_keys, self.num_buckets, device)
        shape = (self.batch, self.kv_heads, self.num_probes)
        probes = torch.randint(-1, self.num_buckets, shape, dtype=torch.int32)
        if self.page_size is not None:
            strange = torch.tensor([-5, 2**15, 2**30], dtype=torch.int32)
            probes[..., 2::5] = strange[torch.randint(3, probes[..., 2::5].shape)]
        return q, k, v, buckets, probes.to(device)

    def indexed(self, device: str) -> tuple[Tensor, Tensor, Tensor, BucketIndex, Tensor]:
        """Returns the inputs with the index of the buckets."""
        q, k, v, buckets, probes = self.inputs(device)
        return q, k, v, build_bucket_index(buckets, self.num_buckets), probes

    def options(self, device: str) -> dict[str, Any]:
        """Returns keyword arguments of the operation."""
        recent = starts(self.recent, device) if isinstance(self.recent, tuple) else self.recent
        # larger scores differ more between fp32 sums
        scale = None if self.softcap is None else CAPPED_SCALE * 64 / self.head_size
        return {"recent": recent, "sink": self.sink, "scale": scale, "softcap": self.softcap}


def check(case: Case, backend: Backend, device: str) -> None:
    q, k, v, buckets, probes = case.inputs(device)
    lengths = case.filled or (case.num_keys,) * case.batch
    read = keys_read(buckets, probes, case.recent, case.sink, case.padding or 0, lengths)
    seen = read.repeat_interleave(case.q_heads // case.kv_heads, 1)[:, :, None]
    unread = ~read[..., None]  # these keys may hold any value
    counts = torch.ones(read.shape[:2], dtype=torch.int64, device=device)
    options: dict[str, Any] = {**case.options(device), "backend": backend}
    if case.page_size is None:
        wide_k, wide_v = (x.masked_fill(unread, torch.nan) for x in (k, v))
        given = q, wide_k, wide_v, build_bucket_index(buckets, case.num_buckets), probes
        options |= {"kv_start": starts(case.padding, device), "kv_len": starts(case.filled, device)}
        got = bucket_decode(*given, **options, counts=counts)
        shared.assert_same(bucket_decode(*given, **options), got)
    else:
        stored = case.page_size, case.by_head, [buckets.short()]
        cache, (slots,), (k, v) = in_pages(k, v, unread, lengths, *stored)
        got = paged_bucket_decode(q, cache, slots, probes, **options, counts=counts)
    assert torch.equal(counts, 1 + read.sum(-1))
    shared.assert_agrees(got, q, k, v, seen, options["scale"], capped(case.softcap))


# Covers nearly all pairs of values of length, head size, dtype, group and window.
CASES = [
    Case(1, 1, 1, 1, 64),
    Case(1, 4, 1, 63, 80, HALF, num_probes=0),
    Case(2, 7, 1, 65, 128, FULL, recent=(3, 70), sink=4, padding=(0, 30)),
    Case(2, 4, 4, 111, 64, HALF, num_probes=12, filled=(111, 40)),
    Case(2, 8, 2, 300, 128, HALF, padding=(7, 0), filled=(200, 300), recent=(0, 64), sink=0),
    Case(1, 7, 7, 111, 80, FULL, recent=0, sink=0),
    Case(3, 4, 1, 65, 64, FULL, padding=(65, 10, 5), filled=(65, 10, 6)),
    Case(1, 2, 1, 63, 128, HALF, num_buckets=200, num_probes=150, recent=0),
    Case(1, 1, 1, 300, 256, FULL, num_buckets=1, num_probes=2, recent=17, sink=0),
    Case(1, 20, 1, 111, 8, HALF, recent=500),
    Case(2, 2, 2, 65, 80, HALF, recent=(1, 2), filled=(0, 65), num_probes=70),
    Case(1, 4, 2, 40, 64, HALF, num_probes=0, recent=0, sink=0),
    Case(1, 4, 2, 70, 512, HALF, padding=(5,)),
]
LIMITS = ((2, 5.0), (1, 50.0), (3, 5.0), (4, 50.0))
CAPPED = [CASES[number]._replace(softcap=softcap) for number, softcap in LIMITS]


def paged(
    lengths: tuple[int, ...],
    q_heads: int,
    kv_heads: int,
    head_size: int,
    page_size: int | None,
    dtype: torch.dtype = FULL,
    **options: Any,
) -> Case:
    """A problem of filled pages."""
    sizes = len(lengths), q_heads, kv_heads, max(1, *lengths), head_size, dtype
    return Case(*sizes, filled=lengths, page_size=page_size, **options)


PAGED = [
    paged((300, 63), 7, 1, 128, 64, FULL, num_probes=70, softcap=5.0),
    paged((111, 0, 65), 4, 1, 80, 16, HALF, recent=(3, 70, 9), sink=4),
    paged((300, 63), 7, 1, 128, 64, FULL, num_probes=70),
    paged((1,), 4, 4, 64, 256, HALF, num_probes=0),
    paged((65, 111), 8, 2, 128, 16, HALF, num_buckets=40, recent=0, sink=0),
    paged((111,), 1, 1, 80, 256, FULL, num_buckets=2000, num_probes=700, recent=0),
    paged((63, 1), 2, 2, 64, 64, FULL, recent=500),
    paged((300, 111), 7, 7, 80, 64, HALF, recent=(64, 0), sink=200),
    paged((65, 300), 4, 1, 64, 16, FULL, recent=17),
    paged((111, 0, 65), 4, 1, 80, 16, HALF, recent=(3, 70, 9), sink=4, softcap=50.0),
    paged((65, 111), 8, 2, 128, 16, HALF, num_buckets=40, recent=0, sink=0, softcap=50.0),
]
IN_FP8 = [  # groups of 1, 3, 4 and 7
    PAGED[4]._replace(softcap=5.0, by_head=True),
    PAGED[6]._replace(by_head=False),
    *(PAGED[number]._replace(by_head=True) for number in (1, 2, 3)),
    paged((65, 111), 6, 2, 24, 16, HALF, recent=0, by_head=True),  # rows that are not aligned
]


@pytest.mark.interpreted(by="operation")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("operation", "case"),
    [
        *(("bucket_decode", case) for case in (CAPPED[0], *CASES, *CAPPED[1:])),
        *(("paged", case) for case in PAGED),
        *(("paged in FP8", case) for case in IN_FP8),
        *(
            pytest.param("paged in FP8", case._replace(dtype=torch.bfloat16), marks=pytest.mark.gpu)
            for case in IN_FP8
        ),
    ],
    ids=str,
)
def test_agrees_with_fp64(
    operation: str, case: Case, backend: Backend, device: str, poisoned: None
) -> None:
    check(case, backend, device)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=2),
    page_size=st.sampled_from([None, 1, 5, 16, 64]),
    num_buckets=st.integers(1, 70),
    num_probes=st.integers(0, 9),
    recent=st.integers(0, 100),
    sink=st.integers(0, 5),
    softcap=st.sampled_from([None, 1.0]),
)
def test_any_lengths(
    backend: Backend, device: str, lengths: list[int], page_size: int | None, **options: Any
) -> None:
    check(paged(tuple(lengths), 2, 1, 16, page_size, **options), backend, device)


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [1, 63, 65, 111, 4095])
@pytest.mark.parametrize("head_size", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_full_product(dtype: torch.dtype, head_size: int, num_keys: int, poisoned: None) -> None:
    heads, windows, probes = [(2, 2), (4, 1), (7, 1)], [(0, 0), (1, 9), (4, (2, 100))], [0, 5, 100]
    lengths = [(None, None), ((num_keys // 2, 0), (num_keys, num_keys // 2))]
    limits = itertools.cycle([None, 5.0, None, 50.0, None])
    for (q_heads, kv_heads), (sink, recent), num_probes, (padding, filled) in itertools.product(
        heads, windows, probes, lengths
    ):
        sizes = 2, q_heads, kv_heads, num_keys, head_size, dtype, 64
        case = Case(*sizes, num_probes, recent, sink, padding, filled, next(limits))
        check(case, "triton", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [1, 63, 65, 111, 4095])
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("dtype", [FULL, HALF, torch.bfloat16], ids=str)
def test_full_product_of_pages(
    dtype: torch.dtype, page_size: int, num_keys: int, poisoned: None
) -> None:
    heads, windows, probes = [(2, 2), (4, 1), (7, 1)], [(0, 0), (1, 9), (4, (2, 100))], [0, 5, 100]
    for head_size, (q_heads, kv_heads), (sink, recent), num_probes in itertools.product(
        [64, 80, 128, 256], heads, windows, probes
    ):
        sizes = 2, q_heads, kv_heads, num_keys, head_size, dtype, 64, num_probes, recent, sink
        lengths, softcap = (num_keys, num_keys // 2), 5.0 if sink else None
        for by_head in (None, q_heads == 4):
            case = Case(*sizes, None, lengths, softcap, page_size, by_head)
            check(case, "triton", "cuda")


@pytest.mark.gpu
def test_one_split_at_large_batch(poisoned: None) -> None:
    """There are more sequences than programs at once, so that one program scans several tiles."""
    sizes = {"num_buckets": 64, "num_probes": 8, "recent": 100}
    case = paged(tuple(range(1, 4000, 20)), 8, 2, 128, 256, torch.bfloat16, **sizes)
    check(case, "triton", "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
def test_index_entries_outside_the_sequence_are_skipped(backend: Backend, device: str) -> None:
    """Entries before and after the sequence and outside the cache are skipped."""
    q, k, v = random_qkv(1, 1, 1, 1, 20, device=device)
    order = torch.tensor([[[-3, 0, 1, 7, 12, 19, 40]]], dtype=torch.int32, device=device)
    offsets, probes = (torch.tensor([[x]], dtype=torch.int32, device=device) for x in ([0, 7], [0]))
    options = {
        "recent": 0,
        "sink": 0,
        "kv_start": starts([1], device),
        "kv_len": starts([15], device),
        "backend": backend,
    }
    counts = torch.zeros(1, 1, dtype=torch.int64, device=device)
    got = bucket_decode(q, k, v, BucketIndex(offsets, order), probes, counts=counts, **options)
    assert counts.item() == 3
    seen = torch.zeros(20, dtype=torch.bool, device=device)
    seen[[1, 7, 12]] = True
    torch.testing.assert_close(got.out, dense_attention(q, k, v, seen).out.float())


@pytest.mark.slow
@pytest.mark.parametrize("num_probes", [4, 70])
@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_of_one_sequence_as_a_batch(backend: Backend, num_probes: int, device: str) -> None:
    """Queries with expanded keys, values and index equal separate calls."""
    _, k, v, index, _ = Case(1, 4, 2, 200, 64).indexed(device)
    # longer than what is listed
    index = index._replace(order=torch.nn.functional.pad(index.order, (0, 30), value=10**6))
    queries = 5
    q = torch.randn(queries, 4, 1, 64, device=device)
    probes = torch.randint(-1, 10, (queries, 2, num_probes), dtype=torch.int32).to(device)
    values = {
        "recent": [3, 50, 0, 9, 500],
        "kv_start": [7] * queries,
        "kv_len": [40, 200, 90, 8, 7],
    }
    lengths: dict[str, Any] = {name: starts(x, device) for name, x in values.items()}
    wide_k, wide_v = (x.expand(queries, -1, -1, -1) for x in (k, v))
    wide_index = BucketIndex(*(x.expand(queries, -1, -1) for x in index))
    for chosen in (probes, probes[:1].expand(queries, -1, -1)):
        counts = torch.zeros(queries, 2, dtype=torch.int64, device=device)
        got = bucket_decode(
            q, wide_k, wide_v, wide_index, chosen, **lengths, counts=counts, backend=backend
        )
        for n in range(queries):
            row, count = slice(n, n + 1), torch.zeros(1, 2, dtype=torch.int64, device=device)
            own = {name: x[row] for name, x in lengths.items()}
            alone = bucket_decode(
                q[row], k, v, index, chosen[row].contiguous(), **own, counts=count, backend=backend
            )
            assert torch.equal(counts[row], count)
            for x, y in zip(got, alone, strict=True):
                torch.testing.assert_close(x[row], y)


def test_expanded_tensors_are_not_copied(device: str) -> None:
    q, k, v, index, probes = Case(1, 2, 1, 70, 64).indexed(device)
    wide = k, v, offsets, order, probes = [
        x.expand(3, *x.shape[1:]) for x in (k, v, *index, probes)
    ]

    def step() -> Any:
        return bucket_decode(
            q.repeat(3, 1, 1, 1),
            k,
            v,
            BucketIndex(offsets, order),
            probes,
            recent=9,
            backend="triton",
        )

    shared.assert_not_copied(module, "_split_bucket_decode_kernel", step, wide)


def test_many_distinct_probes_need_no_sorting(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, index, _ = Case(2, 4, 2, 300, 64, num_buckets=200).indexed(device)
    probes = torch.rand(2, 2, 200, device=device).argsort(-1).int()[..., :150]
    probes[:, :, ::3] = -1
    want = bucket_decode(q, k, v, index, probes, recent=9, backend="torch")
    monkeypatch.setattr(module, "_distinct", None)
    got = bucket_decode(q, k, v, index, probes, recent=9, distinct=True, backend="triton")
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_another_gpu() -> None:
    check(Case(2, 8, 2, 500, 128, torch.bfloat16, num_buckets=32, num_probes=8), "triton", "cuda:1")


@pytest.mark.gpu
def test_cuda_graph() -> None:
    """A captured step follows in-place changes of probes, lengths, window and index."""
    case = Case(2, 8, 2, 500, 128, torch.bfloat16, num_buckets=32, num_probes=8)
    q, k, v, index, probes = case.indexed("cuda")
    recent, kv_len = (
        torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([9, 30], [400, 300])
    )
    counts = torch.zeros(2, 2, dtype=torch.int64, device="cuda")

    def step() -> tuple[Tensor, ...]:
        counts.zero_()
        return *bucket_decode(
            q, k, v, index, probes, recent=recent, kv_len=kv_len, counts=counts
        ), counts.clone()

    def change() -> None:
        probes.random_(-1, 32)
        recent.copy_(torch.tensor([64, 1]))
        kv_len.copy_(torch.tensor([500, 1]))
        for x, y in zip(
            index,
            build_bucket_index(random_buckets(2, 2, 500, 32, "cuda", seed=1), 32),
            strict=True,
        ):
            x.copy_(y)

    shared.assert_cuda_graph(step, change)


@pytest.mark.gpu
def test_cuda_graph_of_pages() -> None:
    """A captured step follows in-place changes of pages, lengths, buckets, probes and window."""
    case = paged((4095, 1000), 8, 2, 128, 256, torch.bfloat16, num_buckets=64, num_probes=8)
    q, k, v, buckets, probes = case.inputs("cuda")
    cache, (slots,) = random_pages(k, v, starts(case.filled, "cuda"), 256, [buckets.short()])
    recent = torch.tensor([9, 30], dtype=torch.int32, device="cuda")
    counts = torch.zeros(2, 2, dtype=torch.int64, device="cuda")

    def step() -> tuple[Tensor, ...]:
        counts.zero_()
        return *paged_bucket_decode(
            q, cache, slots, probes, recent=recent, counts=counts
        ), counts.clone()

    def change(lengths: list[int]) -> None:
        other, (other_slots,) = random_pages(
            k, v, starts([17, 4000], "cuda"), 256, [buckets.short()], seed=1
        )
        for x, y in zip((*cache[:3], slots), (*other[:3], other_slots), strict=True):
            x.copy_(y)
        cache.kv_len.copy_(torch.tensor(lengths))
        probes.random_(-1, 64)
        recent.copy_(torch.tensor([64, 1]))

    for lengths in ([17, 4000], [0, 2049]):
        shared.assert_cuda_graph(step, lambda lengths=lengths: change(lengths))
