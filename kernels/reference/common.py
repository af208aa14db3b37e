"""What the references share: precision, parts of a batch, attention over what fits in memory."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from msattn.kernels.common.checks import query_offset

SCORES_AT_ONCE = 2**22  # scores a chunk holds: 16 MiB in fp32


def sequences(q: Tensor, k: Tensor, kv_start: Tensor | None, causal: bool) -> Iterator[tuple[slice, int, int, int]]:
    """What can be computed together: (part of the batch, first query, first key, delta), the padding cut off.

    Counted from there, causal query t sees keys ``u <= t + delta``.
    """
    offset = query_offset(q.shape[2], k.shape[2], causal)
    if kv_start is None:
        yield slice(None), max(-offset, 0), 0, max(offset, 0)
        return
    starts = kv_start.tolist()
    if not all(0 <= start <= k.shape[2] for start in starts):
        raise ValueError(f"kv_start={starts}: expected 0 to {k.shape[2]}, positions within the keys")
    for b, start in enumerate(starts):
        yield slice(b, b + 1), min(max(start - offset, 0), q.shape[2]), start, max(offset - start, 0)


def row_lists(selected: Tensor, scores_each: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Lists of what ``selected [B, H, Tr, Tc]`` selects, some R rows at a time: those with lists of like length go together.

    Yields ``b, h, r [R]``, which of the entries exist ``[R, W]``, and entries ``c [R, W]``, a short list filled up with its
    first. An entry stands for ``scores_each`` scores, of which memory holds SCORES_AT_ONCE.
    """
    lengths = selected.sum(-1)
    rows = lengths.flatten().argsort(descending=True, stable=True)[: int((lengths > 0).sum())]
    while rows.numel():
        width = int(lengths.flatten()[rows[0]])
        some, rows = rows.tensor_split([max(1, SCORES_AT_ONCE // (scores_each * width))])
        b, h, r = torch.unravel_index(some, lengths.shape)
        on, c = selected[b, h, r].to(torch.uint8).sort(dim=-1, descending=True, stable=True)
        on, c = on[:, :width].bool(), c[:, :width]
        yield b, h, r, on, c.where(on, c[:, :1])


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over what fits in memory: ``out, lse`` of ``q [R, n, D]``, ``k, v [R, m, D]``, ``seen [R, n, m]``.

    ``bias`` is added to the scaled scores.
    """
    scores = q @ k.mT * scale if bias is None else q @ k.mT * scale + bias
    scores = scores.masked_fill(~seen, -math.inf)
    nothing = ~seen.any(-1)
    lse = scores.masked_fill(nothing[..., None], 0).logsumexp(-1)  # finite everywhere, and so are the gradients
    out = (scores - lse[..., None]).exp() @ v
    return out, lse.masked_fill(nothing, -math.inf)
