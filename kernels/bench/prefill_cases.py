"""Benchmark cases of prefill: causal attention with as many queries as keys.

The operations are compared with dense attention. Masks are random for each query head and include the diagonal; masks of a gate
take the same time, since the time of the kernels depends on the number of blocks that are read. Work counts the FLOPs of an
operation's definition, for the visible scores that it reads. Anything more that a kernel computes (masked halves of diagonal
tiles, a convolution as matrix products) is overhead of the kernel.
"""

from collections.abc import Iterator
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.bench import eager, peers
from msattn.kernels.bench.cases import BenchCase, Layer, Options, Peer, forms_of
from msattn.kernels.bench.rows import Shape, Work
from msattn.kernels.testing import random_block_mask, random_pages
from msattn.kernels.types import PagedKeys

BLOCK = eager.BLOCK
PAGE_SIZES = (16, 64, 256)


def maxpool_attention(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields one case: dense attention and its block map, in a forward pass."""
    from msattn.kernels import maxpool_attention as op

    layers = [shape.qkv()]
    work = peers.dense_work(shape, False)
    blocks = -(-shape.length // BLOCK)
    block_map = 4 * shape.batch * shape.q_heads * blocks**2
    all_blocks, cap = torch.ones((1, 1, blocks, blocks), dtype=torch.bool, device=shape.device), options.softcap
    forms = forms_of(op, "maxpool_attention", softcap=cap)
    yield BenchCase(
        *forms,
        layers,
        Work(work.flops, work.bytes + block_map),
        [
            *peers.dense(layers, work, causal=True, softcap=cap),
            peers.flex(layers, work, all_blocks, coarse=True, softcap=cap),
            peers.eager(forms.eager, layers, work, _scores(shape)),
        ],
        peers.capped_setting("", cap),
        window=_row_inputs,
    )


def block_sparse_attention(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields a case per sparsity with random masks of each query head.

    At the first sparsity there is another case, with masks of each query group.
    """
    from msattn.kernels.block_sparse_attention import forward as op

    qkv, cap = shape.qkv(), options.softcap
    dense, forms = _dense(shape, qkv, options), forms_of(op, "block_sparse_attention", softcap=cap)
    settings = [(sparsity, shape.q_heads) for sparsity in options.sparsities]
    if shape.kv_heads < shape.q_heads:
        settings.append((options.sparsities[0], shape.kv_heads))
    full = peers.dense_work(shape, options.backward)
    for i, (sparsity, heads) in enumerate(settings):
        mask = _mask(shape, sparsity, heads)
        pairs = _pairs_read(mask, shape)
        work, realised = peers.attention_work(shape, pairs, options.backward), 1 - pairs / _pairs(shape)
        setting = peers.capped_setting(f"{sparsity:.0%} sparse" + (", group masks" if heads < shape.q_heads else ""), cap)
        layers = [(*qkv, mask)]
        flex = peers.flex(layers, work, mask, coarse=options.backward, setting=setting, sparsity=realised, softcap=cap)
        if i == 0:  # eager code computes all scores, whatever the mask
            scores = _scores(shape)
            dense.append(peers.eager(forms.eager, layers, full, scores, options.backward))
        yield BenchCase(*forms, layers, work, [*dense, flex], setting, realised, window=_row_inputs)


def paged_block_sparse_attention(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields a case per sparsity and page size, and dense attention over pages.

    Prompts are packed, their keys are in shuffled pages. The peer ``block_sparse`` reads the same blocks of contiguous keys.
    """
    from msattn.kernels.block_sparse_attention import forward as contiguous

    qkv, cap = shape.qkv(), options.softcap
    plain = partial(eager.block_sparse_attention, softcap=cap)
    all_blocks = torch.ones_like(_mask(shape, 0, 1))
    full = peers.dense_work(shape, False)
    dense = [*_dense(shape, qkv, options), peers.eager(plain, [(*qkv, all_blocks)], full, _scores(shape))]
    lengths = torch.full((shape.batch,), shape.length, dtype=torch.int32, device=shape.device)
    caches = {page_size: random_pages(*qkv[1:], lengths, page_size)[0] for page_size in PAGE_SIZES}
    for sparsity in options.sparsities:
        mask = _mask(shape, sparsity, shape.q_heads)
        pairs, layers = _pairs_read(mask, shape), [(*qkv, mask)]
        work, realised = peers.attention_work(shape, pairs, False), 1 - pairs / _pairs(shape)
        setting = peers.capped_setting(f"{sparsity:.0%} sparse", cap)
        call = partial(contiguous.block_sparse_attention, softcap=cap)
        block_sparse = Peer("block_sparse", lambda call=call: call, layers, work, realised, setting)
        for page_size, cache in caches.items():
            name = f"{setting}, pages of {page_size}"
            yield _paged(shape, cache, mask, layers, work, [*dense, block_sparse], name, realised, cap)
    name = peers.capped_setting(f"all blocks, pages of {PAGE_SIZES[-1]}", cap)
    yield _paged(shape, caches[PAGE_SIZES[-1]], None, [(*qkv, all_blocks)], full, dense, name, 0.0, cap)


def _paged(
    shape: Shape,
    cache: PagedKeys,
    mask: Tensor | None,
    layers: list[Layer],
    work: Work,
    compared: list[Peer],
    setting: str,
    sparsity: float,
    softcap: float | None,
) -> BenchCase:
    """Returns a case whose layers have contiguous keys, for the reference; the operation reads them in ``cache``."""
    from msattn.kernels.paged import block_sparse_attention as op

    cu_queries = torch.arange(shape.batch + 1, dtype=torch.int32, device=shape.device) * shape.length
    if mask is not None:
        past_the_end = -(-cache.table.shape[1] * cache.k.shape[1] // BLOCK) - mask.shape[3]
        mask = torch.nn.functional.pad(mask, (0, past_the_end)).expand(shape.batch, -1, -1, -1)

    def call(q: Tensor, *contiguous: Tensor) -> tuple[Tensor, Tensor]:
        packed = q.transpose(1, 2).flatten(0, 1)  # a view, as the queries of a layer are transposed ones
        out, lse = op.paged_block_sparse_attention(packed, cache, cu_queries, mask, max_queries=shape.length, softcap=softcap)
        return out.unflatten(0, (shape.batch, -1)).transpose(1, 2), lse.unflatten(0, (shape.batch, -1)).transpose(1, 2)

    exact = partial(reference.block_sparse_attention, softcap=softcap)
    plain = partial(eager.block_sparse_attention, softcap=softcap)
    return BenchCase(call, exact, plain, layers, work, compared, setting, sparsity, window=_row_inputs)


def multiscale_attention(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields a case per sparsity with random zooms, equally many blocks at 2, 4 and 8.

    The peer ``block_sparse`` is block-sparse attention that reads as many tokens.
    """
    from msattn.kernels.block_sparse_attention import forward as plain
    from msattn.kernels.multiscale_attention import forward as op

    qkv, cap = shape.qkv(), options.softcap
    dense, forms = _dense(shape, qkv, options), forms_of(op, "multiscale_attention", softcap=cap)
    full = peers.dense_work(shape, options.backward)
    for i, sparsity in enumerate(options.sparsities):
        zoom, mask = _zoom(shape, sparsity), _mask(shape, sparsity, shape.q_heads)
        pairs = _pairs_read(zoom, shape)
        work, realised = peers.attention_work(shape, pairs, options.backward), 1 - pairs / _pairs(shape)
        block_sparse_pairs = _pairs_read(mask, shape)
        setting = peers.capped_setting(f"{sparsity:.0%} sparse", cap)
        layers = [(*qkv, zoom)]
        block_sparse = Peer(
            "block_sparse",
            lambda: partial(plain.block_sparse_attention, softcap=cap),
            [(*qkv, mask)],
            peers.attention_work(shape, block_sparse_pairs, options.backward),
            1 - block_sparse_pairs / _pairs(shape),
            setting,
        )
        if i == 0:
            scores = 2 * _scores(shape)  # and a zoom for each of them
            dense.append(peers.eager(forms.eager, layers, full, scores, options.backward))
        yield BenchCase(*forms, layers, work, [*dense, block_sparse], setting, realised, window=_row_inputs)


def conv_attention(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields a case per convolution kernel size."""
    from msattn.kernels.conv_attention import operation as op

    for c_q, c_k in options.kernels:
        weight = conv_weight(shape, c_q, c_k)
        yield _weighted(shape, options, weight, 2 * c_q * c_k, op, "conv_attention", f"{c_q} x {c_k}", c_q - 1)


def head_mix_attention(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields one case, in which the scores of all query heads are mixed."""
    from msattn.kernels.head_mix_attention import operation as op

    weight = torch.eye(shape.q_heads, device=shape.device) + 0.1 * torch.randn(
        (shape.q_heads, shape.q_heads), generator=_generator(shape), device=shape.device
    )
    yield _weighted(shape, options, weight.to(shape.dtype), 2 * shape.q_heads, op, "head_mix_attention")


def conv_weight(shape: Shape, c_q: int, c_k: int) -> Tensor:
    """Draws convolution weights ``[Hq, c_q, c_k]`` close to the identity."""
    weight = 0.1 * torch.randn((shape.q_heads, c_q, c_k), generator=_generator(shape), device=shape.device)
    weight[:, c_q - 1, (c_k - 1) // 2] += 1
    return weight.to(shape.dtype)


def _weighted(
    shape: Shape,
    options: Options,
    weight: Tensor,
    flops_per_score: int,
    module: ModuleType,
    name: str,
    setting: str = "",
    context: int = 0,
) -> BenchCase:
    """Returns a case of an operation with a weight that mixes scores.

    For each score it takes ``flops_per_score`` more FLOPs than dense attention, three times as many in the backward pass, which
    recomputes the mixing and has two more of the same size.
    """
    layers, forms = [(*shape.qkv(), weight)], forms_of(module, name)
    full = peers.dense_work(shape, options.backward)
    work = Work(full.flops + flops_per_score * (3 if options.backward else 1) * _pairs(shape), full.bytes)
    eager_peer = peers.eager(forms.eager, layers, work, 2 * _scores(shape), options.backward)
    compared = [*_dense(shape, layers[0][:3], options), eager_peer]
    return BenchCase(*forms, layers, work, compared, setting, window=_row_inputs, context=context)


def _row_inputs(layer: Layer, begin: int, end: int) -> Layer:
    """Returns the inputs of the query rows [begin, end).

    They include the keys up to the last row, and the row blocks of a mask or of zooms.
    """
    q, k, v, *others = layer
    last = -(-end // BLOCK)
    others = [x[..., begin // BLOCK : last, :last] if x.ndim == 4 else x for x in others]
    return q[:, :, begin:end], k[:, :, :end], v[:, :, :end], *others


def _dense(shape: Shape, qkv: tuple[Tensor, ...], options: Options) -> list[Peer]:
    return peers.dense([qkv], peers.dense_work(shape, options.backward), causal=True, softcap=options.softcap)


def _generator(shape: Shape) -> torch.Generator:
    return torch.Generator(shape.device).manual_seed(shape.seed)


def _mask(shape: Shape, sparsity: float, heads: int) -> Tensor:
    blocks = -(-shape.length // BLOCK)
    return random_block_mask(1, heads, blocks, blocks, 1 - sparsity, shape.device, shape.seed)


def _zoom(shape: Shape, sparsity: float) -> Tensor:
    """Draws zooms ``uint8 [1, Hq, T, T]`` that skip ``sparsity`` of the tokens.

    The diagonal is always read.
    """
    blocks = -(-shape.length // BLOCK)
    # Share of blocks at each of the zooms 2, 4 and 8: at most that at zoom 1, and such that all shares sum to at most 1.
    each = min((1 - sparsity) / 1.875, sparsity / 2.125)
    whole = 1 - sparsity - 0.875 * each
    edges = torch.tensor([whole, whole + each, whole + 2 * each, whole + 3 * each], device=shape.device)
    drawn = torch.rand((1, shape.q_heads, blocks, blocks), generator=_generator(shape), device=shape.device)
    levels = torch.tensor([1, 2, 4, 8, 0], dtype=torch.uint8, device=shape.device)
    zoom = levels[torch.bucketize(drawn, edges, right=True)]
    zoom.diagonal(dim1=2, dim2=3).fill_(1)
    return zoom


def _scores(shape: Shape) -> int:
    return shape.batch * shape.q_heads * shape.length**2


def _pairs(shape: Shape) -> float:
    """Returns the number of causally visible scores, over all sequences and heads."""
    return shape.batch * shape.q_heads * shape.length * (shape.length + 1) / 2


def _pairs_read(selection: Tensor, shape: Shape) -> float:
    """Returns the number of visible scores that attention with a mask or zooms reads.

    ``selection`` is the mask or the zooms, ``[1, heads, T, T]``. The mean of several keys has one score.
    """
    first = torch.arange(selection.shape[3], device=selection.device, dtype=torch.float64) * BLOCK
    tokens = (shape.length - first).clamp(max=BLOCK)
    on_diagonal = torch.diag(tokens * (tokens + 1) / 2)
    below = torch.outer(tokens, tokens).tril(-1)
    zooms = (1,) if selection.dtype == torch.bool else (1, 2, 4, 8)
    read = sum(float(((selection == z).sum((0, 1)) * (below / z + on_diagonal)).sum()) for z in zooms)
    return read * shape.batch * shape.q_heads / selection.shape[1]
