"""Benchmark cases of SAAP training: bucket mass and the two halves of an iteration of k-means."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from msattn.kernels.bench import peers
from msattn.kernels.bench.cases import BenchCase, Forms, Options, Peer, forms_of
from msattn.kernels.bench.rows import Shape, Work

QUERIES = 1000  # per prompt, as in SAAP training
PROBES, LAYERS = 32, 8  # of a decoding step
PRODUCT_CHUNK = 8192  # keys per matrix product of the peer, so that its result fits in memory


def bucket_mass(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields one case of 1000 queries and 1024 buckets, with the peer Q K^T alone."""
    queries, num_buckets = min(QUERIES, shape.length), min(1024, max(1, shape.length // 32))
    (q,), (k,) = (
        shape.draw(shape.q_heads, queries),
        shape.draw(shape.kv_heads, shape.length, cached=True),
    )
    size = shape.batch, shape.kv_heads, shape.length
    buckets = torch.randint(
        num_buckets, size, dtype=torch.int32, generator=shape.generator(), device=shape.device
    )
    rows, keys = shape.batch * shape.q_heads * queries, shape.batch * shape.kv_heads * shape.length
    item = shape.dtype.itemsize * shape.head_size
    product = Work(2 * rows * shape.length * shape.head_size, (rows + keys) * item)
    work = Work(product.flops, product.bytes + 4 * keys + 4 * rows * (num_buckets + 2))
    layers = [(q, k, buckets)]
    forms = forms_of("bucket_mass", num_buckets=num_buckets, softcap=options.softcap)
    compared = [
        Peer(
            "product",
            lambda: _product,
            [(q.contiguous(), k.contiguous())],
            product,
            note="Q K^T alone",
        ),
        peers.eager(forms.eager, layers, work, 2 * rows * shape.length),
    ]
    yield BenchCase(
        *_of_each(forms, lambda result: result[:2]),  # without the keys of the largest scores
        layers,
        work,
        compared,
        peers.capped_setting(f"{queries} queries, {num_buckets} buckets", options.softcap),
        queries=queries,
        window=lambda layer, begin, end: (layer[0][:, :, begin:end], layer[1], layer[2][-1:]),
    )


def _product(q: Tensor, k: Tensor) -> None:
    """Computes Q K^T in chunks of keys and discards the result."""
    grouped = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    for keys in k.split(PRODUCT_CHUNK, dim=2):
        torch.matmul(grouped, keys.mT)


def nearest_centroid(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields the assignment of k-means, with the peer K C^T alone."""
    k, centroids = _keys_and_centroids(shape)
    forms = _of_each(forms_of("nearest_centroid"), lambda result: result[-1])
    yield _kmeans_case(shape, forms, (k, centroids), centroids)


def probe_centroids(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields the routing of a decoding step, then the bucket of its new key, by k-means."""
    _, centroids = _keys_and_centroids(shape)
    for heads, probes, setting in (
        (shape.q_heads, min(PROBES, centroids.shape[1]), "queries"),
        (shape.kv_heads, 1, "a key"),
    ):
        # centroids of several layers are read in turn
        layers = [(x, centroids.clone()) for (x,) in (shape.draw(heads, 1) for _ in range(LAYERS))]
        forms = _of_each(forms_of("probe_centroids", probes=probes), lambda result: result[-1])
        rows, scores = shape.batch * heads, shape.batch * centroids[..., 0].numel()
        work = Work(
            2 * scores * shape.head_size,
            4 * centroids.numel() + rows * shape.head_size * shape.dtype.itemsize,
        )
        compared = [peers.eager(forms.eager, layers, work, scores)]
        yield BenchCase(
            *forms, layers, work, compared, f"{setting}, {probes} of {centroids.shape[1]} buckets",
            queries=1, graph=True, term=shape.head_size**0.5 * heads / shape.kv_heads,
        )  # fmt: skip


def bucket_sums(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields the update of k-means, with the same peer, a product of the same size."""
    from msattn.kernels import nearest_centroid as op

    k, centroids = _keys_and_centroids(shape)
    forms = forms_of("bucket_sums", num_buckets=centroids.shape[1])
    buckets = op.nearest_centroid(k, centroids).buckets
    yield _kmeans_case(shape, _of_each(forms, lambda result: result[0]), (k, buckets), centroids)


def _keys_and_centroids(shape: Shape) -> tuple[Tensor, Tensor]:
    (k,) = shape.draw(shape.kv_heads, shape.length, cached=True)
    size = shape.kv_heads, min(1024, max(1, shape.length // 32)), shape.head_size
    centroids = torch.randn(size, generator=shape.generator(), device=shape.device)
    return k, normalize(centroids, dim=-1)


def _kmeans_case(
    shape: Shape, forms: Forms, layer: tuple[Tensor, Tensor], centroids: Tensor
) -> BenchCase:
    """Returns the case of one half of an iteration on the keys, the first of the ``layer``."""
    k, num_buckets = layer[0], centroids.shape[1]
    rows, item = shape.batch * shape.kv_heads * shape.length, shape.dtype.itemsize
    work = Work(
        2 * rows * num_buckets * shape.head_size,
        rows * shape.head_size * item + 4 * centroids.numel(),
    )
    rounded = centroids.to(shape.dtype).expand(shape.batch, -1, -1, -1)
    compared = [
        Peer("product", lambda: _product, [(rounded, k.contiguous())], work, note="K C^T alone"),
        peers.eager(forms.eager, [layer], work, rows * num_buckets),
    ]
    own_work = work._replace(bytes=work.bytes + 4 * rows)
    setting, term = f"{num_buckets} buckets", k.norm(dim=-1).max().item()
    return BenchCase(*forms, [layer], own_work, compared, setting, term=term)


def _of_each(forms: Forms, part: Callable[[Any], Any]) -> Forms:
    """Returns forms whose results are a part of those of ``forms``."""
    return Forms(*(lambda *layer, form=form: part(form(*layer)) for form in forms))
