"""Cases of attention of prompts."""

from collections.abc import Sequence

import torch

import msattn
from msattn.kernels import maxpool_attention
from msattn.kernels.block_sparse_attention import backward as block_sparse_backward
from msattn.kernels.block_sparse_attention import forward as block_sparse_forward
from msattn.kernels.common.block_bits import pack_blocks
from msattn.kernels.multi_token.conv_attention import operation as conv_attention
from msattn.kernels.multi_token.head_mix_attention import operation as head_mix_attention
from msattn.kernels.multiscale_attention import backward as multiscale_backward
from msattn.kernels.multiscale_attention import forward as multiscale_forward
from msattn.kernels.testing import random_block_mask, random_qkv, starts
from tests.kernels.cases.records import (
    CAPS,
    HALF,
    INT,
    SLOW,
    Arguments,
    Cases,
    Refused,
    attention,
    block_size_for,
    choose,
    compiles_backward,
    token,
    zeros,
)

BLOCK_MAPS: Refused = [
    ({"q": zeros(1, 4, 20, 16)}, "row blocks must be 1"),
    ({"kv_start": starts([41])}, "kv_start=.41."),
]


WEIGHTED: Refused = [
    ({"weight": zeros(4, 4, 1, 1)}, r"weight.shape=\(4, 4, 1, 1\)"),
    ({"kv_start": starts([41])}, r"kv_start=\[41\]"),
]


def compile_maxpool_attention(dtype: torch.dtype, head_size: int, sm: int) -> None:
    q, k, v = random_qkv(1, 4, 2, 200, 200, head_size, dtype)
    block_size = block_size_for(head_size)
    kv_start = starts([8]) if block_size == 128 else None
    mass = choose(["mass", "mean_mass"], head_size, sm)
    of_keys = (block_size, 16)  # equal, and fewer keys than queries
    for key_block_size, softcap, sinks, pool in zip(
        of_keys, CAPS, (None, torch.zeros(4, dtype=dtype)), ("max", mass), strict=True
    ):
        maxpool_attention.launch(
            q, k, v, sinks, kv_start, block_size, key_block_size, True, 0.1, softcap, pool
        )


def block_sparse_attention_arguments(device: str) -> Arguments:
    mask = random_block_mask(1, 2, 2, 3, 0.5, device)
    mask[:, 0, :, 0] = False
    return attention(device, block_mask=mask, block_size=32, key_block_size=16, softcap=5.0)


def compile_block_sparse_attention(dtype: torch.dtype, head_size: int, sm: int) -> None:
    block_size = block_size_for(head_size)  # then with other blocks of keys, several in a tile
    key_blocks = (block_size,), (32 if block_size == 16 else 16,)
    _with_block_map(
        block_sparse_forward, block_sparse_backward, torch.bool, dtype, head_size, sm, key_blocks
    )


def multiscale_attention_arguments(device: str) -> Arguments:
    zoom = torch.tensor([[[0, 1], [0, 4]], [[4, 1], [8, 2]]], dtype=torch.uint8, device=device)
    return attention(device, zoom=zoom[None], block_size=32, softcap=5.0)


def compile_multiscale_attention(dtype: torch.dtype, head_size: int, sm: int) -> None:
    _with_block_map(
        multiscale_forward, multiscale_backward, torch.uint8, dtype, head_size, sm, ((), ())
    )


