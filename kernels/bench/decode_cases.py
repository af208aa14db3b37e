"""Benchmark cases of decoding: a few new queries against long caches.

The caches of several layers are read in turn and timed as one CUDA graph. Decoding is memory-bound: the bytes of its work are
the keys and values that are read, the queries and the output, once each.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.bench import eager, peers
from msattn.kernels.bench.cases import BenchCase, Forms, Function, Layer, Options, Peer, forms_of
from msattn.kernels.bench.prefill_cases import PAGE_SIZES, conv_weight
from msattn.kernels.bench.rows import Shape, Work
from msattn.kernels.common.bucket_index import build_bucket_index
from msattn.kernels.testing import random_pages
from msattn.kernels.types import PagedKeys

LAYERS = 8  # caches read in turn, so that none is still in the L2 cache when it is read again
PARTS = 8  # partial results that merge_states combines


def flash_decode(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields a case per number of queries and variant of ``flash_decode``."""
    from msattn.kernels.flash_decode import forward as op
    from msattn.kernels.flash_decode.score_mod import softcap

    cap = options.softcap
    score_mod, plain = None if cap is None else softcap(cap), partial(eager.decode, softcap=cap)
    cache = shape.cache(LAYERS, max(options.queries))
    for queries in options.queries:
        layers = [(q[:, :, :queries].contiguous(), k, v) for q, k, v in cache]
        work, setting = _work(shape, queries, shape.length), peers.capped_setting(f"N = {queries}", cap)
        scores = shape.batch * shape.q_heads * queries * shape.length
        compared = [*_dense(layers, work, setting, cap), peers.eager(plain, layers, work, scores, setting=setting)]
        for variant in ("partial", "global"):
            yield BenchCase(
                partial(op.flash_decode, variant=variant, score_mod=score_mod),
                partial(reference.flash_decode, variant=variant, score_mod=score_mod),
                plain,
                layers,
                work,
                compared,
                f"{variant}, {setting}",
                queries=queries,
                graph=True,
            )


