"""Argument checks of operations on blocks of tokens; see :mod:`.checks`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from msattn.kernels.common.block_bits import num_words
from msattn.kernels.common.checks import check_device
from msattn.kernels.common.choices import POOLINGS

BLOCK_SIZES = (16, 32, 64, 128)


def check_block_size(block_size: int, name: str = "block_size") -> None:
    """Checks that ``block_size``, an argument called ``name``, is a power of two from 16 to 128, a
    tile length.
    """
    if block_size not in BLOCK_SIZES:
        raise ValueError(
            f"{name}={block_size!r}: expected one of {', '.join(map(str, BLOCK_SIZES))}"
        )


def resolve_key_block_size(block_size: int, key_block_size: int | None) -> int:
    """Returns the number of keys in a block, ``block_size`` by default, after a check of both
    sizes.
    """
    check_block_size(block_size)
    if key_block_size is None:
        return block_size
    check_block_size(key_block_size, "key_block_size")
    return key_block_size


def check_block_mask(
    block_mask: Tensor, q: Tensor, k: Tensor, block_size: int, key_block_size: int
) -> None:
    """Checks ``block_mask [B | 1, Hq | Hkv | 1, Tr, Tc]`` of blocks of so many queries and keys,
    bool or bits.
    """
    dtype, cols = mask_layout(block_mask, k.shape[2], key_block_size)
    _check_block_map("block_mask", block_mask, dtype, q, k, block_size, cols)


def mask_layout(block_mask: Tensor, num_keys: int, key_block_size: int) -> tuple[torch.dtype, int]:
    """Returns the dtype of a mask, bool or int32 for bits, and the size of its last dimension that
    so many keys need.
    """
    blocks = -(-num_keys // key_block_size)
    if block_mask.dtype == torch.int32:
        return torch.int32, num_words(blocks)
    return torch.bool, blocks


def check_zoom(zoom: Tensor, q: Tensor, k: Tensor, block_size: int) -> None:
    """Checks uint8 ``zoom [B | 1, Hq | Hkv | 1, Tr, Tc]`` and ``block_size``."""
    check_block_size(block_size)
    _check_block_map("zoom", zoom, torch.uint8, q, k, block_size, -(-k.shape[2] // block_size))


def _check_block_map(
    name: str,
    x: Tensor,
    dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    block_size: int,
    cols: int,
) -> None:
    rows = -(-q.shape[2] // block_size)
    check_map_shape(
        name, x, dtype, [(q.shape[0], 1), (q.shape[1], k.shape[1], 1), (rows,), (cols,)]
    )
    check_device(name, x, "q", q)


def check_map_shape(
    name: str, x: Tensor, dtype: torch.dtype, accepted: Sequence[tuple[int, ...]]
) -> None:
    """Checks the dtype of a block map and each of its four sizes against the accepted ones."""
    if x.dtype != dtype or x.dim() != 4:
        expected = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)}: expected {expected} [batch, heads, row "
            f"blocks, column blocks]"
        )
    for size, sizes, what in zip(
        x.shape, accepted, ("batch", "heads", "row blocks", "column blocks"), strict=True
    ):
        if size not in sizes:
            raise ValueError(
                f"{name}.shape={tuple(x.shape)}: {what} must be {' or '.join(map(str, sizes))}"
            )


def check_rotated(name: str, x: Tensor | None, of: str, like: Tensor) -> None:
    """Checks an optional tensor of the same tokens as ``like``, after RoPE."""
    if x is None:
        return
    if (x.shape, x.dtype) != (like.shape, like.dtype):
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)}: expected {like.dtype} {tuple(like.shape)}, as "
            f"{of}"
        )
    check_device(name, x, of, like)


def check_poolings(name: str, poolings: Sequence[str]) -> None:
    """Checks that poolings are some of ``POOLINGS``, each once."""
    if not poolings or not set(poolings) <= set(POOLINGS) or len(set(poolings)) < len(poolings):
        raise ValueError(
            f"{name}={poolings!r}: expected one or more of {', '.join(POOLINGS)}, each once"
        )
