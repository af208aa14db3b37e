"""Block masks of one bit for each block: 32 adjacent column blocks in an int32, the first in the
lowest bit.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

WORD = 32  # blocks


def num_words(blocks: int) -> int:
    """Returns the number of words that hold the bits of so many blocks."""
    return -(-blocks // WORD)


def pack_blocks(mask: Tensor) -> Tensor:
    """Packs a bool mask ``[..., Tc]`` into int32 ``[..., ceil(Tc / 32)]``; bits after the last
    block are 0.
    """
    padded = F.pad(mask, (0, -mask.shape[-1] % WORD)).unflatten(-1, (-1, WORD))
    bits = padded.long() << torch.arange(WORD, device=mask.device)
    return bits.sum(-1).to(torch.int32)  # the highest bit is the sign


def unpack_blocks(block_mask: Tensor, blocks: int) -> Tensor:
    """Returns a block mask as bool ``[..., Tc]`` of so many column blocks, whether it has bits or
    is bool.
    """
    if block_mask.dtype == torch.bool:
        return block_mask
    bits = block_mask[..., None] >> torch.arange(WORD, dtype=torch.int32, device=block_mask.device)
    return (bits & 1).bool().flatten(-2)[..., :blocks]
