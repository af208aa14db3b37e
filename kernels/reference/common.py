"""What the references share: precision, parts of a batch, attention over what fits in memory."""

import math
from collections.abc import Iterator

from torch import Tensor

from msattn.kernels.checks import query_offset

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


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over what fits in memory: ``out, lse`` of ``q [R, n, D]``, ``k, v [R, m, D]``, ``seen [R, n, m]``."""
    scores = (q @ k.mT * scale).masked_fill(~seen, -math.inf)
    nothing = ~seen.any(-1)
    lse = scores.masked_fill(nothing[..., None], 0).logsumexp(-1)  # finite everywhere, and so are the gradients
    out = (scores - lse[..., None]).exp() @ v
    return out, lse.masked_fill(nothing, -math.inf)
