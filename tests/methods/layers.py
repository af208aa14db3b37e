"""Inputs of a layer with random queries and keys."""

import torch
from torch import Tensor

from msattn.kernels import testing
from msattn.kernels.common.block_bits import unpack_blocks
from msattn.trainer.config import BlockSizes
from msattn.trainer.methods.blocks import AlwaysRead, RowCandidates, candidate_blocks
from msattn.trainer.methods.selection import Selection
from msattn.trainer.models.layer_attention import Angles, LayerInputs, Scoring

BLOCK = 16
SHAPES = [  # queries, keys, left padding
    (64, 64, None),
    (70, 70, None),
    (1, 1, None),
    (7, 7, None),
    (40, 75, None),
    (75, 40, None),
    (1, 33, None),
    (70, 70, [0, 5, 69]),
    (64, 64, [16, 0, 40]),
    (30, 61, [0, 40, 50]),
]


def layer_inputs(
    num_queries: int = 70,
    num_keys: int | None = None,
    padding: list[int] | None = None,
    layer: int = 1,
    seed: int = 0,
) -> LayerInputs:
    """Random inputs of one layer, four query heads to two key/value heads, without RoPE."""
    batch = 1 if padding is None else len(padding)
    q, k, v = testing.random_qkv(batch, 4, 2, num_queries, num_keys, 16, seed=seed)
    q = q * 3  # sharper attention
    ones = torch.ones(1, num_queries, 16)
    return LayerInputs(
        layer=layer, q=q, k=k, v=v, q_nope=q, k_nope=k[:, :, k.shape[2] - num_queries :],
        angles=Angles(ones, 0 * ones), scoring=Scoring(0.25), kv_start=testing.starts(padding),
    )  # fmt: skip


def row_candidates(
    num_queries: int, num_keys: int, padding: list[int] | None, *, sink_blocks: int = 0
) -> RowCandidates:
    """Returns the visible blocks, of which diagonal and ``sink_blocks`` first ones must be read."""
    x, sizes = layer_inputs(num_queries, num_keys, padding), BlockSizes(BLOCK, BLOCK)
    return candidate_blocks(x, sizes, AlwaysRead(sink_blocks, 0))


def geometry(num_queries: int, num_keys: int, padding: list[int] | None) -> tuple[Tensor, Tensor]:
    """Returns the visible blocks and the diagonal ones among them."""
    found = row_candidates(num_queries, num_keys, padding)
    return found.visible, found.always


def blocks_read(selection: Selection, x: LayerInputs) -> Tensor:
    """Returns the block mask of a selection that may return its bits."""
    return unpack_blocks(selection.blocks(x), -(-x.num_keys // selection.sizes.keys))
