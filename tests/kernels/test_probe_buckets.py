"""Tests of `probe_buckets`: kernel and reference against fp64, ties."""

import pytest
import torch
from torch import Tensor

from msattn.kernels.common.densities import bucket_densities
from msattn.kernels.probe_buckets import probe_buckets
from msattn.kernels.reference import probe_buckets as reference
from msattn.kernels.types import Backend
from tests.kernels.shared import BACKENDS, FULL, HALF


def inputs(
    batch: int,
    q_heads: int,
    classifiers: int,
    head: int,
    hidden: int,
    buckets: int,
    dtype: torch.dtype,
    device: str,
) -> tuple[Tensor, ...]:
    """Returns one query per head and random classifiers."""
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (classifiers, head, hidden),
        (classifiers, 1, hidden),
        (classifiers, hidden, buckets),
        (classifiers, 1, buckets),
    )
    bounds = head**-0.5, 0.3, hidden**-0.5 * 4, 0.3
    weights = [
        torch.randn(shape, generator=generator) * bound
        for shape, bound in zip(shapes, bounds, strict=True)
    ]
    q = torch.randn(batch, 1, q_heads, head, generator=generator).transpose(1, 2)
    return tuple(x.to(device, dtype) for x in (q, *weights))


def scores(
    q: Tensor,
    weight_in: Tensor,
    bias_in: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
    kv_heads: int,
) -> Tensor:
    """Computes the bucket scores in fp64, query by query."""
    each = q.shape[1] // len(weight_in)
    weight_in, bias_in, weight_out, bias_out = (
        x.double().repeat_interleave(each, 0) for x in (weight_in, bias_in, weight_out, bias_out)
    )
    logits = ((q.double() @ weight_in + bias_in).relu() @ weight_out + bias_out)[:, :, 0]
    return logits.softmax(-1).unflatten(1, (kv_heads, -1)).sum(2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("batch", "q_heads", "classifiers", "kv_heads", "head", "hidden", "buckets", "dtype", "probes"),
    [
        (1, 4, 2, 2, 64, 96, 40, FULL, 5),
        (2, 4, 4, 2, 80, 64, 100, HALF, 7),
        (3, 7, 1, 1, 64, 40, 17, FULL, 17),
        (1, 2, 2, 2, 128, 130, 300, HALF, 1),
        (9, 4, 2, 2, 64, 33, 20, FULL, 0),
    ],
)
def test_selects_the_best_buckets(
    batch: int, q_heads: int, classifiers: int, kv_heads: int, head: int, hidden: int, buckets: int,
    dtype: torch.dtype,
    probes: int, backend: Backend, device: str,
) -> None:  # fmt: skip
    given = inputs(batch, q_heads, classifiers, head, hidden, buckets, dtype, device)
    got = probe_buckets(*given, kv_heads=kv_heads, probes=probes, backend=backend)
    assert got.dtype == torch.int32
    assert got.shape == (batch, kv_heads, probes)
    assert (got.sort(-1).values.diff(dim=-1) > 0).all()  # no repetitions
    exact = scores(*given, kv_heads=kv_heads)
    if probes:
        least = exact.topk(probes, -1).values[..., -1:]
        assert (
            exact.gather(-1, got.long()) >= least * (1 - (1e-5 if dtype == FULL else 2e-2))
        ).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("batch", "q_heads", "kv_heads", "buckets", "dtype", "probes", "share_that_passes"),
    [
        (1, 4, 2, 40, FULL, 40, 0.5),
        (2, 7, 1, 100, FULL, 30, 0.0),
        (3, 4, 4, 17, HALF, 17, 1.0),
        (2, 2, 1, 300, HALF, 64, 0.1),
    ],
)
def test_selects_the_densest_buckets_that_reach_the_threshold(
    batch: int, q_heads: int, kv_heads: int, buckets: int, dtype: torch.dtype, probes: int,
    share_that_passes: float,
    backend: Backend, device: str,
) -> None:  # fmt: skip
    """Some buckets are empty, and others hold very many keys. Densities near the threshold may be
    on either side of it.
    """
    given = inputs(batch, q_heads, kv_heads, 64, 32, buckets, dtype, device)
    sizes = (
        (torch.rand(batch, kv_heads, buckets, device=device) ** 6 * 10**5 - 10).clamp(min=0).int()
    )
    exact = bucket_densities(scores(*given, kv_heads=kv_heads), sizes)
    threshold = (
        exact.flatten().quantile(1 - share_that_passes).item() if share_that_passes < 1 else 0.0
    )
    got = probe_buckets(
        *given, kv_heads=kv_heads, probes=probes, sizes=sizes, threshold=threshold, backend=backend
    )
    assert got.dtype == torch.int32
    assert got.shape == (batch, kv_heads, probes)
    slack = 1e-4 if dtype == FULL else 3e-2
    for chosen, density in zip(got.flatten(0, 1), exact.flatten(0, 1), strict=True):
        taken = chosen[chosen >= 0].long()
        assert len(taken.unique()) == len(taken)
        assert backend == "torch" or (chosen[: len(taken)] >= 0).all(), (
            "places that are left come last"
        )
        assert (density[taken] >= threshold * (1 - slack)).all()
        least = max(threshold, density.sort(descending=True).values[probes - 1].item())
        assert torch.isin((density > least * (1 + slack)).nonzero().flatten(), taken).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_keys_there_is_no_dense_bucket(backend: Backend, device: str) -> None:
    given = inputs(2, 4, 2, 64, 32, 20, FULL, device)
    sizes = torch.zeros(2, 2, 20, dtype=torch.int32, device=device)
    got = probe_buckets(*given, kv_heads=2, probes=5, sizes=sizes, threshold=1e-6, backend=backend)
    assert (got == -1).all()


@pytest.mark.parametrize("probes", [1, 3, 9])
def test_ties_go_to_the_lowest_number(probes: int, device: str) -> None:
    q, *weights = (torch.zeros_like(x) for x in inputs(1, 2, 1, 16, 16, 9, FULL, device))
    weights[3][..., 4] = 1
    got = probe_buckets(q, *weights, kv_heads=1, probes=probes, backend="triton")
    best = [4, 0, 1, 2, 3, 5, 6, 7, 8][:probes]
    assert got.flatten().tolist() == sorted(best)


@pytest.mark.gpu
def test_bf16_and_cuda_graph() -> None:
    given = inputs(1, 32, 8, 128, 1024, 1024, torch.bfloat16, "cuda")
    want = (
        reference.probe_buckets(*(x.double() for x in given), kv_heads=8, probes=32).sort(-1).values
    )
    got = probe_buckets(*given, kv_heads=8, probes=32)
    shared = (want[..., None] == got[..., None, :]).any(-1).float().mean()
    assert shared > 0.9  # bf16 hidden units reorder buckets that nearly tie
    sizes = torch.full((1, 8, 1024), 100, dtype=torch.int32, device="cuda")
    dense = probe_buckets(*given, kv_heads=8, probes=64, sizes=sizes, threshold=4.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = probe_buckets(*given, kv_heads=8, probes=32)
        dense_again = probe_buckets(*given, kv_heads=8, probes=64, sizes=sizes, threshold=4.0)
    graph.replay()
    assert torch.equal(again, got)
    assert torch.equal(dense_again, dense)
