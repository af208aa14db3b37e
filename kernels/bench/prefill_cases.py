"""Benchmark cases of prefill: causal attention with as many queries as keys.

The operations are compared with dense attention. Masks are random for each query head and include
the diagonal; masks of a gate take the same time, since the time of the kernels depends on the
number of blocks that are read. Work counts the FLOPs of an operation's definition, for the visible
scores that it reads. Anything more that a kernel computes (masked halves of diagonal tiles, a
convolution as matrix products) is overhead of the kernel.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from msattn.kernels.bench import eager, peers
from msattn.kernels.bench.cases import BenchCase, Forms, Function, Layer, Options, Peer, forms_of
from msattn.kernels.bench.rows import BLOCK, SMALL, Shape, Work
from msattn.kernels.common.fp8 import FP8
from msattn.kernels.reference import block_sparse_attention as reference
from msattn.kernels.testing import random_block_mask, random_pages
from msattn.kernels.types import PagedKeys

PAGE_SIZES = (16, 64, 256)


def maxpool_attention(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields one case: dense attention and its block map, in a forward pass."""
    layers, cap = [shape.qkv()], options.softcap
    dense, forms = peers.dense_work(shape, False), forms_of("maxpool_attention", softcap=cap)
    compared = [
        *peers.dense(layers, dense, causal=True, softcap=cap),
        peers.flex(layers, dense, _mask(shape, 0, 1), coarse=True, softcap=cap),
        peers.eager(forms.eager, layers, dense, _scores(shape)),
    ]
    work = Work(dense.flops, dense.bytes + 4 * shape.batch * shape.q_heads * shape.blocks**2)
    yield prefill_case(*forms, layers, work, compared, peers.capped_setting("", cap))


