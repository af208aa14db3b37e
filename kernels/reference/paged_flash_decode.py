"""Reference of ``paged_flash_decode``, which gathers the cache of one sequence at a time."""

import math

from torch import Tensor

from msattn.kernels.common.checks import resolve_scale, resolve_softcap, statistics_dtype
from msattn.kernels.common.paged_checks import check_paged_decode
from msattn.kernels.reference.common import cap_scores, paged_slots
from msattn.kernels.reference.flash_decode import flash_decode
from msattn.kernels.types import PagedKeys, ScoreMod, SparseAttention


def paged_flash_decode(
    q: Tensor, cache: PagedKeys, *, scale: float | None = None, softcap: float | None = None
) -> SparseAttention:
    """Reference of :func:`msattn.kernels.paged.flash_decode.paged_flash_decode`.

    Raises
    ------
    ValueError
        If an argument is invalid, a length is outside the table, or a filled page outside the cache.
    """
    check_paged_decode(q, cache)
    scale, limit = resolve_scale(scale, q.shape[3]), resolve_softcap(softcap)
    mod = None if limit is None else ScoreMod(None, lambda scores, *_: cap_scores(scores, limit))
    out, lse = q.new_zeros(q.shape), q.new_full(q.shape[:3], -math.inf, dtype=statistics_dtype(q))
    for b, (page, offset) in enumerate(paged_slots(cache)):
        if len(page) == 0:
            continue
        k, v = (x[page, offset].transpose(0, 1)[None] for x in (cache.k, cache.v))  # [1, Hkv, kv_len, D]
        one = slice(b, b + 1)
        out[one], lse[one] = flash_decode(q[one], k, v, causal=True, score_mod=mod, scale=scale)
    return SparseAttention(out, lse)
