"""Decoding: a few new queries against a long cache, as a CUDA graph that goes over the caches of several layers.

What bounds these is memory: bytes count the keys and values that are read, the queries and the output, each once.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.bench import eager, peers
from msattn.kernels.bench.cases import Case, Layer, Options, Peer
from msattn.kernels.bench.prefill import conv_weight
from msattn.kernels.bench.rows import Shape, Work
from msattn.kernels.common.bucket_index import build_bucket_index

LAYERS = 8  # caches that take turns, so that none is still in the L2 cache when its turn comes


def flash_decode(shape: Shape, options: Options) -> Iterator[Case]:
    """Both variants, at each number of queries."""
    from msattn.kernels.flash_decode import forward as op

    cache = shape.cache(LAYERS, max(options.queries))
    for queries in options.queries:
        layers = [(q[:, :, :queries].contiguous(), k, v) for q, k, v in cache]
        work, setting = _work(shape, queries, shape.length), f"N = {queries}"
        scores = shape.batch * shape.q_heads * queries * shape.length
        beside = [*_dense(layers, work, setting), peers.eager(eager.decode, layers, work, scores, setting=setting)]
        for variant in ("partial", "global"):
            yield Case(
                partial(op.flash_decode, variant=variant),
                partial(reference.flash_decode, variant=variant),
                eager.decode,
                layers,
                work,
                beside,
                f"{variant}, {setting}",
                queries=queries,
                graph=True,
            )


def bucket_decode(shape: Shape, options: Options) -> Iterator[Case]:
    """A step of SAAP: 1024 buckets, 32 probes, 1 + 2047 keys read exactly; fewer if the cache is short. Then with routing."""
    from msattn.kernels import bucket_decode as op

    problem = _bucket_problem(shape)
    own, beside = problem.own, _beside(shape, problem)
    yield Case(
        partial(op.bucket_decode, **own),
        partial(reference.bucket_decode, **own),
        partial(eager.bucket_decode, **own),
        problem.layers,
        _work(shape, 1, problem.read * shape.length),
        beside,
        problem.name,
        1 - problem.read,
        queries=1,
        graph=True,
    )
    yield _routed(shape, problem, beside)


def probe_buckets(shape: Shape, options: Options) -> Iterator[Case]:
    """That step with its routing alone."""
    problem = _bucket_problem(shape)
    yield _routed(shape, problem, _beside(shape, problem))


class _Buckets(NamedTuple):
    """Layers of queries, cache, index and probes; the window; the share of the keys that is read."""

    layers: list[Layer]
    own: dict[str, Any]
    read: float
    name: str


def _bucket_problem(shape: Shape) -> _Buckets:
    num_buckets, recent = min(1024, max(1, shape.length // 32)), min(2047, shape.length // 8)
    num_probes = min(32, max(1, num_buckets // 4))
    generator = torch.Generator(shape.device).manual_seed(shape.seed)
    heads = shape.batch, shape.kv_heads
    drawn: dict[str, Any] = {"generator": generator, "device": shape.device}
    buckets = torch.randint(num_buckets, (*heads, shape.length), dtype=torch.int32, **drawn)
    index = build_bucket_index(buckets, num_buckets)
    probes = torch.rand((LAYERS, *heads, num_buckets), **drawn).argsort(-1)[..., :num_probes].int().contiguous()
    layers = [(*qkv, index, chosen) for qkv, chosen in zip(shape.cache(LAYERS), probes, strict=True)]
    read = sum(eager.keys_read(index, chosen, recent, 1).float().mean().item() for chosen in probes) / LAYERS
    return _Buckets(layers, {"recent": recent, "sink": 1}, read, f"{num_probes} of {num_buckets} buckets")


def _beside(shape: Shape, problem: _Buckets) -> list[Peer]:
    """Every key read, and plain code that reads the buckets."""
    plain, everything = partial(eager.bucket_decode, **problem.own), _work(shape, 1, shape.length)
    scores = shape.batch * shape.q_heads * shape.length
    return [
        *_dense([layer[:3] for layer in problem.layers], everything),
        peers.eager(plain, problem.layers, everything, scores),
    ]


def _routed(shape: Shape, problem: _Buckets, beside: Sequence[Peer]) -> Case:
    """A step with its routing, by classifiers of 1024 hidden units; their biases make the choice beyond doubt."""
    from msattn.kernels import bucket_decode as op
    from msattn.kernels import probe_buckets as routing

    layers, own, read, name = problem
    num_buckets, num_probes, hidden = layers[0][3].offsets.shape[2] - 1, layers[0][4].shape[2], 1024

    def with_classifiers(q: Tensor, k: Tensor, v: Tensor, index: Any, probes: Tensor) -> Layer:
        sizes = (shape.head_size, hidden), (1, hidden), (hidden, num_buckets)
        weights = [torch.randn(shape.kv_heads, *size, dtype=q.dtype, device=q.device) / size[0] for size in sizes]
        bias_out = torch.zeros(shape.kv_heads, 1, num_buckets, dtype=q.dtype, device=q.device)
        probes = probes[:1].expand_as(probes)
        return q, k, v, index, probes, *weights, bias_out.scatter_(2, probes[0, :, None].long(), 8)

    def decode(q: Tensor, k: Tensor, v: Tensor, index: Any, probes: Tensor, *weights: Tensor) -> Any:
        chosen = routing.probe_buckets(q, *weights, kv_heads=shape.kv_heads, probes=num_probes)
        return op.bucket_decode(q, k, v, index, chosen, **own)

    routed = [with_classifiers(*layer) for layer in layers]
    work = _work(shape, 1, read * shape.length)
    weights = sum(x.numel() for x in routed[0][5:])
    return Case(
        decode,
        lambda *layer: reference.bucket_decode(*layer[:5], **own),
        lambda *layer: eager.bucket_decode(*layer[:5], **own),
        routed,
        Work(
            work.flops + 2 * shape.batch * shape.q_heads // shape.kv_heads * weights,
            work.bytes + weights * shape.dtype.itemsize,
        ),
        beside,
        f"{name}, routing included",
        1 - read,
        queries=1,
        graph=True,
    )


def conv_decode(shape: Shape, options: Options) -> Iterator[Case]:
    """One new query, and the scores of those before it that a convolution reaches."""
    from msattn.kernels import conv_decode as op

    for c_q, c_k in options.kernels:
        layers: list[Layer] = [(*qkv, conv_weight(shape, c_q, c_k)) for qkv in shape.cache(LAYERS, c_q)]
        dense = _work(shape, 1, shape.length)
        scores = shape.batch * shape.q_heads * shape.length
        window = (c_q - 1) * shape.batch * shape.q_heads * shape.head_size * shape.dtype.itemsize
        flops = dense.flops + scores * (2 * shape.head_size * (c_q - 1) + 2 * c_q * c_k)
        cache = [(q[:, :, -1:].contiguous(), k, v) for q, k, v, _ in layers]
        work = Work(flops, dense.bytes + window)
        yield Case(
            op.conv_decode,
            reference.conv_decode,
            eager.conv_decode,
            layers,
            work,
            [*_dense(cache, dense), peers.eager(eager.conv_decode, layers, work, scores * c_q)],
            f"{c_q} x {c_k}",
            queries=1,
            graph=True,
        )


def _dense(layers: Sequence[Layer], work: Work, setting: str = "") -> list[Peer]:
    """Every key read, by PyTorch."""
    return [*peers.dense(layers, work, causal=False, setting=setting), peers.flex_decode(layers, work, setting)]


def _work(shape: Shape, queries: int, keys: float) -> Work:
    """``keys`` of the cache read by ``queries`` of each head."""
    rows = shape.batch * shape.q_heads * queries * shape.head_size
    cache = shape.batch * shape.kv_heads * keys * shape.head_size
    return Work(4 * rows * keys, (2 * rows + 2 * cache) * shape.dtype.itemsize)
