"""Helpers of the references: sequence bounds, block lists, attention."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from msattn.kernels.common.checks import query_offset

SCORES_AT_ONCE = 2**22  # scores in a chunk: 16 MiB in fp32


def sequences(q: Tensor, k: Tensor, kv_start: Tensor | None, causal: bool) -> Iterator[tuple[slice, int, int, int]]:
    """Yields parts of a batch that share their left padding.

    A part is (slice of the batch, first query, first key, delta). If t and u count from the first query and key, causal query t
    sees keys ``u <= t + delta``.
    """
    offset = query_offset(q.shape[2], k.shape[2], causal)
    if kv_start is None:
        yield slice(None), max(-offset, 0), 0, max(offset, 0)
        return
    starts = kv_start.tolist()
    if not all(0 <= start <= k.shape[2] for start in starts):
        raise ValueError(f"kv_start={starts}: expected 0 to {k.shape[2]}, the length of left padding")
    for b, start in enumerate(starts):
        yield slice(b, b + 1), min(max(start - offset, 0), q.shape[2]), start, max(offset - start, 0)


def row_lists(selected: Tensor, scores_each: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Yields the columns that ``selected [B, H, Tr, Tc]`` selects, R rows at a time.

    A chunk is ``b, h, r [R]``, a mask of valid entries ``[R, W]``, and the columns ``c [R, W]``; shorter lists repeat their
    first column as padding. Rows are sorted by length, which keeps padding small. An entry has ``scores_each`` scores,
    and a chunk holds up to SCORES_AT_ONCE scores.
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


def cap_scores(scores: Tensor, softcap: float | None) -> Tensor:
    """Returns ``softcap * tanh(scores / softcap)`` of scaled scores; None leaves them unchanged."""
    return scores if softcap is None else softcap * (scores / softcap).tanh()


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, bias: Tensor | None = None, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Returns ``out, lse`` of masked attention, with materialized scores.

    Shapes are ``q [R, n, D]``, ``k, v [R, m, D]``, and ``seen [R, n, m]`` for the mask. ``bias`` is added to the scaled and
    capped scores.
    """
    scores = cap_scores(q @ k.mT * scale, softcap)
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~seen, -math.inf)
    nothing = ~seen.any(-1)
    lse = scores.masked_fill(nothing[..., None], 0).logsumexp(-1)  # finite also in empty rows, so that gradients are finite
    out = (scores - lse[..., None]).exp() @ v
    return out, lse.masked_fill(nothing, -math.inf)


def masked_attention_backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Tensor, scale: float,
    bias: Tensor | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k, v of :func:`masked_attention`.

    ``dS = P * (dP - rowsum(dO * O) + dlse)``, where P is recomputed from the LSE. With a cap, it is multiplied by the slope of
    the cap, ``1 - (S / softcap)^2``.
    """
    scores = cap_scores(q @ k.mT * scale, softcap)
    biased = scores if bias is None else scores + bias
    probs = (biased - lse[..., None]).masked_fill(~seen, -math.inf).exp()
    row_delta = ((dout * out).sum(-1) - dlse)[..., None]
    dscores = (probs * (dout @ v.mT - row_delta)).masked_fill(~seen, 0) * scale
    if softcap is not None:
        dscores *= 1 - (scores / softcap).square()
    return dscores @ k, dscores.mT @ q, probs.mT @ dout
