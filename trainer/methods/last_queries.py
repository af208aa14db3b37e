"""Exact attention of the last queries of a prompt, which often contain the question."""

from collections.abc import Iterator

import torch
from torch import Tensor

from msattn.kernels.common import block_masses
from msattn.trainer.methods.blocks import aligned_blocks
from msattn.trainer.models.layer_attention import LayerInputs


def pattern_mass(x: LayerInputs, last_queries: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Returns the attention mass of the last queries by key position and by distance, fp32
    ``[B, Hq, P]`` each.

    Positions count from the start of each sequence; P is the number of keys, rounded up to whole
    blocks.
    """
    positions = last_positions(x, min(last_queries, x.num_queries))
    keys = torch.arange(-(-x.num_keys // block_size) * block_size, device=x.q.device)
    # [B | 1, 1, n, P]: of each key, and the key at each distance
    distance = (positions[..., None] - keys)[:, None]
    verticals, slashes = [], []
    for mass in last_attention(x, last_queries, block_size):
        verticals.append(mass.sum(2))
        slashes.append(
            (mass.gather(3, distance.clamp(min=0).expand_as(mass)) * (distance >= 0)).sum(2)
        )
    return torch.cat(verticals, dim=1), torch.cat(slashes, dim=1)


def last_masses(x: LayerInputs, last_queries: int, block_size: int) -> Tensor:
    """Returns the attention of the last queries to each block of keys, fp32 ``[B, Hq, n, Tc]``; 0
    for padded queries.
    """
    if x.q.is_cuda:
        with torch.cuda.device_of(x.q):
            return block_masses.launch(
                x.q[:, :, -last_queries:], x.k, x.kv_start, block_size, x.scale, x.scoring.softcap
            )
    seen = last_attention(x, last_queries, block_size)
    return torch.cat([mass.unflatten(-1, (-1, block_size)).sum(-1) for mass in seen], dim=1)


def last_attention(x: LayerInputs, last_queries: int, block_size: int) -> Iterator[Tensor]:
    """Yields the attention of the last queries, for the heads of one key/value head at a time,
    which bounds the memory.

    It is fp32 ``[B, Hq / Hkv, n, P]``, 0 for padded queries. Positions of keys count from the start
    of each sequence; P is the number of keys, rounded up to whole blocks.
    """
    keys = aligned_blocks(x.k, x.kv_start, block_size).flatten(2, 3)
    positions = last_positions(x, min(last_queries, x.num_queries))
    # leading keys that all queries see
    visible = 0 if x.kv_start is not None else max(0, x.num_keys - positions.shape[1])
    # [B | 1, n, P - visible]
    hidden = torch.arange(visible, keys.shape[2], device=x.q.device) > positions[..., None]
    for group, own_keys in zip(
        x.q[:, :, -last_queries:].chunk(keys.shape[1], dim=1), keys.unbind(1), strict=True
    ):
        # Scores that are scaled before they are rounded, without a copy of them in fp32.
        logits = torch.baddbmm(
            group.new_empty(1, 1, 1), group.flatten(1, 2), own_keys.mT, beta=0, alpha=x.scale
        )
        logits = x.capped(logits).unflatten(1, group.shape[1:3])
        logits[..., visible:].masked_fill_(hidden[:, None], -torch.inf)
        mass = logits.softmax(-1, dtype=torch.float32)
        # padded queries see nothing
        yield mass if visible else mass.masked_fill_(hidden[:, None], 0)


def last_positions(x: LayerInputs, n: int) -> Tensor:
    """Returns the positions of the last ``n`` queries in their sequences, negative in padding:
    int64 ``[B | 1, n]``.
    """
    positions = torch.arange(x.num_keys - n, x.num_keys, device=x.q.device)[None]
    return positions if x.kv_start is None else positions - x.kv_start[:, None].long()