def _with_block_map(
    forward,
    backward,
    of_map: torch.dtype,
    dtype: torch.dtype,
    head_size: int,
    sm: int,
    key_blocks: Sequence[tuple[int, ...]],
) -> None:
    q, k, v = random_qkv(1, 4, 2, 200, 200, head_size, dtype)
    lse, block_size = torch.zeros(1, 4, 200), block_size_for(head_size)
    for softcap, key_block in zip(CAPS, key_blocks, strict=True):
        row_blocks, col_blocks = (
            -(-200 // size) for size in (block_size, *(key_block or (block_size,)))
        )
        blocks = torch.ones(1, 2, row_blocks, col_blocks, dtype=of_map)
        if of_map == torch.bool and softcap is not None:
            blocks = pack_blocks(blocks)
        options = (
            starts([8]) if block_size == 128 else None,
            block_size,
            *key_block,
            block_size != 16,
            0.1,
        )
        forward.launch(q, k, v, blocks, *options, softcap)
        if compiles_backward(head_size, sm):
            backward.launch(q, lse, q, k, v, blocks, q, lse, *options, softcap)


def compile_conv_attention(dtype: torch.dtype, head_size: int, sm: int) -> None:
    fewer = (3, 3), torch.tensor([8], dtype=torch.int32), "query"
    usual, one = ((6, 11), None, "query"), ((1, 3), None, "key")
    for taps, kv_start, mask in {128: (usual,), 256: (fewer,)}.get(head_size, (fewer, one)):
        _with_gradient(
            conv_attention,
            torch.ones(4, *taps),
            dtype,
            head_size,
            sm,
            kv_start,
            kv_start is None,
            mask,
        )


def compile_head_mix_attention(dtype: torch.dtype, head_size: int, sm: int) -> None:
    kv_start = torch.tensor([8], dtype=torch.int32) if head_size == 256 else None
    _with_gradient(
        head_mix_attention, torch.ones(4, 4), dtype, head_size, sm, kv_start, head_size != 64
    )


def _with_gradient(
    op,
    weight: torch.Tensor,
    dtype: torch.dtype,
    head_size: int,
    sm: int,
    kv_start,
    causal: bool,
    *options,
) -> None:
    inputs = [*random_qkv(1, 4, 2, 200, 200, head_size, dtype), weight.to(dtype)]
    out, lse = op.launch(*inputs, kv_start, causal, 0.1, *options)
    if compiles_backward(head_size, sm):
        op.launch_backward(
            torch.zeros_like(out), *inputs, out, lse, kv_start, causal, 0.1, *options
        )


CASES = {
    "maxpool_attention": Cases(
        msattn.maxpool_attention,
        lambda device: attention(
            device, block_size=32, pool="mass", softcap=5.0, sinks=torch.randn(4, device=device)
        ),
        compile_maxpool_attention,
        [
            ({"key_block_size": 48}, "key_block_size=48: expected one of 16, 32, 64, 128"),
            ({"pool": "sum"}, "pool='sum': expected one of max, mass, mean_mass"),
            ({"sinks": zeros(3)}, r"sinks is torch.float32 \(3,\)"),
            ({"sinks": zeros(4, dtype=INT)}, "sinks is torch.int32"),
            ({"q": zeros(1, 3, 40, 16)}, "q has 3 heads"),
            ({"q": zeros(1, 4, 40, 24)}, "head size"),
            ({name: zeros(1, 2, 40, 60) for name in "qkv"}, "head size 60"),
            ({"q": zeros(1, 4, 40, 16, dtype=torch.float64)}, "dtype"),
            ({"q": zeros(4, 40, 16)}, "q.shape"),
            ({"q": zeros(2, 4, 40, 16)}, "batch"),
            ({"kv_start": starts([41])}, "kv_start"),
        ],
        unread=token(1),
        contiguous=("q", "k", "v"),
    ),
    "block_sparse_attention": Cases(
        msattn.block_sparse_attention,
        block_sparse_attention_arguments,
        compile_block_sparse_attention,
        [
            *BLOCK_MAPS,
            ({"block_mask": zeros(1, 3, 2, 2, dtype=torch.bool)}, "heads must be 4 or 2 or 1"),
            ({"block_mask": zeros(1, 2, 2, 2)}, "block_mask is torch.float32"),
            ({"block_mask": zeros(1, 2, 2, 2, dtype=INT)}, "column blocks must be 1"),
        ],
        differentiable=True,
        unread=token(5),
        contiguous=("q", "k", "v"),
        slow=SLOW,
    ),
    "multiscale_attention": Cases(
        msattn.multiscale_attention,
        multiscale_attention_arguments,
        compile_multiscale_attention,
        [
            *BLOCK_MAPS,
            ({"zoom": zeros(1, 3, 2, 2, dtype=torch.uint8)}, "heads must be 4 or 2 or 1"),
            ({"zoom": zeros(1, 2, 2, 2)}, "zoom is torch.float32"),
            ({"zoom": zeros(1, 2, 2, 2, dtype=torch.bool)}, "zoom is torch.bool"),
            (
                {"zoom": torch.full((1, 2, 2, 2), 3, dtype=torch.uint8)},
                "zoom holds 3: expected 0 .skip., 1, 2, 4 or 8",
            ),
        ],
        differentiable=True,
        read=token(38),
        unread=token(5),
        contiguous=("q", "k", "v"),
        slow=SLOW,
    ),
    "conv_attention": Cases(
        msattn.conv_attention,
        lambda device: attention(device, weight=torch.randn(4, 2, 3, device=device)),
        compile_conv_attention,
        [
            *WEIGHTED,
            ({"weight": zeros(2, 3, 3)}, r"weight.shape=\(2, 3, 3\)"),
            ({"weight": zeros(4, 33, 3)}, r"weight.shape=\(4, 33, 3\)"),
            ({"weight": zeros(4, 3)}, r"weight.shape=\(4, 3\)"),
            ({"weight": zeros(4, 3, 3, dtype=HALF)}, "weight.dtype=torch.float16"),
            ({"mask": "keys"}, "mask='keys'"),
        ],
        differentiable=True,
        unread=token(1),
        contiguous=("q", "k", "v"),
        slow=SLOW,
    ),
    "head_mix_attention": Cases(
        msattn.head_mix_attention,
        lambda device: attention(device, weight=torch.randn(4, 4, device=device)),
        compile_head_mix_attention,
        [
            *WEIGHTED,
            ({"weight": zeros(2, 2)}, r"weight.shape=\(2, 2\)"),
            ({"weight": zeros(4, 4, dtype=HALF)}, "weight.dtype=torch.float16"),
        ],
        differentiable=True,
        unread=token(1),
        contiguous=("q", "k", "v"),
        slow=SLOW,
    ),
}
