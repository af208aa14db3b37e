"""Block maps of single queries, which are the targets of decode gates, in plain PyTorch (SeerAttention-R, section 3.2).

Only some queries of a chunk are needed, so the scores are computed for a few of them at a time. Inputs are whole prompts
without padding. Softmax statistics are fp32 (fp64 for fp64 inputs).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from msattn.trainer.models.layer_attention import LayerInputs

SCORES_AT_ONCE = 2**26  # scores of all heads; 256 MB


def sample_queries(input_ids: Tensor, count: int, first: int) -> Tensor:
    """Returns ``count`` random positions from ``first`` on (or all of them) of tokens ``[B, N]``: int64 ``[n]``, increasing.

    They depend only on the tokens, so that a resumed run draws the same positions.
    """
    generator = torch.Generator().manual_seed(int(input_ids.sum()))
    drawn = torch.randperm(input_ids.shape[1] - first, generator=generator)[:count]
    return (first + drawn.sort().values).to(input_ids.device)


def far_blocks(positions: Tensor, num_keys: int, block_size: int, recent: int) -> Tensor:
    """Returns the blocks with a key that is not among the last ``recent`` ones of a query: bool ``[1, 1, n, Tc]``."""
    first_keys = torch.arange(0, num_keys, block_size, device=positions.device)
    return (first_keys <= (positions - recent)[:, None])[None, None]


def largest_in_blocks(x: LayerInputs, positions: Tensor, block_size: int, *, sink: int = 0, recent: int = 0) -> Tensor:
    """Returns the largest attention probability in each block, over its keys and the query group: fp32 ``[B, Hkv, n, Tc]``.

    Probabilities are those of the full row. The first ``sink`` keys and a query's last ``recent`` keys do not count.
    ``positions``: int64 ``[n]``, positions of the queries in the prompt.
    """
    keys = torch.arange(x.num_keys, device=x.q.device)
    found = []
    for some, probabilities in _few_queries(x, positions):
        left_out = (keys < sink) | (keys > (some - recent)[:, None])
        blocks = _as_blocks(probabilities.masked_fill_(left_out, 0), block_size)
        found.append(blocks.amax(-1).amax(2))
    return torch.cat(found, dim=2)


def mass_of_blocks(x: LayerInputs, positions: Tensor, block_size: int) -> Tensor:
    """Returns the attention mass of each block: fp32 ``[B, Hq, n, Tc]``; arguments as of :func:`largest_in_blocks`."""
    found = [_as_blocks(probabilities, block_size).sum(-1) for _, probabilities in _few_queries(x, positions)]
    return torch.cat(found, dim=3).flatten(1, 2)


def _few_queries(x: LayerInputs, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields some of ``positions`` and the attention probabilities of these queries: ``[B, Hkv, group, n, M]``."""
    dtype = torch.promote_types(x.q.dtype, torch.float32)
    k = x.k.to(dtype).mT  # [B, Hkv, D, M]
    keys = torch.arange(x.num_keys, device=x.q.device)
    for some in positions.split(max(1, SCORES_AT_ONCE // (x.q.shape[0] * x.q.shape[1] * x.num_keys))):
        q = (x.q[:, :, some].to(dtype) * x.scale).unflatten(1, (k.shape[1], -1))  # [B, Hkv, group, n, D]
        scores = (q.flatten(2, 3) @ k).unflatten(2, q.shape[2:4])
        yield some, scores.masked_fill_(keys > some[:, None], -torch.inf).softmax(-1)


def _as_blocks(values: Tensor, block_size: int) -> Tensor:
    """Splits ``[..., M]`` into blocks ``[..., Tc, block_size]``; the last one is padded with zeros."""
    return F.pad(values, (0, -values.shape[-1] % block_size)).unflatten(-1, (-1, block_size))
