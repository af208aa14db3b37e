"""Reference of ``gate_scores``."""

import torch
from torch import Tensor

from msattn.kernels.common.block_checks import check_gate_scores
from msattn.kernels.common.checks import first_query
from msattn.kernels.reference.best_blocks import block_softmax
from msattn.kernels.reference.pool_blocks import pool_blocks


def gate_scores(
    q: Tensor,
    k: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    inv_freq: Tensor | None,
    *,
    q_pool: list[str],
    k_pool: list[str],
    block_size: int = 64,
    kv_start: Tensor | None = None,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
    mean_weight: float = 0.0,
) -> Tensor:
    """Reference of :func:`msattn.kernels.gate_scores.gate_scores`."""
    check_gate_scores(
        q, k, query_weight, key_weight, inv_freq, q_pool, k_pool, block_size, kv_start, q_rope, k_rope, mean_weight
    )
    heads, hidden, _ = query_weight.shape
    num_queries, num_keys = q.shape[2], k.shape[2]
    start = torch.zeros(1, dtype=torch.long, device=q.device) if kv_start is None else kv_start.long()
    rows = torch.arange(0, num_queries, block_size, device=q.device) + (num_keys - num_queries - start).clamp(min=0)[:, None]
    cols = torch.arange(0, num_keys, block_size, device=q.device)[None]

    first = first_query(num_queries, num_keys, kv_start, q.device)
    pooled = pool_blocks(q, q_pool, block_size=block_size, start=first).unflatten(1, (heads, -1)).transpose(2, 3).flatten(3)
    gate_q = torch.einsum("bhtp,hop->bhto", pooled, query_weight)
    pooled = pool_blocks(k, k_pool, block_size=block_size, start=kv_start)
    gate_k = torch.einsum("bhtp,hgop->bhgto", pooled, key_weight.unflatten(0, (k.shape[1], -1))).flatten(1, 2)
    if inv_freq is not None:
        gate_q, gate_k = _apply_rope(gate_q, inv_freq, rows), _apply_rope(gate_k, inv_freq, cols)
    logits = gate_q * hidden**-0.5 @ gate_k.mT
    if q_rope is not None and k_rope is not None:
        mean_q = pool_blocks(q_rope, ["avg"], block_size=block_size, start=first).unflatten(1, (heads, -1)).mean(2)
        mean_k = pool_blocks(k_rope, ["avg"], block_size=block_size, start=kv_start)
        logits += mean_weight * mean_q @ mean_k.repeat_interleave(heads // k.shape[1], 1).mT
    end = (rows + block_size).minimum(num_keys - start[:, None])  # of the keys visible to a row block
    visible = (cols[:, None] < end[..., None]) & (rows < num_keys - start[:, None])[..., None]
    return block_softmax(logits, visible[:, None])


def _apply_rope(x: Tensor, inv_freq: Tensor, positions: Tensor) -> Tensor:
    """Rotates ``x [B, H, T, hidden]`` at ``positions [B | 1, T]`` by fp32 angles."""
    angles = (positions[..., None].float() * inv_freq).to(x.dtype)[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)
