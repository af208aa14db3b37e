"""Benchmark cases of block selection: pooling, gate scores, best blocks."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from msattn.kernels.bench import eager, peers
from msattn.kernels.bench.cases import BenchCase, Forms, Function, Options, forms_of
from msattn.kernels.bench.rows import BLOCK, SMALL, Shape, Work
from msattn.kernels.reference.best_blocks import block_softmax as block_softmax_reference
from msattn.kernels.reference.pool_blocks import pool_blocks as pool_blocks_reference


def gate_scores(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields a case with ``BLOCK`` keys in a block and one with ``SMALL``: a gate for each query
    head, by default settings.
    """
    for keys, setting in ((BLOCK, "gate"), (SMALL, f"gate, {SMALL} keys")):
        map_bytes = 4 * shape.batch * shape.q_heads * shape.blocks * -(-shape.length // keys)
        yield _gate_case(shape, "gate_scores", keys, setting, map_bytes)


def gate_blocks(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields cases as :func:`gate_scores`, in which a threshold selects about a tenth of the
    blocks, and at least a twentieth.
    """
    rows = torch.arange(shape.blocks, dtype=torch.int32, device=shape.device)[:, None]
    for keys, setting in ((BLOCK, "gate"), (SMALL, f"gate, {SMALL} keys")):
        seen = ((rows + 1) * BLOCK).clamp(max=shape.length).add(keys - 1) // keys
        choice = {
            "counts": (seen // 20)[None, None].int(),
            "local": ((rows - 1).clamp(min=0) * (BLOCK // keys))[None, None],
            "sink_blocks": BLOCK // keys,
            "threshold": 2.3,
            "exponent": -1.0,
        }
        bits = shape.batch * shape.q_heads * shape.blocks * -(-shape.length // keys)
        yield _gate_case(shape, "gate_blocks", keys, setting, bits // 8, **choice)


def _gate_case(
    shape: Shape,
    name: str,
    keys: int,
    setting: str,
    result_bytes: int,
    **choice: Any,
) -> BenchCase:
    """Returns the case of an operation on a gate over blocks of so many ``keys``."""
    from msattn.kernels import pool_blocks as pooling

    (q,), (k,) = (
        shape.draw(shape.q_heads, shape.length),
        shape.draw(shape.kv_heads, shape.length, cached=True),
    )
    heads, size, blocks = shape.q_heads, shape.head_size, shape.blocks
    generator = shape.generator()
    query_weight, key_weight = (
        torch.randn((heads, size, pools * size), generator=generator, device=shape.device)
        * size**-0.5
        for pools in (1, 2)
    )
    gate: dict[str, Any] = {
        "inv_freq": 10000.0 ** -(torch.arange(0, size, 2, device=shape.device) / size),
        "q_pool": ["avg"],
        "num_keys": shape.length,
        "block_size": BLOCK,
        "mean_weight": 0.5 * size**-0.5,
    }
    layers: list[tuple[Tensor, ...]] = [(q, k, query_weight, key_weight)]
    pools = pooling.pool_blocks, pool_blocks_reference, pool_blocks_reference
    cols, projected = -(-shape.length // keys), shape.batch * heads
    moved = 2 * (q.numel() + k.numel()) * shape.dtype.itemsize + result_bytes
    work = Work(2 * size * projected * (size * (blocks + 2 * cols) + blocks * cols), moved)
    with_keys = partial(_with_pooled_keys, key_block_size=keys)
    forms = Forms(*map(with_keys, forms_of(name, key_block_size=keys, **gate, **choice), pools))
    compared = [
        peers.eager(forms.eager, layers, work, 3 * projected * blocks * cols, setting=setting)
    ]
    return BenchCase(*forms, layers, work, compared, setting)


def _with_pooled_keys(form: Function, pool: Function, *, key_block_size: int) -> Function:
    """Returns ``form`` of queries, keys and weights, both of which stand for rotated ones, too."""

    def pooled(q: Tensor, k: Tensor, *weights: Tensor) -> Any:
        return form(
            q, pool(k, ["max", "min"], block_size=key_block_size, rotated=k), *weights, q_rope=q
        )

    return pooled


def pool_blocks(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields two cases: average pooling of queries, max and min pooling of keys."""
    for heads, poolings in ((shape.q_heads, ["avg"]), (shape.kv_heads, ["max", "min"])):
        (x,) = shape.draw(heads, shape.length)
        forms = forms_of("pool_blocks", poolings=poolings)
        pooled = shape.batch * heads * shape.blocks * len(poolings) * shape.head_size
        work = Work(x.numel() * len(poolings), x.numel() * shape.dtype.itemsize + 4 * pooled)
        setting = f"{' and '.join(poolings)}, {heads} heads"
        compared = [peers.eager(forms.eager, [(x,)], work, x.numel() // 2, setting=setting)]
        yield BenchCase(*forms, [(x,)], work, compared, setting)


def block_softmax(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields one case; the backward pass does not skip what is not visible."""
    logits, visible = _logits(shape)
    seen = visible.sum().item() * shape.batch * shape.q_heads
    work = (
        Work(4 * logits.numel(), 12 * logits.numel())
        if options.backward
        else Work(4 * seen, 4 * seen + 4 * logits.numel())
    )
    forms, layers = forms_of("block_softmax"), [(logits, visible)]
    compared = [peers.eager(forms.eager, layers, work, 2 * logits.numel(), options.backward)]
    yield BenchCase(*forms, layers, work, compared)


def best_blocks(shape: Shape, options: Options) -> Iterator[BenchCase]:
    """Yields a case per sparsity."""
    logits, visible = _logits(shape)
    scores = block_softmax_reference(logits, visible)
    seen = visible.sum().item() * shape.batch * shape.q_heads
    diagonal = torch.eye(shape.blocks, dtype=torch.bool, device=shape.device)[None, None]
    for sparsity in sorted(options.sparsities, reverse=True):
        counts = (visible.sum(-1, keepdim=True) * (1 - sparsity)).round().int()
        layers = [(scores, counts, visible, diagonal)]
        work = Work(seen, 4 * seen + logits.numel())
        setting = f"best {1 - sparsity:.0%}"
        compared = [
            peers.eager(eager.best_blocks, layers, work, 2 * logits.numel(), setting=setting)
        ]
        yield BenchCase(*forms_of("best_blocks"), layers, work, compared, setting, sparsity)


def _logits(shape: Shape) -> tuple[Tensor, Tensor]:
    """Returns logits of causal blocks, and which blocks are visible."""
    size = shape.batch, shape.q_heads, shape.blocks, shape.blocks
    logits = torch.randn(size, generator=shape.generator(), device=shape.device) * 2
    return logits, torch.ones((1, 1, *size[2:]), dtype=torch.bool, device=shape.device).tril_()
