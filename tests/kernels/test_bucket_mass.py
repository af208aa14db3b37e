"""Tests of `bucket_mass`: agreement with fp64, edge cases."""

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msattn.kernels.bucket_mass import bucket_mass
from msattn.kernels.bucket_mass.packing import pack_keys
from msattn.kernels.reference import bucket_mass as reference
from msattn.kernels.testing import assert_within_budget, capped, dense_attention, random_qkv
from msattn.kernels.types import Backend
from tests.kernels import shared
from tests.kernels.problems import CAPPED_SCALE, random_buckets
from tests.kernels.shared import BACKENDS, FULL, HALF


class Case(NamedTuple):
    """One problem; ``moved`` passes random positions of queries and keys."""

    batch: int
    q_heads: int
    kv_heads: int
    num_queries: int
    num_keys: int
    head_size: int
    dtype: torch.dtype = torch.float32
    num_buckets: int = 10
    causal: bool = False
    min_distance: int | None = None
    moved: bool = False

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Returns random q, k and buckets; some buckets are empty, some keys excluded."""
        q, k, _ = random_qkv(*self[:6], self.dtype, device)
        return (
            q,
            k,
            random_buckets(self.batch, self.kv_heads, self.num_keys, self.num_buckets, device),
        )

    def positions(self, device: str) -> tuple[Tensor, Tensor]:
        """Returns ``q_pos`` and ``k_pos``: random ones, or the default ones."""
        if not self.moved:
            q_pos = torch.arange(self.num_keys - self.num_queries, self.num_keys)
            return q_pos.int().to(device), torch.arange(self.num_keys).int().to(device)
        q_pos, k_pos = torch.randperm(3 * self.num_queries), torch.randperm(2 * self.num_keys)
        return q_pos[: self.num_queries].int().to(device), k_pos[: self.num_keys].int().to(device)

    def options(self, q_pos: Tensor, k_pos: Tensor) -> dict[str, Any]:
        """Returns keyword arguments of the operation."""
        given = {"q_pos": q_pos, "k_pos": k_pos} if self.moved else {}
        return {
            "num_buckets": self.num_buckets,
            "causal": self.causal,
            "min_distance": self.min_distance,
            **given,
        }


def by_bucket(probs: Tensor, buckets: Tensor, num_buckets: int) -> Tensor:
    """Multiplies ``probs [B, Hq, n_q, n_k]`` with the one-hot ``[n_k, C]`` buckets."""
    member = buckets[..., None] == torch.arange(num_buckets, device=buckets.device)  # -1 is in none
    return probs @ member.repeat_interleave(probs.shape[1] // buckets.shape[1], 1).to(probs.dtype)


def check(case: Case, backend: Backend, device: str, softcap: float | None = None) -> None:
    q, k, buckets = case.inputs(device)
    q_pos, k_pos = case.positions(device)
    distance = q_pos[:, None].long() - k_pos[None, :].long()
    seen = (buckets >= 0).repeat_interleave(case.q_heads // case.kv_heads, 1)[:, :, None]
    if case.causal:
        seen = seen & (distance >= 0)
    if case.min_distance is not None:
        seen = seen & (distance.abs() > case.min_distance)
    scale = None if softcap is None else CAPPED_SCALE
    exact, eager = (
        dense_attention(q, k, k, seen, scale, dtype, capped(softcap))
        for dtype in (torch.float64, torch.float32)
    )
    k = k.masked_fill((buckets < 0)[..., None], float("nan"))  # excluded keys may hold any value
    got = bucket_mass(
        q, k, buckets, **case.options(q_pos, k_pos), scale=scale, softcap=softcap, backend=backend
    )
    assert got.mass.dtype == got.lse.dtype == torch.float32
    assert got.top_key.dtype == torch.int32
    assert_within_budget("lse", got.lse, exact.lse, eager.lse)
    masses = (by_bucket(x.probs, buckets, case.num_buckets) for x in (exact, eager))
    assert_within_budget("mass", got.mass, *masses)

    nothing = exact.lse == -torch.inf
    assert (got.mass[nothing] == 0).all()
    assert torch.equal(got.top_key == -1, nothing)
    top = exact.probs.gather(-1, got.top_key.clamp(min=0).long()[..., None])[..., 0]
    # fp32 scores of keys that nearly tie
    slack = 1 - 2**-20 * exact.lse.masked_fill(nothing, 0).abs().clamp(min=8)
    assert (nothing | (top >= exact.probs.amax(-1) * slack)).all()


# Covers nearly all pairs of values of length, head size, dtype, group, mask and bucket count.
CASES = [
    Case(1, 1, 1, 1, 1, 64),
    Case(2, 4, 1, 63, 63, 80, HALF, causal=True),
    Case(1, 7, 1, 65, 65, 128, FULL, 3, min_distance=10),
    Case(2, 2, 2, 111, 111, 64, HALF, 100, True, 5, True),
    Case(1, 4, 1, 1, 300, 128, HALF, 64, min_distance=280),
    Case(1, 7, 7, 20, 111, 80, FULL, 1, True, None, True),
    Case(1, 4, 1, 130, 65, 64, FULL, 7, False, 0),
    Case(1, 1, 1, 7, 300, 256, HALF, 2, True),
    Case(1, 2, 2, 65, 63, 128, FULL, 70, True, 500),
    Case(1, 2, 1, 63, 111, 8, FULL, 10, False, 20, True),
    Case(1, 2, 1, 20, 70, 512, HALF, 9, True),
]


CAPPED = [(CASES[3], 5.0), (CASES[2], 50.0), (CASES[4], 5.0), (CASES[1], 5.0)]


@pytest.mark.interpreted
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
    n_q=st.integers(1, 40),
    n_k=st.integers(1, 90),
    num_buckets=st.integers(1, 12),
    causal=st.booleans(),
    min_distance=st.sampled_from([None, 0, 20]),
    moved=st.booleans(),
    softcap=st.sampled_from([None, 1.0]),
)
def test_any_lengths(
    n_q: int,
    n_k: int,
    num_buckets: int,
    causal: bool,
    min_distance: int | None,
    moved: bool,
    softcap: float | None,
) -> None:
    check(
        Case(1, 2, 1, n_q, n_k, 16, FULL, num_buckets, causal, min_distance, moved),
        "torch",
        "cpu",
        softcap,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("num_buckets", [1, 64, 4096])
@pytest.mark.parametrize("head_size", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_full_product(dtype: torch.dtype, head_size: int, num_buckets: int, poisoned: None) -> None:
    heads = [(2, 2), (4, 1), (7, 1)]
    lengths = [(1, 1), (63, 63), (65, 111), (111, 4095)]
    masks = [(False, None), (True, 9)]
    limits = itertools.cycle([None, 5.0, None, 50.0, None])
    for (q_heads, kv_heads), (n_q, n_k), (causal, distance) in itertools.product(
        heads, lengths, masks
    ):
        case = Case(2, q_heads, kv_heads, n_q, n_k, head_size, dtype, num_buckets, causal, distance)
        check(case, "triton", "cuda", next(limits))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    num_keys=st.integers(1, 200),
    num_buckets=st.integers(1, 30),
    group_size=st.sampled_from([8, 16]),
    splits=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_key_groups_hold_each_key_once(
    num_keys: int, num_buckets: int, group_size: int, splits: int, seed: int
) -> None:
    """In the kernel's order, each key is added once, to its bucket's output rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    buckets = random_buckets(1, 1, num_keys, num_buckets, seed=seed)
    k = torch.arange(num_keys, dtype=torch.float32)[:, None].expand(1, 1, -1, 16).contiguous()
    packed = pack_keys(k.to(device), buckets.to(device), num_buckets, group_size, 64, splits)
    keys, indices, out_rows, copies, continued, first = (x[0, 0].cpu() for x in packed)
    segments = 64 // group_size
    run = -(-int(first[-1]) // (splits * segments))
    held: dict[int, list[int]] = {bucket: [] for bucket in range(num_buckets)}
    for split, segment in itertools.product(range(splits), range(segments)):
        members: list[int] = []
        for n in range(run):
            tile = split * len(indices) // splits // 64 + n
            row = int(out_rows[tile * segments + segment])
            copied = int(copies[tile * segments + segment])
            place = torch.arange(group_size)
            column = (
                (segment // 4 * (group_size // 2) + place // 2) * 8 + segment % 4 * 2 + place % 2
            )
            own = indices[tile * 64 + column]
            assert torch.equal(keys[tile * 64 + column, 3], own.float())
            assert (own[group_size - copied :] == own[0]).all()
            members += own[: group_size - copied].tolist()
            if row >= 0:
                bucket = row if row < num_buckets else int(continued[row - num_buckets])
                held[bucket] += members
                members = []
        assert not members
    for bucket, members in held.items():
        assert sorted(members) == (buckets[0, 0] == bucket).nonzero()[:, 0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_lose_no_accuracy(backend: Backend, device: str) -> None:
    """A large offset of all scores changes no mass; much smaller scores give 0."""
    q, k, _ = random_qkv(1, 2, 1, 5, 60, 64, device=device)
    buckets = random_buckets(1, 1, 60, 7, device)
    q[..., 0], k[..., 0] = 100.0, 160.0  # every score grows by 2000
    moved = bucket_mass(q, k, buckets, num_buckets=7, backend=backend)
    q[..., 0] = 0.0
    still = bucket_mass(q, k, buckets, num_buckets=7, backend=backend)
    torch.testing.assert_close(moved.lse, still.lse + 2000, rtol=0, atol=2e-3)
    torch.testing.assert_close(moved.mass, still.mass, rtol=0, atol=2e-3)
    q[..., 0], k[..., 0] = 100.0, torch.where(buckets[:, :, :, None] == 3, 160.0, 0.0)[..., 0]
    torch.testing.assert_close(
        bucket_mass(q, k, buckets, num_buckets=7, backend=backend).mass[..., 3],
        torch.ones(1, 2, 5, device=device),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_saturated_scores(backend: Backend, device: str) -> None:
    """Scores far beyond the cap are equal, so that a bucket's mass is its share of the keys; any
    key is a top key.
    """
    q, k, _ = random_qkv(1, 2, 1, 5, 60, 64, device=device)
    buckets = random_buckets(1, 1, 60, 7, device).clamp(min=0)
    q[..., 0], k[..., 0] = 100.0, 160.0  # every score grows by 2000
    got = bucket_mass(q, k, buckets, num_buckets=7, softcap=30.0, backend=backend)
    shares = torch.bincount(buckets.flatten(), minlength=7).float() / 60
    torch.testing.assert_close(got.mass, shares.expand_as(got.mass))
    torch.testing.assert_close(got.lse, torch.full_like(got.lse, 30 + math.log(60)))
    assert ((got.top_key >= 0) & (got.top_key < 60)).all()


def test_kernel_excludes_bucket_numbers_out_of_range(device: str) -> None:
    q, k, buckets = Case(1, 2, 1, 5, 60, 64).inputs(device)
    strange = torch.where(buckets < 0, 99, buckets)
    got = bucket_mass(q, k, strange, num_buckets=10, backend="triton")
    torch.testing.assert_close(got, reference.bucket_mass(q, k, buckets, num_buckets=10))


@pytest.mark.gpu
def test_cuda_graph() -> None:
    q, k, buckets = Case(2, 8, 2, 100, 500, 128, torch.bfloat16, 32).inputs("cuda")
    shared.assert_cuda_graph(
        lambda: bucket_mass(q, k, buckets, num_buckets=32),
        lambda: buckets.copy_(random_buckets(2, 2, 500, 32, "cuda", seed=1)),
    )
