"""The true block maps that gates learn.

Beside the pooled probabilities of ``maxpool_attention`` there is the map of outputs, how much each
block of keys adds to the output of the layer::

    map[r, c] = mean over queries i of row block r
                of || sum over keys j of column block c of P[i, j] W_O v_j ||

with the W_O of each head. A block of much attention whose values are small, or cancel each other,
has a small entry. Computed in PyTorch, since training alone needs it.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from msattn.kernels.reference.common import sequences
from msattn.kernels.types import MaxPoolAttention
from msattn.trainer.config.sizes import BlockSizes
from msattn.trainer.errors import UserError
from msattn.trainer.models.layer_attention import LayerInputs, block_map

OUTPUT = "output"  # target
# numbers in the outputs of the blocks of some queries: the CPU's cache, or few launches
OUTPUTS_AT_ONCE = {"cpu": 2**21, "cuda": 2**26}


def target_map(x: LayerInputs, sizes: BlockSizes, target: str) -> MaxPoolAttention:
    """Returns dense attention of a layer and the block map that ``gate.target`` names."""
    if target != OUTPUT:
        return block_map(x, sizes, target)
    dense = block_map(x, sizes, "mass")
    return dense._replace(pooled=output_map(x, sizes, dense.lse))


@torch.no_grad()
def output_map(x: LayerInputs, sizes: BlockSizes, lse: Tensor) -> Tensor:
    """Returns the block map of outputs, fp32 ``[B, Hq, Tr, Tc]``, of queries with these LSEs
    ``[B, Hq, N]``, which include attention sinks.

    Blocks are counted from the end of the left padding. Raises UserError if the output projection
    has no weight of floating-point numbers for the layer's heads.
    """
    values = _values(x)
    batch, heads, queries, width = x.q.shape
    before = x.k.shape[2] - queries  # cached keys
    tr, tc = -(-queries // sizes.queries), -(-x.k.shape[2] // sizes.keys)
    result = x.q.new_zeros(batch, heads, tr, tc, dtype=torch.float32)
    for part, first, start, _ in sequences(x.q, x.k, x.kv_start, causal=True):
        numbers = result[part, ..., 0, :].numel() * width  # of a query's outputs
        at_once = OUTPUTS_AT_ONCE[x.q.device.type] // (numbers * sizes.queries)
        step = sizes.queries * max(1, at_once)
        for begin in range(first, queries, step):
            end = min(begin + step, queries)
            read = slice(start, before + end)
            probs = _probabilities(x, part, slice(begin, end), read, lse)
            norms = _output_norms(probs, values[part, :, read], sizes.keys)  # [b, Hq, c, n]
            means = _means(norms, sizes.queries)
            r = (begin - first) // sizes.queries
            result[part, :, r : r + means.shape[3], : means.shape[2]] = means.mT
    return result


def _values(x: LayerInputs) -> Tensor:
    """Returns values of each query head ``[B, Hq, M, D]`` whose norms are those of their outputs.

    With the Cholesky factor L of ``W_O W_O^T``, ``|| v W_O || = || v L ||``.
    """
    weight, width = getattr(x.o_proj, "weight", None), x.v.shape[3]
    group = x.q.shape[1] // x.k.shape[1]
    if (
        weight is None
        or not weight.is_floating_point()
        or weight.itemsize == 1  # FP8, whose scales are outside
        or weight.shape[1] % (group * width)
        or len(weight[0, :: group * width][x.kv_heads]) != x.k.shape[1]
    ):
        raise UserError(
            f"gate.target=output: the output projection of layer {x.layer} has no weight of "
            "floating-point numbers for its heads; expected a model that is neither quantized nor "
            "divided"
        )
    by_head = weight.double().mT.unflatten(0, (-1, group, width))[x.kv_heads]  # [Hkv, G, D, hidden]
    gram = by_head @ by_head.mT
    ridge = 1e-9 * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    ridge = ridge.clamp(min=torch.finfo(ridge.dtype).tiny)  # of a head without weights
    factor = torch.linalg.cholesky(gram + ridge * torch.eye(width, device=gram.device))
    return (x.v[:, :, None] @ factor.to(x.v.dtype)).flatten(1, 2)


def _probabilities(x: LayerInputs, part: slice, rows: slice, read: slice, lse: Tensor) -> Tensor:
    """Returns the probabilities of some queries over the keys that the last of them sees, fp32
    ``[b, Hq, n, m]``.
    """
    keys = x.k[part, :, read]
    q = x.q[part, :, rows].unflatten(1, (keys.shape[1], -1))  # [b, Hkv, G, n, D]
    scores = x.capped((q @ keys[:, :, None].mT).float().flatten(1, 2) * x.scale)
    n, m = scores.shape[2:]
    hidden = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(m - n + 1)
    return (scores - lse[part, :, rows, None]).exp_().masked_fill_(hidden, 0)


def _output_norms(probs: Tensor, values: Tensor, size: int) -> Tensor:
    """Returns the norms of the outputs of column blocks of this size, fp32 ``[b, Hq, c, n]``."""
    missing = -values.shape[2] % size
    blocks = pad(values, (0, 0, 0, missing)).unflatten(2, (-1, size))
    probs = pad(probs.to(values.dtype), (0, missing)).unflatten(3, (-1, size))
    return torch.linalg.vector_norm(probs.transpose(2, 3) @ blocks, dim=-1, dtype=torch.float32)


def _means(x: Tensor, size: int) -> Tensor:
    """Returns the means of blocks of the last dimension, of which the last may be smaller."""
    sums, counts = (
        pad(each, (0, -each.shape[-1] % size)).unflatten(-1, (-1, size)).sum(-1)
        for each in (x, torch.ones_like(x[0, 0, 0]))
    )
    return sums / counts
