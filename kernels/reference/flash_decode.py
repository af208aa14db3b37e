"""Reference of ``flash_decode``, both variants, one part of the keys at a time."""

import math

import torch
from torch import Tensor

from msattn.kernels.common.checks import query_offset, resolve_scale, statistics_dtype
from msattn.kernels.reference.common import SCORES_AT_ONCE
from msattn.kernels.types import ScoreMod, SparseAttention, Variant


def flash_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    variant: Variant = "partial",
    causal: bool = False,
    score_mod: ScoreMod | None = None,
    scale: float | None = None,
    kv_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    splits: int | None = None,
) -> SparseAttention:
    """Reference of :func:`msattn.kernels.flash_decode.flash_decode`.

    The keys are read in ``splits`` parts, or in more of them to bound memory.
    """
    scale, statistics = resolve_scale(scale, q.shape[3]), statistics_dtype(q)
    q_heads, num_queries, head_size = q.shape[1:]
    kv_heads, num_keys = k.shape[1:3]
    starts, ends = _positions("kv_start", kv_start, 0, k), _positions("kv_len", kv_len, num_keys, k)
    at_once = max(1, SCORES_AT_ONCE // max(q_heads * num_queries, kv_heads * head_size))
    h = torch.arange(q_heads, device=q.device)[:, None, None]
    out, lse = q.new_zeros(q.shape), q.new_full(q.shape[:3], -math.inf, dtype=statistics)

    def scores(b: int, i: Tensor, part: slice) -> Tensor:
        """Returns scores ``[Hq, N, m]`` of queries i and a part of the keys, masked."""
        queries = q[b].to(statistics).reshape(kv_heads, -1, head_size)  # [Hkv, G * N, D]
        s = (queries @ k[b, :, part].to(statistics).mT * scale).view(q_heads, num_queries, -1)
        j = torch.arange(part.start, part.stop, device=q.device)
        if score_mod is not None:
            s = score_mod.reference(
                s, b, h, i.clamp(min=0), j, *score_mod.tensors, *score_mod.numbers
            )
        seen = (i >= starts[b]) & (j <= i) if causal else (i >= starts[b]).expand(-1, len(j))
        return s.masked_fill(~seen, -math.inf)

    for b, (first, end) in enumerate(zip(starts, ends, strict=True)):
        offset = query_offset(num_queries, end, causal)
        i = torch.arange(offset, offset + num_queries, device=q.device)[:, None]
        if score_mod is not None and score_mod.window is not None:
            first = max(first, offset + 1 - score_mod.window)
        share = max(1, min(at_once, -(-(end - first) // (splits or 1))))
        parts = [slice(j, min(j + share, end)) for j in range(first, end, share)]
        if not parts:
            continue
        largest = (
            torch.stack([scores(b, i, part).amax(-1) for part in parts]).amax(0)
            if variant == "global"
            else None
        )
        states = []
        for part in parts:
            s = scores(b, i, part)
            m = s.amax(-1) if largest is None else largest
            p = (s - m.masked_fill(m == -math.inf, 0)[..., None]).exp()
            acc = p.view(kv_heads, -1, p.shape[-1]) @ v[b, :, part].to(statistics)
            states.append((m, p.sum(-1), acc.view(q_heads, num_queries, head_size)))
        m, l, acc = (torch.stack(x) for x in zip(*states, strict=True))
        lse[b] = (m + l.log()).logsumexp(0)
        weights = (m - lse[b].masked_fill(lse[b] == -math.inf, 0)).exp()
        out[b] = (weights[..., None] * acc).sum(0)
    return SparseAttention(out, lse)


def _positions(name: str, x: Tensor | None, default: int, k: Tensor) -> list[int]:
    """Returns a position in the cache for each sequence."""
    positions = [default] * k.shape[0] if x is None else x.tolist()
    if not all(0 <= position <= k.shape[2] for position in positions):
        raise ValueError(f"{name}={positions}: expected positions in the cache, 0 to {k.shape[2]}")
    return positions