def bucket_decode(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields two cases: a step of SAAP decoding without and with routing.

    The step has 1024 buckets, 32 probes, a sink of 1 and 2047 recent keys, or fewer if the cache is short.
    """
    problem = _bucket_problem(shape, options.softcap)
    compared = _bucket_peers(shape, problem)
    yield _listed(shape, problem, compared)
    yield _routed(shape, problem, compared)


def probe_buckets(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields one case: the step of SAAP decoding with routing."""
    problem = _bucket_problem(shape)
    yield _routed(shape, problem, _bucket_peers(shape, problem))


def paged_bucket_decode(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields the step of ``bucket_decode`` with lists, then a case per page size that scans buckets."""
    from msattn.kernels.paged import bucket_decode as op

    problem = _bucket_problem(shape, options.softcap)
    compared = _bucket_peers(shape, problem)
    yield _listed(shape, problem, compared, "lists, ")
    ids = problem.buckets.short()

    def on_pages(function: Function) -> Function:
        return lambda q, k, v, table, kv_len, *others: function(q, PagedKeys(k, v, table, kv_len), *others)

    forms = Forms(*map(on_pages, forms_of(op, "paged_bucket_decode", **problem.window)))
    for page_size in PAGE_SIZES:
        pages = [(layer[0], *_paged(shape, layer[1], layer[2], page_size, [ids])) for layer in problem.layers]
        layers = [(*paged, layer[4]) for paged, layer in zip(pages, problem.layers, strict=True)]
        yield BenchCase(
            *forms,
            layers,
            _work(shape, 1, problem.read * shape.length),
            compared,
            f"pages of {page_size}, {problem.name}",
            1 - problem.read,
            queries=1,
            graph=True,
        )


def paged_bucket_sizes(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields a case per page size: the sizes of the buckets of ``paged_bucket_decode``."""
    from msattn.kernels.paged import bucket_sizes as op

    problem = _bucket_problem(shape)
    ids, num_buckets = problem.buckets.short(), problem.num_buckets
    work = Work(0, 2 * ids.numel() + 4 * shape.batch * shape.kv_heads * num_buckets)
    forms = forms_of(op, "paged_bucket_sizes", num_buckets=num_buckets)
    for page_size in PAGE_SIZES:
        setting, layers = f"pages of {page_size}, {num_buckets} buckets", []
        for _, k, v, *_ in problem.layers:
            _, _, table, kv_len, buckets = _paged(shape, k, v, page_size, [ids])
            layers.append((buckets, table, kv_len))
        compared = [peers.eager(forms.eager, layers, work, ids.numel(), setting=setting)]
        yield BenchCase(*forms, layers, work, compared, setting, queries=1, graph=True)


def paged_flash_decode(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields for each number of queries ``flash_decode``, then a case per page size."""
    from msattn.kernels.flash_decode import flash_decode as contiguous
    from msattn.kernels.flash_decode.score_mod import softcap
    from msattn.kernels.paged import flash_decode as op

    cap = options.softcap
    score_mod, plain = None if cap is None else softcap(cap), partial(eager.causal_decode, softcap=cap)
    cache = shape.cache(LAYERS, max(options.queries))

    def on_pages(function: Function) -> Function:
        return lambda q, *pages: function(q, PagedKeys(*pages))

    forms = Forms(*map(on_pages, forms_of(op, "paged_flash_decode", softcap=cap)))
    for queries in options.queries:
        layers: list[Layer] = [(q[:, :, :queries].contiguous(), k, v) for q, k, v in cache]
        work, setting = _work(shape, queries, shape.length), peers.capped_setting(f"N = {queries}", cap)
        scores = shape.batch * shape.q_heads * queries * shape.length
        compared = [*_dense(layers, work, setting, cap), peers.eager(plain, layers, work, scores, setting=setting)]
        yield BenchCase(
            partial(contiguous, causal=True, score_mod=score_mod),
            partial(reference.flash_decode, causal=True, score_mod=score_mod),
            plain,
            layers,
            work,
            compared,
            f"contiguous, {setting}",
            queries=queries,
            graph=True,
        )
        for page_size in PAGE_SIZES:
            yield BenchCase(
                *forms,
                [(q, *_paged(shape, k, v, page_size)) for q, k, v in layers],
                work,
                compared,
                f"pages of {page_size}, {setting}",
                queries=queries,
                graph=True,
            )


def _paged(shape: Shape, k: Tensor, v: Tensor, page_size: int, others: Sequence[Tensor] = ()) -> Layer:
    """Returns pages of keys and values, the table, full lengths, and the others by slot."""
    kv_len = torch.full((shape.batch,), shape.length, dtype=torch.int32, device=k.device)
    cache, by_slot = random_pages(k, v, kv_len, page_size, others, shape.seed)
    return *cache, *by_slot


class _BucketProblem(NamedTuple):
    """Problem of ``bucket_decode``.

    ``layers`` are tuples (q, k, v, index, probes) with an index of ``buckets``, int32 ``[B, Hkv, M]``; ``window`` has the
    options ``recent``, ``sink`` and ``softcap``, ``read`` is the share of keys that is read.
    """

    layers: list[Layer]
    buckets: Tensor
    num_buckets: int
    window: dict[str, Any]
    read: float
    name: str


def _bucket_problem(shape: Shape, softcap: float | None = None) -> _BucketProblem:
    num_buckets, recent = min(1024, max(1, shape.length // 32)), min(2047, shape.length // 8)
    num_probes = min(32, max(1, num_buckets // 4))
    generator = torch.Generator(shape.device).manual_seed(shape.seed)
    heads = shape.batch, shape.kv_heads
    random: dict[str, Any] = {"generator": generator, "device": shape.device}
    buckets = torch.randint(num_buckets, (*heads, shape.length), dtype=torch.int32, **random)
    index = build_bucket_index(buckets, num_buckets)
    probes = torch.rand((LAYERS, *heads, num_buckets), **random).argsort(-1)[..., :num_probes].int().contiguous()
    layers = [(*qkv, index, chosen) for qkv, chosen in zip(shape.cache(LAYERS), probes, strict=True)]
    read = sum(eager.keys_read(index, chosen, recent, 1).float().mean().item() for chosen in probes) / LAYERS
    name = peers.capped_setting(f"{num_probes} of {num_buckets} buckets", softcap)
    return _BucketProblem(layers, buckets, num_buckets, {"recent": recent, "sink": 1, "softcap": softcap}, read, name)


def _bucket_peers(shape: Shape, problem: _BucketProblem) -> list[Peer]:
    """Returns the peers: dense attention over all keys, and eager PyTorch with a mask."""
    plain, all_keys = partial(eager.bucket_decode, **problem.window), _work(shape, 1, shape.length)
    scores = shape.batch * shape.q_heads * shape.length
    return [
        *_dense([layer[:3] for layer in problem.layers], all_keys, softcap=problem.window["softcap"]),
        peers.eager(plain, problem.layers, all_keys, scores),
    ]


def _listed(shape: Shape, problem: _BucketProblem, compared: Sequence[Peer], prefix: str = "") -> BenchCase:
    """Returns the case of a step without routing."""
    from msattn.kernels import bucket_decode as op

    return BenchCase(
        *forms_of(op, "bucket_decode", **problem.window),
        problem.layers,
        _work(shape, 1, problem.read * shape.length),
        compared,
        prefix + problem.name,
        1 - problem.read,
        queries=1,
        graph=True,
    )


def _routed(shape: Shape, problem: _BucketProblem, compared: Sequence[Peer]) -> BenchCase:
    """Returns the case of a step with routing by classifiers of 1024 hidden units.

    Large output biases determine the probed buckets, so that rounding cannot change the selection.
    """
    from msattn.kernels import bucket_decode as op
    from msattn.kernels import probe_buckets as routing

    layers, window, read, name = problem.layers, problem.window, problem.read, problem.name
    num_buckets, num_probes, hidden = layers[0][3].offsets.shape[2] - 1, layers[0][4].shape[2], 1024

    def with_classifiers(q: Tensor, k: Tensor, v: Tensor, index: Any, probes: Tensor) -> Layer:
        sizes = (shape.head_size, hidden), (1, hidden), (hidden, num_buckets)
        weights = [torch.randn(shape.kv_heads, *size, dtype=q.dtype, device=q.device) / size[0] for size in sizes]
        bias_out = torch.zeros(shape.kv_heads, 1, num_buckets, dtype=q.dtype, device=q.device)
        probes = probes[:1].expand_as(probes)
        return q, k, v, index, probes, *weights, bias_out.scatter_(2, probes[0, :, None].long(), 8)

    def decode(q: Tensor, k: Tensor, v: Tensor, index: Any, probes: Tensor, *weights: Tensor) -> Any:
        chosen = routing.probe_buckets(q, *weights, kv_heads=shape.kv_heads, probes=num_probes)
        return op.bucket_decode(q, k, v, index, chosen, **window)

    routed = [with_classifiers(*layer) for layer in layers]
    work = _work(shape, 1, read * shape.length)
    weights = sum(x.numel() for x in routed[0][5:])
    return BenchCase(
        decode,
        lambda *layer: reference.bucket_decode(*layer[:5], **window),
        lambda *layer: eager.bucket_decode(*layer[:5], **window),
        routed,
        Work(
            work.flops + 2 * shape.batch * shape.q_heads // shape.kv_heads * weights,
            work.bytes + weights * shape.dtype.itemsize,
        ),
        compared,
        f"{name}, routing included",
        1 - read,
        queries=1,
        graph=True,
    )


def conv_decode(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields a case per convolution kernel size: one new query and the ones before it."""
    from msattn.kernels import conv_decode as op

    for c_q, c_k in options.kernels:
        layers: list[Layer] = [(*qkv, conv_weight(shape, c_q, c_k)) for qkv in shape.cache(LAYERS, c_q)]
        dense = _work(shape, 1, shape.length)
        scores = shape.batch * shape.q_heads * shape.length
        window = (c_q - 1) * shape.batch * shape.q_heads * shape.head_size * shape.dtype.itemsize
        flops = dense.flops + scores * (2 * shape.head_size * (c_q - 1) + 2 * c_q * c_k)
        cache = [(q[:, :, -1:].contiguous(), k, v) for q, k, v, _ in layers]
        work = Work(flops, dense.bytes + window)
        yield BenchCase(
            *forms_of(op, "conv_decode"),
            layers,
            work,
            [*_dense(cache, dense), peers.eager(eager.conv_decode, layers, work, scores * c_q)],
            f"{c_q} x {c_k}",
            queries=1,
            graph=True,
        )


def merge_states(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields one case, which merges 8 partial results of ``length`` queries."""
    from msattn.kernels import merge_states as op

    outs = torch.stack(shape.draw(shape.q_heads, shape.length, PARTS))
    generator = torch.Generator(shape.device).manual_seed(shape.seed)
    lses = torch.randn(outs.shape[:4], generator=generator, device=shape.device)
    out, lse = outs[0].numel(), lses[0].numel()
    work = Work((2 * out + 4 * lse) * PARTS, (PARTS + 1) * (out * shape.dtype.itemsize + 4 * lse))
    layers = [(outs, lses)]
    compared = [peers.eager(eager.merge_states, layers, work, out)]
    yield BenchCase(*forms_of(op, "merge_states"), layers, work, compared, f"{PARTS} parts")


def _dense(layers: Sequence[Layer], work: Work, setting: str = "", softcap: float | None = None) -> list[Peer]:
    """Returns the dense peers, which read all keys."""
    return [
        *peers.dense(layers, work, causal=False, setting=setting, softcap=softcap),
        peers.flex_decode(layers, work, setting, softcap),
    ]


def _work(shape: Shape, queries: int, keys: float) -> Work:
    """Returns the work of ``queries`` per head that read ``keys`` keys of the cache."""
    rows = shape.batch * shape.q_heads * queries * shape.head_size
    cache = shape.batch * shape.kv_heads * keys * shape.head_size
    return Work(4 * rows * keys, (2 * rows + 2 * cache) * shape.dtype.itemsize)