def block_sparse_attention(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields a case per sparsity with random masks of each query head.

    At the first sparsity there is another case, with masks of each query group. Forward, there is
    one more per sparsity, with blocks of ``SMALL`` keys; the peer ``block_sparse`` reads as many
    keys in blocks of ``BLOCK``.
    """
    qkv, cap = shape.qkv(), options.softcap
    forms = forms_of("block_sparse_attention", softcap=cap)
    dense = _dense(shape, qkv, options, forms.eager, (*qkv, _mask(shape, 0, 1)))
    settings = [(sparsity, shape.q_heads) for sparsity in options.sparsities]
    if shape.kv_heads < shape.q_heads:
        settings.append((options.sparsities[0], shape.kv_heads))
    for sparsity, heads in settings:
        mask = _mask(shape, sparsity, heads)
        work, realized = _work(shape, mask, options.backward)
        setting = peers.capped_setting(
            f"{sparsity:.0%} sparse" + (", group masks" if heads < shape.q_heads else ""), cap
        )
        layers = [(*qkv, mask)]
        flex = peers.flex(
            layers,
            work,
            mask,
            coarse=options.backward,
            setting=setting,
            sparsity=realized,
            softcap=cap,
        )
        yield prefill_case(*forms, layers, work, [*dense, flex], setting, realized)
    for sparsity in () if options.backward else options.sparsities:
        setting = peers.capped_setting(f"{sparsity:.0%} sparse, {SMALL} keys", cap)
        block_sparse = _block_sparse_peer(
            shape, qkv, _mask(shape, sparsity, shape.q_heads), options, setting
        )
        mask = _mask(shape, sparsity, shape.q_heads, SMALL)
        work, realized = _work(shape, mask, False, SMALL)
        small = forms_of("block_sparse_attention", softcap=cap, key_block_size=SMALL)
        rows = partial(_row_inputs, key_block_size=SMALL)
        yield BenchCase(
            *small, [(*qkv, mask)], work, [*dense, block_sparse], setting, realized, window=rows
        )


def paged_block_sparse_attention(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields a case per sparsity and page size, and dense attention over pages.

    Prompts are packed, their keys are in shuffled pages. The peer ``block_sparse`` reads the same
    blocks of contiguous keys. Those in FP8 hold the same numbers.
    """
    (q, k, v), cap = shape.qkv(), options.softcap
    if options.fp8:
        k, v = (x.to(FP8).to(x.dtype) for x in (k, v))
    qkv = q, k, v
    exact, plain = (
        partial(form.block_sparse_attention, softcap=cap) for form in (reference, eager)
    )
    all_blocks = (*qkv, _mask(shape, 0, 1))
    dense = _dense(shape, qkv, options, plain, all_blocks)
    lengths = torch.full((shape.batch,), shape.length, dtype=torch.int32, device=shape.device)
    caches = {page_size: random_pages(k, v, lengths, page_size)[0] for page_size in PAGE_SIZES}
    if options.fp8:
        caches = {
            page_size: cache._replace(k=cache.k.to(FP8), v=cache.v.to(FP8))
            for page_size, cache in caches.items()
        }
    pages = "FP8 pages" if options.fp8 else "pages"
    for sparsity in options.sparsities:
        mask = _mask(shape, sparsity, shape.q_heads)
        setting = peers.capped_setting(f"{sparsity:.0%} sparse", cap)
        work, realized = _work(shape, mask, False)
        compared = [*dense, _block_sparse_peer(shape, qkv, mask, options, setting)]
        for page_size, cache in caches.items():
            forms = Forms(_call_on_pages(shape, cache, mask, cap), exact, plain)
            name = f"{setting}, {pages} of {page_size}"
            yield prefill_case(*forms, [(*qkv, mask)], work, compared, name, realized)
    forms = Forms(_call_on_pages(shape, caches[PAGE_SIZES[-1]], None, cap), exact, plain)
    name = peers.capped_setting(f"all blocks, {pages} of {PAGE_SIZES[-1]}", cap)
    yield prefill_case(*forms, [all_blocks], peers.dense_work(shape, False), dense, name)


def _call_on_pages(
    shape: Shape, cache: PagedKeys, mask: Tensor | None, softcap: float | None
) -> Function:
    """Returns the operation for layers of contiguous keys, which the reference reads; it reads
    those in ``cache``.
    """
    from msattn.kernels.paged import block_sparse_attention as op

    cu_queries = (
        torch.arange(shape.batch + 1, dtype=torch.int32, device=shape.device) * shape.length
    )
    if mask is not None:
        past_the_end = -(-cache.table.shape[1] * cache.k.shape[1] // BLOCK) - mask.shape[3]
        mask = torch.nn.functional.pad(mask, (0, past_the_end)).expand(shape.batch, -1, -1, -1)

    def call(q: Tensor, *contiguous: Tensor) -> tuple[Tensor, Tensor]:
        # a view, as the queries of a layer are transposed ones
        packed = q.transpose(1, 2).flatten(0, 1)
        out, lse = op.paged_block_sparse_attention(
            packed, cache, cu_queries, mask, max_queries=shape.length, softcap=softcap
        )
        return out.unflatten(0, (shape.batch, -1)).transpose(1, 2), lse.unflatten(
            0, (shape.batch, -1)
        ).transpose(1, 2)

    return call


def multiscale_attention(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields a case per sparsity with random zooms, equally many blocks at 2, 4 and 8.

    The peer ``block_sparse`` is block-sparse attention that reads as many tokens.
    """
    qkv, cap = shape.qkv(), options.softcap
    forms = forms_of("multiscale_attention", softcap=cap)
    dense = _dense(shape, qkv, options, forms.eager, (*qkv, _mask(shape, 0, 1).byte()), terms=2)
    for sparsity in options.sparsities:
        zoom, setting = _zoom(shape, sparsity), peers.capped_setting(f"{sparsity:.0%} sparse", cap)
        work, realized = _work(shape, zoom, options.backward)
        block_sparse = _block_sparse_peer(
            shape, qkv, _mask(shape, sparsity, shape.q_heads), options, setting
        )
        yield prefill_case(*forms, [(*qkv, zoom)], work, [*dense, block_sparse], setting, realized)


def _block_sparse_peer(
    shape: Shape, qkv: Layer, mask: Tensor, options: Options, setting: str
) -> Peer:
    from msattn.kernels.block_sparse_attention import block_sparse_attention as op

    call = partial(op, softcap=options.softcap)
    return Peer(
        "block_sparse", lambda: call, [(*qkv, mask)], *_work(shape, mask, options.backward), setting
    )


def conv_attention(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields a case per convolution kernel size."""
    for c_q, c_k in options.kernels:
        weight = conv_weight(shape, c_q, c_k)
        yield _weighted(
            shape, options, weight, 2 * c_q * c_k, "conv_attention", f"{c_q} x {c_k}", c_q - 1
        )


def head_mix_attention(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields one case, in which the scores of all query heads are mixed."""
    noise = torch.randn(
        (shape.q_heads, shape.q_heads), generator=shape.generator(), device=shape.device
    )
    weight = torch.eye(shape.q_heads, device=shape.device) + 0.1 * noise
    yield _weighted(shape, options, weight.to(shape.dtype), 2 * shape.q_heads, "head_mix_attention")


def conv_weight(shape: Shape, c_q: int, c_k: int) -> Tensor:
    """Draws convolution weights ``[Hq, c_q, c_k]`` close to the identity."""
    weight = 0.1 * torch.randn(
        (shape.q_heads, c_q, c_k), generator=shape.generator(), device=shape.device
    )
    weight[:, c_q - 1, (c_k - 1) // 2] += 1
    return weight.to(shape.dtype)


def _weighted(
    shape: Shape,
    options: Options,
    weight: Tensor,
    flops_per_score: int,
    name: str,
    setting: str = "",
    context: int = 0,
) -> BenchCase:
    """Returns a case of an operation with a weight that mixes scores.

    For each score it takes ``flops_per_score`` more FLOPs than dense attention, three times as many
    in the backward pass, which recomputes the mixing and has two more of the same size.
    """
    layers, forms = [(*shape.qkv(), weight)], forms_of(name)
    dense = peers.dense_work(shape, options.backward)
    work = Work(
        dense.flops + flops_per_score * (3 if options.backward else 1) * peers.causal_pairs(shape),
        dense.bytes,
    )
    compared = _dense(shape, layers[0][:3], options)
    compared.append(peers.eager(forms.eager, layers, work, 2 * _scores(shape), options.backward))
    return prefill_case(*forms, layers, work, compared, setting, context=context)


def _row_inputs(layer: Layer, begin: int, end: int, key_block_size: int = BLOCK) -> Layer:
    """Returns the inputs of the query rows [begin, end).

    They include the keys up to the last row, and the row blocks of a mask or of zooms.
    """
    q, k, v, *others = layer
    last, last_keys = -(-end // BLOCK), -(-end // key_block_size)
    others = [x[..., begin // BLOCK : last, :last_keys] if x.ndim == 4 else x for x in others]
    return q[:, :, begin:end], k[:, :, :end], v[:, :, :end], *others


prefill_case = partial(BenchCase, window=_row_inputs)


def _dense(
    shape: Shape,
    qkv: Layer,
    options: Options,
    plain: Function | None = None,
    layer: Layer = (),
    terms: int = 1,
) -> list[Peer]:
    """Returns the dense peers and ``plain``, eager code that computes all scores of ``layer``,
    ``terms`` numbers for each.
    """
    work = peers.dense_work(shape, options.backward)
    dense = peers.dense([qkv], work, causal=True, softcap=options.softcap)
    if plain is not None:
        dense.append(peers.eager(plain, [layer], work, terms * _scores(shape), options.backward))
    return dense


def _mask(shape: Shape, sparsity: float, heads: int, key_block_size: int = BLOCK) -> Tensor:
    """Draws a mask ``bool [1, heads, T, T]``, or ``[1, heads, T, N / key_block_size]``; the
    diagonal is always read.
    """
    cols = -(-shape.length // key_block_size)
    mask = random_block_mask(1, heads, shape.blocks, cols, 1 - sparsity, shape.device, shape.seed)
    first = torch.arange(0, shape.length, BLOCK, device=shape.device)[:, None]
    keys = torch.arange(0, shape.length, key_block_size, device=shape.device)
    return mask | ((keys >= first) & (keys < first + BLOCK))


def _zoom(shape: Shape, sparsity: float) -> Tensor:
    """Draws zooms ``uint8 [1, Hq, T, T]`` that skip ``sparsity`` of the tokens.

    The diagonal is always read.
    """
    # Share of blocks at each of the zooms 2, 4 and 8: at most that at zoom 1, and such that all
    # shares sum to at most 1.
    share = min((1 - sparsity) / 1.875, sparsity / 2.125)
    whole = 1 - sparsity - 0.875 * share
    edges = torch.tensor(
        [whole, whole + share, whole + 2 * share, whole + 3 * share], device=shape.device
    )
    drawn = torch.rand(
        (1, shape.q_heads, shape.blocks, shape.blocks),
        generator=shape.generator(),
        device=shape.device,
    )
    levels = torch.tensor([1, 2, 4, 8, 0], dtype=torch.uint8, device=shape.device)
    zoom = levels[torch.bucketize(drawn, edges, right=True)]
    zoom.diagonal(dim1=2, dim2=3).fill_(1)
    return zoom


def _scores(shape: Shape) -> int:
    return shape.batch * shape.q_heads * shape.length**2


def _work(
    shape: Shape, selection: Tensor, backward: bool, key_block_size: int = BLOCK
) -> tuple[Work, float]:
    """Returns the work of attention with a mask or zooms, and the share of the pairs that is not
    read.

    They are ``[1, heads, T, T]``, a mask may have other blocks of keys. The mean of several keys
    has one score.
    """
    rows, keys = (
        torch.arange(0, shape.length + size, size).clamp(max=shape.length)
        for size in (BLOCK, key_block_size)
    )
    ahead = (rows[:, None] - keys).clamp(min=0).to(selection.device, torch.float64)
    visible = (ahead * (ahead + 1) / 2).diff(dim=0).diff(dim=1).neg()  # pairs of a block
    below = visible.tril(-1)
    zooms = (1,) if selection.dtype == torch.bool else (1, 2, 4, 8)
    read = sum(
        float(((selection == z).sum((0, 1)) * (visible - below + below / z)).sum()) for z in zooms
    )
    pairs = read * shape.batch * shape.q_heads / selection.shape[1]
    return peers.attention_work(shape, pairs, backward), 1 - pairs / peers.causal_pairs(shape)
