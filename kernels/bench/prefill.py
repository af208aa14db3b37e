"""Operations on whole prompts: causal, as many queries as keys, beside dense attention.

Masks are random, of each query head on its own, with the diagonal: the kernels' time hangs on how many blocks are read, and a
gate's masks are no easier than that. Work counts the scores that are read and seen, by the operation's definition; what a
kernel does beyond (masked halves of diagonal tiles, a convolution made of products) is its own cost.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.bench import eager, peers
from msattn.kernels.bench.cases import Case, Function, Layer, Options, Peer
from msattn.kernels.bench.rows import Shape, Work
from msattn.kernels.testing import random_block_mask

BLOCK = eager.BLOCK


def maxpool_attention(shape: Shape, options: Options) -> Iterator[Case]:
    """The dense forward pass with its block map."""
    from msattn.kernels import maxpool_attention as op

    layers = [shape.qkv()]
    work = peers.dense_work(shape, False)
    blocks = -(-shape.length // BLOCK)
    block_map = 4 * shape.batch * shape.q_heads * blocks**2
    yield Case(
        op.maxpool_attention,
        reference.maxpool_attention,
        eager.maxpool_attention,
        layers,
        Work(work.flops, work.bytes + block_map),
        [
            *peers.dense(layers, work, causal=True),
            peers.flex(layers, work, torch.ones((1, 1, blocks, blocks), dtype=torch.bool, device=shape.device), coarse=True),
            peers.eager(eager.maxpool_attention, layers, work, _scores(shape)),
        ],
        window=_rows,
    )


def block_sparse_attention(shape: Shape, options: Options) -> Iterator[Case]:
    """Random masks of each query head at each sparsity, and at the first one also one mask a query group."""
    from msattn.kernels.block_sparse_attention import forward as op

    qkv = shape.qkv()
    dense = _dense(shape, qkv, options)
    settings = [(sparsity, shape.q_heads) for sparsity in options.sparsities]
    if shape.kv_heads < shape.q_heads:
        settings.append((options.sparsities[0], shape.kv_heads))
    full = peers.dense_work(shape, options.backward)
    for number, (sparsity, heads) in enumerate(settings):
        mask = _mask(shape, sparsity, heads)
        pairs = _pairs_read(mask, shape)
        work, realised = peers.attention_work(shape, pairs, options.backward), 1 - pairs / _pairs(shape)
        setting = f"{sparsity:.0%} sparse" + (", group masks" if heads < shape.q_heads else "")
        layers = [(*qkv, mask)]
        beside = [peers.flex(layers, work, mask, coarse=options.backward, setting=setting, sparsity=realised)]
        if number == 0:  # every token's score is made, whatever the mask
            scores = _scores(shape)
            dense.append(peers.eager(eager.block_sparse_attention, layers, full, scores, options.backward))
        yield Case(
            op.block_sparse_attention,
            reference.block_sparse_attention,
            eager.block_sparse_attention,
            layers,
            work,
            [*dense, *beside],
            setting,
            realised,
            window=_rows,
        )


def multiscale_attention(shape: Shape, options: Options) -> Iterator[Case]:
    """Random zooms, as many blocks at each of 2, 4 and 8; beside it block-sparse attention that reads as many tokens."""
    from msattn.kernels.block_sparse_attention import forward as plain
    from msattn.kernels.multiscale_attention import forward as op

    qkv = shape.qkv()
    dense = _dense(shape, qkv, options)
    full = peers.dense_work(shape, options.backward)
    for number, sparsity in enumerate(options.sparsities):
        zoom, mask = _zoom(shape, sparsity), _mask(shape, sparsity, shape.q_heads)
        pairs = _pairs_read(zoom, shape)
        work, realised = peers.attention_work(shape, pairs, options.backward), 1 - pairs / _pairs(shape)
        masked = _pairs_read(mask, shape)
        setting = f"{sparsity:.0%} sparse"
        layers = [(*qkv, zoom)]
        beside = Peer(
            "block_sparse",
            lambda: plain.block_sparse_attention,
            [(*qkv, mask)],
            peers.attention_work(shape, masked, options.backward),
            1 - masked / _pairs(shape),
            setting,
        )
        if number == 0:
            scores = 2 * _scores(shape)  # a mask of zooms beside them
            dense.append(peers.eager(eager.multiscale_attention, layers, full, scores, options.backward))
        yield Case(
            op.multiscale_attention,
            reference.multiscale_attention,
            eager.multiscale_attention,
            layers,
            work,
            [*dense, beside],
            setting,
            realised,
            window=_rows,
        )


def conv_attention(shape: Shape, options: Options) -> Iterator[Case]:
    """A convolution of queries and keys over the scores; the backward pass makes them again and has two more of it."""
    from msattn.kernels.conv_attention import operation as op

    for c_q, c_k in options.kernels:
        weight = conv_weight(shape, c_q, c_k)
        a_score = 2 * c_q * c_k * (3 if options.backward else 1)
        yield _weighted(
            shape, options, weight, a_score, op.conv_attention, reference.conv_attention, eager.conv_attention,
            setting=f"{c_q} x {c_k}", context=c_q - 1,
        )  # fmt: skip


def head_mix_attention(shape: Shape, options: Options) -> Iterator[Case]:
    """A mixture of the scores of all query heads; the backward pass makes them again and has two more of it."""
    from msattn.kernels.head_mix_attention import operation as op

    weight = torch.eye(shape.q_heads, device=shape.device) + 0.1 * torch.randn(
        (shape.q_heads, shape.q_heads), generator=_generator(shape), device=shape.device
    )
    a_score = 2 * shape.q_heads * (3 if options.backward else 1)
    yield _weighted(
        shape, options, weight.to(shape.dtype), a_score,
        op.head_mix_attention, reference.head_mix_attention, eager.head_mix_attention,
    )  # fmt: skip


def conv_weight(shape: Shape, c_q: int, c_k: int) -> Tensor:
    """A random convolution ``[Hq, c_q, c_k]`` around plain attention."""
    weight = 0.1 * torch.randn((shape.q_heads, c_q, c_k), generator=_generator(shape), device=shape.device)
    weight[:, c_q - 1, (c_k - 1) // 2] += 1
    return weight.to(shape.dtype)


def _weighted(
    shape: Shape,
    options: Options,
    weight: Tensor,
    a_score: int,
    call: Function,
    of_reference: Function,
    in_eager: Function,
    setting: str = "",
    context: int = 0,
) -> Case:
    """A case with a weight over scores, which takes ``a_score`` operations for each of them beyond dense attention."""
    layers = [(*shape.qkv(), weight)]
    full = peers.dense_work(shape, options.backward)
    work = Work(full.flops + a_score * _pairs(shape), full.bytes)
    beside = [
        *_dense(shape, layers[0][:3], options),
        peers.eager(in_eager, layers, work, 2 * _scores(shape), options.backward),
    ]
    return Case(call, of_reference, in_eager, layers, work, beside, setting, window=_rows, context=context)


def _rows(layer: Layer, begin: int, end: int) -> Layer:
    """What some query rows see: the keys up to the last of them, and their blocks of a selection."""
    q, k, v, *others = layer
    last = -(-end // BLOCK)
    others = [x[..., begin // BLOCK : last, :last] if x.ndim == 4 else x for x in others]
    return q[:, :, begin:end], k[:, :, :end], v[:, :, :end], *others


def _dense(shape: Shape, qkv: tuple[Tensor, ...], options: Options) -> list[Peer]:
    return peers.dense([qkv], peers.dense_work(shape, options.backward), causal=True)


def _generator(shape: Shape) -> torch.Generator:
    return torch.Generator(shape.device).manual_seed(shape.seed)


def _mask(shape: Shape, sparsity: float, heads: int) -> Tensor:
    blocks = -(-shape.length // BLOCK)
    return random_block_mask(1, heads, blocks, blocks, 1 - sparsity, shape.device, shape.seed)


def _zoom(shape: Shape, sparsity: float) -> Tensor:
    """Zooms ``uint8 [1, Hq, T, T]`` that leave out ``sparsity`` of the tokens; the diagonal is read."""
    blocks = -(-shape.length // BLOCK)
    each = min((1 - sparsity) / 1.875, sparsity / 2.125)  # share of blocks at 2, at 4 and at 8: what is read, and what exists
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
    """Scores that are seen, over all sequences and heads."""
    return shape.batch * shape.q_heads * shape.length * (shape.length + 1) / 2


def _pairs_read(selection: Tensor, shape: Shape) -> float:
    """Those that a mask, or zooms ``[1, heads, T, T]``, read; a mean of several keys makes one score."""
    first = torch.arange(selection.shape[3], device=selection.device, dtype=torch.float64) * BLOCK
    tokens = (shape.length - first).clamp(max=BLOCK)
    on_diagonal = torch.diag(tokens * (tokens + 1) / 2)
    below = torch.outer(tokens, tokens).tril(-1)
    zooms = (1,) if selection.dtype == torch.bool else (1, 2, 4, 8)
    read = sum(float(((selection == z).sum((0, 1)) * (below / z + on_diagonal)).sum()) for z in zooms)
    return read * shape.batch * shape.q_heads / selection.shape[1]
