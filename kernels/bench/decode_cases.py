"""Benchmark cases of decoding: a few new queries against long caches.

The caches of several layers are read in turn and timed as one CUDA graph. Decoding is memory-bound:
the bytes of its work are the keys and values that are read, the queries and the output, once each.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msattn.kernels.bench import eager, peers
from msattn.kernels.bench.cases import BenchCase, Forms, Function, Layer, Options, Peer, forms_of
from msattn.kernels.bench.prefill_cases import PAGE_SIZES, conv_weight
from msattn.kernels.bench.rows import Shape, Work
from msattn.kernels.common.bucket_index import build_bucket_index
from msattn.kernels.common.fp8 import FP8
from msattn.kernels.reference.bucket_decode import bucket_decode as bucket_decode_reference
from msattn.kernels.reference.flash_decode import flash_decode as flash_decode_reference
from msattn.kernels.testing import random_pages
from msattn.kernels.types import PagedKeys

LAYERS = 8  # caches read in turn, so that none is still in the L2 cache when it is read again
PARTS = 8  # partial results that merge_states combines
decode_case = partial(BenchCase, queries=1, graph=True)


def flash_decode(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields a case per number of queries and variant of ``flash_decode``."""
    for queries, layers, work, compared, setting in _dense_problems(shape, options, causal=False):
        for variant in ("partial", "global"):
            forms = _flash_forms(options.softcap, causal=False, variant=variant)
            yield decode_case(
                *forms, layers, work, compared, f"{variant}, {setting}", queries=queries
            )


