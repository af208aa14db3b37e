"""Tests of `bucket_decode`: agreement with fp64, edge cases."""

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
from msattn.kernels.testing import capped, dense_attention, random_qkv, starts
from msattn.kernels.types import Backend, BucketIndex
from tests.kernels import shared
from tests.kernels.problems import CAPPED_SCALE, keys_read, random_buckets
from tests.kernels.shared import BACKENDS, FULL, HALF


class Case(NamedTuple):
    """One problem; ``padding``, ``filled``, ``recent`` may be given per sequence."""

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

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor, BucketIndex, Tensor]:
        """Returns random q, k, v and index, and probes with repetitions and -1."""
        q, k, v = random_qkv(
            self.batch,
            self.q_heads,
            self.kv_heads,
            1,
            self.num_keys,
            self.head_size,
            self.dtype,
            device,
        )
        buckets = random_buckets(self.batch, self.kv_heads, self.num_keys, self.num_buckets, device)
        shape = (self.batch, self.kv_heads, self.num_probes)
        probes = torch.randint(-1, self.num_buckets, shape, dtype=torch.int32).to(device)
        return q, k, v, build_bucket_index(buckets, self.num_buckets), probes

    def options(self, device: str) -> dict[str, Any]:
        """Returns keyword arguments of the operation."""
        recent = starts(self.recent, device) if isinstance(self.recent, tuple) else self.recent
        lengths = {"kv_start": starts(self.padding, device), "kv_len": starts(self.filled, device)}
        return {"recent": recent, "sink": self.sink, **lengths}


def check(case: Case, backend: Backend, device: str, softcap: float | None = None) -> None:
    q, k, v, index, probes = case.inputs(device)
    buckets = random_buckets(case.batch, case.kv_heads, case.num_keys, case.num_buckets, device)
    read = keys_read(
        buckets, probes, case.recent, case.sink, case.padding or 0, case.filled or case.num_keys
    )
    seen = read.repeat_interleave(case.q_heads // case.kv_heads, 1)[:, :, None]
    # larger scores differ more between fp32 sums
    scale = None if softcap is None else CAPPED_SCALE * 64 / case.head_size
    unread = ~read[..., None]  # these keys may hold any value
    wide_k, wide_v = (x.masked_fill(unread, torch.nan) for x in (k, v))
    counts = torch.ones(read.shape[:2], dtype=torch.int64, device=device)
    options: dict[str, Any] = {
        **case.options(device),
        "scale": scale,
        "softcap": softcap,
        "backend": backend,
    }
    got = bucket_decode(q, wide_k, wide_v, index, probes, **options)
    shared.assert_same(
        bucket_decode(q, wide_k, wide_v, index, probes, **options, counts=counts), got
    )
    assert torch.equal(counts, 1 + read.sum(-1))
    shared.assert_agrees(got, q, k, v, seen, scale, capped(softcap))


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


CAPPED = [(CASES[2], 5.0), (CASES[1], 50.0), (CASES[3], 5.0), (CASES[4], 50.0)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "softcap"), [CAPPED[0], *((case, None) for case in CASES), *CAPPED[1:]], ids=str
)
def test_agrees_with_fp64(
    case: Case, softcap: float | None, backend: Backend, device: str, poisoned: None
) -> None:
    check(case, backend, device, softcap)


@settings(max_examples=10, deadline=None)
@given(
    num_keys=st.integers(1, 90),
    num_buckets=st.integers(1, 12),
    num_probes=st.integers(0, 9),
    recent=st.integers(0, 100),
    sink=st.integers(0, 5),
    softcap=st.sampled_from([None, 1.0]),
)
def test_any_index(
    num_keys: int, num_buckets: int, num_probes: int, recent: int, sink: int, softcap: float | None
) -> None:
    case = Case(1, 2, 1, num_keys, 16, FULL, num_buckets, num_probes, recent, sink)
    check(case, "torch", "cpu", softcap)


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
        sizes = Case(2, q_heads, kv_heads, num_keys, head_size, dtype)
        options = {
            "num_probes": num_probes,
            "recent": recent,
            "sink": sink,
            "padding": padding,
            "filled": filled,
        }
        check(sizes._replace(**options, num_buckets=64), "triton", "cuda", next(limits))


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
    _, k, v, index, _ = Case(1, 4, 2, 200, 64).inputs(device)
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
    q, k, v, index, probes = Case(1, 2, 1, 70, 64).inputs(device)
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
    q, k, v, index, _ = Case(2, 4, 2, 300, 64, num_buckets=200).inputs(device)
    probes = torch.rand(2, 2, 200, device=device).argsort(-1).int()[..., :150]
    probes[:, :, ::3] = -1
    want = bucket_decode(q, k, v, index, probes, recent=9, backend="torch")
    monkeypatch.setattr(module, "_distinct", None)
    got = bucket_decode(q, k, v, index, probes, recent=9, distinct=True, backend="triton")
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


def test_accepts_strided_views(device: str) -> None:
    q, k, v, index, probes = Case(2, 4, 2, 70, 64).inputs(device)
    shared.assert_strides_accepted(
        lambda k, v: bucket_decode(q, k, v, index, probes, recent=9, backend="triton"), device
    )
    offsets, order, chosen = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in (*index, probes)
    )
    want = bucket_decode(q, k, v, index, probes, recent=9, backend="triton")
    shared.assert_same(
        bucket_decode(q, k, v, BucketIndex(offsets, order), chosen, recent=9, backend="triton"),
        want,
    )


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_another_gpu() -> None:
    check(Case(2, 8, 2, 500, 128, torch.bfloat16, num_buckets=32, num_probes=8), "triton", "cuda:1")


@pytest.mark.gpu
def test_cuda_graph() -> None:
    """A captured step follows in-place changes of probes, lengths, window and index."""
    case = Case(2, 8, 2, 500, 128, torch.bfloat16, num_buckets=32, num_probes=8)
    q, k, v, index, probes = case.inputs("cuda")
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
