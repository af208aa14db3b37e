"""Reference of ``conv_decode``, one sequence at a time."""

import torch
from torch import Tensor

from msattn.kernels.common.checks import resolve_scale, statistics_dtype
from msattn.kernels.multi_token.checks import key_taps_after, key_taps_before


def conv_decode(
    q_window: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    mask: str = "query",
    scale: float | None = None,
    kv_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Reference of :func:`msattn.kernels.multi_token.conv_decode.conv_decode`.

    Memory holds the scores ``[Hq, c_q, m]`` of one sequence.
    """
    scale, statistics = resolve_scale(scale, k.shape[3]), statistics_dtype(k)
    batch, q_heads, window, head = q_window.shape
    out = q_window.new_zeros((batch, q_heads, 1, head))
    taps = weight.to(statistics)
    for b in range(batch):
        start = 0 if kv_start is None else int(kv_start[b])
        end = k.shape[2] if kv_len is None else int(kv_len[b])
        if not (0 <= start <= k.shape[2] and 0 <= end <= k.shape[2]):
            raise ValueError(
                f"kv_start={start}, kv_len={end}: expected positions in the cache, 0 to "
                f"{k.shape[2]}"
            )
        if end <= start:
            continue
        keys, values = (x[b, :, None, start:end].to(statistics) for x in (k, v))  # [Hkv, 1, m, D]
        queries = q_window[b].to(statistics).unflatten(0, (k.shape[1], -1))  # [Hkv, G, c_q, D]
        scores = (queries @ keys.mT * scale).flatten(0, 1)  # [Hq, c_q, m]
        position = torch.arange(start, end, device=k.device)
        own = torch.arange(end - window, end, device=k.device)[:, None]
        scores = scores.masked_fill(((position > own) & (mask == "query")) | (own < start), 0)
        scores = torch.nn.functional.pad(scores, (key_taps_before(weight), key_taps_after(weight)))
        windows = scores.unfold(-1, weight.shape[2], 1)  # [Hq, c_q, m, c_k]
        mixed = torch.einsum("hamb,hab->hm", windows, taps)
        probs = mixed.softmax(-1).unflatten(0, (k.shape[1], -1))  # [Hkv, G, m]
        out[b] = (probs[:, :, None] @ values).flatten(0, 1).to(out.dtype)
    return out