def paged_flash_decode(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields for each number of queries ``flash_decode``, then a case per page size."""
    forms = _on_pages(forms_of("paged_flash_decode", softcap=options.softcap))
    for queries, layers, work, compared, setting in _dense_problems(shape, options, causal=True):
        contiguous = _flash_forms(options.softcap, causal=True)
        yield decode_case(
            *contiguous, layers, work, compared, f"contiguous, {setting}", queries=queries
        )
        for page_size in PAGE_SIZES:
            pages = [(q, *_paged(shape, options, k, v, page_size)) for q, k, v in layers]
            name = f"{_pages_name(page_size, options)}, {setting}"
            work = _work(shape, queries, shape.length, fp8=options.fp8)
            yield decode_case(*forms, pages, work, compared, name, queries=queries)


def _flash_forms(cap: float | None, *, causal: bool, **options: Any) -> Forms:
    from msattn.kernels.flash_decode import flash_decode as op
    from msattn.kernels.flash_decode.score_mod import softcap

    options |= {"causal": causal, "score_mod": None if cap is None else softcap(cap)}
    plain = partial(eager.flash_decode, causal=causal, softcap=cap)
    return Forms(partial(op, **options), partial(flash_decode_reference, **options), plain)


def _dense_problems(
    shape: Shape, options: Options, causal: bool
) -> Iterator[tuple[int, list[Layer], Work, list[Peer], str]]:
    """Yields the problem of each number of queries: its layers, work, peers and setting."""
    cap = options.softcap
    plain = partial(eager.flash_decode, causal=causal, softcap=cap)
    cache = shape.cache(LAYERS, max(options.queries))
    for queries in options.queries:
        layers: list[Layer] = [(q[:, :, :queries].contiguous(), k, v) for q, k, v in cache]
        work = _work(shape, queries, shape.length)
        setting = peers.capped_setting(f"N = {queries}", cap)
        scores = shape.batch * shape.q_heads * queries * shape.length
        compared = [
            *_dense(layers, work, setting, cap),
            peers.eager(plain, layers, work, scores, setting=setting),
        ]
        yield queries, layers, work, compared, setting


def bucket_decode(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields two cases: a step of SAAP decoding without and with routing.

    The step has 1024 buckets, 32 probes, a sink of 1 and 2047 recent keys, or fewer if the cache is
    short.
    """
    problem = _bucket_problem(shape, options.softcap)
    yield _listed(shape, problem)
    yield _routed(shape, problem)


def probe_buckets(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields one case: the step of SAAP decoding with routing."""
    yield _routed(shape, _bucket_problem(shape))


def paged_bucket_decode(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields the step of ``bucket_decode`` with lists, then a case per page size that scans
    buckets.
    """
    problem = _bucket_problem(shape, options.softcap)
    yield _listed(shape, problem, "lists, ")
    ids = problem.buckets.short()
    work = _work(shape, 1, problem.read * shape.length, fp8=options.fp8)
    forms = _on_pages(forms_of("paged_bucket_decode", **problem.window))
    for page_size in PAGE_SIZES:
        pages = [
            (q, *_paged(shape, options, k, v, page_size, [ids]), probes)
            for q, k, v, _, probes in problem.layers
        ]
        setting = f"{_pages_name(page_size, options)}, {problem.name}"
        yield decode_case(*forms, pages, work, problem.peers, setting, 1 - problem.read)


def paged_bucket_sizes(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields a case per page size: the sizes of the buckets of ``paged_bucket_decode``."""
    problem = _bucket_problem(shape)
    ids, num_buckets = problem.buckets.short(), problem.num_buckets
    work = Work(0, 2 * ids.numel() + 4 * shape.batch * shape.kv_heads * num_buckets)
    forms = forms_of("paged_bucket_sizes", num_buckets=num_buckets)
    for page_size in PAGE_SIZES:
        setting, layers = f"pages of {page_size}, {num_buckets} buckets", []
        for _, k, v, *_ in problem.layers:
            _, _, table, kv_len, buckets = _paged(shape, options, k, v, page_size, [ids])
            layers.append((buckets, table, kv_len))
        compared = [peers.eager(forms.eager, layers, work, ids.numel(), setting=setting)]
        yield decode_case(*forms, layers, work, compared, setting)


def _on_pages(forms: Forms) -> Forms:
    """Returns forms that take the tensors of the cache one by one."""

    def on_pages(function: Function) -> Function:
        return lambda q, k, v, table, kv_len, *others: function(
            q, PagedKeys(k, v, table, kv_len), *others
        )

    return Forms(*map(on_pages, forms))


def _paged(
    shape: Shape,
    options: Options,
    k: Tensor,
    v: Tensor,
    page_size: int,
    others: Sequence[Tensor] = (),
) -> Layer:
    """Returns pages of keys and values, the table, full lengths, and the others by slot."""
    kv_len = torch.full((shape.batch,), shape.length, dtype=torch.int32, device=k.device)
    cache, by_slot = random_pages(k, v, kv_len, page_size, others, shape.seed)
    dtype = FP8 if options.fp8 else k.dtype
    return cache.k.to(dtype), cache.v.to(dtype), cache.table, cache.kv_len, *by_slot


def _pages_name(page_size: int, options: Options) -> str:
    return f"{'FP8 ' if options.fp8 else ''}pages of {page_size}"


class _BucketProblem(NamedTuple):
    """Problem of ``bucket_decode``.

    ``layers`` are tuples (q, k, v, index, probes) with an index of ``buckets``, int32
    ``[B, Hkv, M]``; ``window`` has the options ``recent``, ``sink`` and ``softcap``, ``read`` is
    the share of keys that is read. The peers are dense attention over all keys, and eager PyTorch
    with a mask.
    """

    layers: list[Layer]
    buckets: Tensor
    num_buckets: int
    window: dict[str, Any]
    read: float
    name: str
    peers: list[Peer]


def _bucket_problem(shape: Shape, softcap: float | None = None) -> _BucketProblem:
    num_buckets, recent = min(1024, max(1, shape.length // 32)), min(2047, shape.length // 8)
    num_probes = min(32, max(1, num_buckets // 4))
    heads = shape.batch, shape.kv_heads
    random: dict[str, Any] = {"generator": shape.generator(), "device": shape.device}
    buckets = torch.randint(num_buckets, (*heads, shape.length), dtype=torch.int32, **random)
    index = build_bucket_index(buckets, num_buckets)
    probes = (
        torch.rand((LAYERS, *heads, num_buckets), **random)
        .argsort(-1)[..., :num_probes]
        .int()
        .contiguous()
    )
    layers: list[Layer] = [
        (*qkv, index, chosen) for qkv, chosen in zip(shape.cache(LAYERS), probes, strict=True)
    ]
    read = (
        sum(eager.keys_read(index, chosen, recent, 1).float().mean().item() for chosen in probes)
        / LAYERS
    )
    name = peers.capped_setting(f"{num_probes} of {num_buckets} buckets", softcap)
    window = {"recent": recent, "sink": 1, "softcap": softcap}
    all_keys = _work(shape, 1, shape.length)
    plain = partial(eager.bucket_decode, **window)
    scores = shape.batch * shape.q_heads * shape.length
    dense = _dense([layer[:3] for layer in layers], all_keys, softcap=softcap)
    compared = [*dense, peers.eager(plain, layers, all_keys, scores)]
    return _BucketProblem(layers, buckets, num_buckets, window, read, name, compared)


def _listed(shape: Shape, problem: _BucketProblem, prefix: str = "") -> BenchCase:
    """Returns the case of a step without routing."""
    forms = forms_of("bucket_decode", **problem.window)
    work = _work(shape, 1, problem.read * shape.length)
    return decode_case(
        *forms, problem.layers, work, problem.peers, prefix + problem.name, 1 - problem.read
    )


def _routed(shape: Shape, problem: _BucketProblem) -> BenchCase:
    """Returns the case of a step with routing by classifiers of 1024 hidden units.

    Large output biases determine the probed buckets, so that rounding cannot change the selection.
    """
    from msattn.kernels import bucket_decode as op
    from msattn.kernels import probe_buckets as routing

    window = problem.window
    num_buckets = problem.num_buckets
    num_probes = problem.layers[0][4].shape[2]
    hidden = 1024

    def with_classifiers(q: Tensor, k: Tensor, v: Tensor, index: Any, probes: Tensor) -> Layer:
        sizes = (shape.head_size, hidden), (1, hidden), (hidden, num_buckets)
        weights = [
            torch.randn(shape.kv_heads, *size, dtype=q.dtype, device=q.device) / size[0]
            for size in sizes
        ]
        bias_out = torch.zeros(shape.kv_heads, 1, num_buckets, dtype=q.dtype, device=q.device)
        probes = probes[:1].expand_as(probes)
        return q, k, v, index, probes, *weights, bias_out.scatter_(2, probes[0, :, None].long(), 8)

    def decode(
        q: Tensor, k: Tensor, v: Tensor, index: Any, probes: Tensor, *weights: Tensor
    ) -> Any:
        chosen = routing.probe_buckets(q, *weights, kv_heads=shape.kv_heads, probes=num_probes)
        return op.bucket_decode(q, k, v, index, chosen, **window)

    forms = Forms(
        decode,
        lambda *layer: bucket_decode_reference(*layer[:5], **window),
        lambda *layer: eager.bucket_decode(*layer[:5], **window),
    )
    layers = [with_classifiers(*layer) for layer in problem.layers]
    weights = sum(x.numel() for x in layers[0][5:])
    attention = _work(shape, 1, problem.read * shape.length)
    flops = attention.flops + 2 * shape.batch * shape.q_heads // shape.kv_heads * weights
    work = Work(flops, attention.bytes + weights * shape.dtype.itemsize)
    return decode_case(
        *forms, layers, work, problem.peers, f"{problem.name}, routing included", 1 - problem.read
    )


def conv_decode(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields a case per convolution kernel size: one new query and the ones before it."""
    forms, dense = forms_of("conv_decode"), _work(shape, 1, shape.length)
    scores = shape.batch * shape.q_heads * shape.length
    for c_q, c_k in options.kernels:
        layers: list[Layer] = [
            (*qkv, conv_weight(shape, c_q, c_k)) for qkv in shape.cache(LAYERS, c_q)
        ]
        window = (c_q - 1) * shape.batch * shape.q_heads * shape.head_size * shape.dtype.itemsize
        work = Work(
            dense.flops + scores * (2 * shape.head_size * (c_q - 1) + 2 * c_q * c_k),
            dense.bytes + window,
        )
        cache = [(q[:, :, -1:].contiguous(), k, v) for q, k, v, _ in layers]
        compared = [*_dense(cache, dense), peers.eager(forms.eager, layers, work, scores * c_q)]
        yield decode_case(*forms, layers, work, compared, f"{c_q} x {c_k}")


def merge_states(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields one case, which merges 8 partial results of ``length`` queries."""
    outs = torch.stack(shape.draw(shape.q_heads, shape.length, PARTS))
    lses = torch.randn(outs.shape[:4], generator=shape.generator(), device=shape.device)
    out, lse = outs[0].numel(), lses[0].numel()
    work = Work((2 * out + 4 * lse) * PARTS, (PARTS + 1) * (out * shape.dtype.itemsize + 4 * lse))
    compared = [peers.eager(eager.merge_states, [(outs, lses)], work, out)]
    yield BenchCase(*forms_of("merge_states"), [(outs, lses)], work, compared, f"{PARTS} parts")


def _dense(
    layers: Sequence[Layer], work: Work, setting: str = "", softcap: float | None = None
) -> list[Peer]:
    """Returns the dense peers, which read all keys."""
    dense = peers.dense(layers, work, causal=False, setting=setting, softcap=softcap)
    return [*dense, peers.flex(layers, work, setting=setting, softcap=softcap)]


def _work(shape: Shape, queries: int, keys: float, *, fp8: bool = False) -> Work:
    """Returns the work of ``queries`` per head that read ``keys`` keys of the cache."""
    rows = shape.batch * shape.q_heads * queries * shape.head_size
    cache = shape.batch * shape.kv_heads * keys * shape.head_size
    of_key = FP8.itemsize if fp8 else shape.dtype.itemsize
    return Work(4 * rows * keys, 2 * rows * shape.dtype.itemsize + 2 * cache * of_key)
