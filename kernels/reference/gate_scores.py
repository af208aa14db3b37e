"""Reference of ``gate_scores``."""

import torch
from torch import Tensor

from msattn.kernels.common.checks import first_query, statistics_dtype
from msattn.kernels.reference.best_blocks import block_softmax
from msattn.kernels.reference.pool_blocks import pool_blocks


def gate_scores(
    q: Tensor,
    pooled_k: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    inv_freq: Tensor | None,
    *,
    q_pool: list[str],
    num_keys: int,
    block_size: int = 64,
    key_block_size: int | None = None,
    kv_start: Tensor | None = None,
    q_rope: Tensor | None = None,
    mean_weight: float = 0.0,
    last_queries: bool = False,
    columns: Tensor | None = None,
    last_rows: Tensor | None = None,
    whole: Tensor | None = None,
) -> Tensor:
    """Reference of :func:`msattn.kernels.gate_scores.gate_scores`."""
    num_queries, (_, hidden, k_width) = q.shape[2], key_weight.shape
    start, rows, visible = row_blocks(q, num_keys, block_size, key_block_size, kv_start)
    cols = torch.arange(0, num_keys, key_block_size or block_size, device=q.device)[None]
    key_weight = key_weight.unflatten(0, (pooled_k.shape[1], -1))
    gate_k = torch.einsum("bhtp,hgop->bhgto", pooled_k[..., :k_width], key_weight).flatten(1, 2)
    if inv_freq is not None:
        gate_k = _apply_rope(gate_k, inv_freq, cols)
    mean_k = pooled_k[..., k_width:].repeat_interleave(len(query_weight) // pooled_k.shape[1], 1)

    def probabilities(pooled_q: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Returns those of queries ``[B, Hq, T, pools * D]``, pooled and with their mean after
        RoPE.
        """
        pooled_q = pooled_q.unflatten(1, (len(query_weight), -1))
        width = query_weight.shape[2] // pooled_q.shape[2]
        gate_q = torch.einsum(
            "bhtp,hop->bhto", pooled_q[..., :width].transpose(2, 3).flatten(3), query_weight
        )
        gate_q = gate_q if inv_freq is None else _apply_rope(gate_q, inv_freq, positions)
        logits = (
            gate_q * hidden**-0.5 @ gate_k.mT
            + mean_weight * pooled_q[..., width:].mean(2) @ mean_k.mT
        )
        return block_softmax(logits, visible[:, None])

    first = first_query(num_queries, num_keys, kv_start, q.device)
    pooled_q = pool_blocks(q, q_pool, block_size=block_size, start=first, rotated=q_rope)
    scores = probabilities(pooled_q, rows, visible)
    if columns is not None:
        unseen = ~visible[:, None]
        scores = scores.maximum(columns[:, :, None]).masked_fill(unseen, 0)
        scores = (
            scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
        ).masked_fill(unseen, 0)
    row = visible.any(-1).sum(1, keepdim=True).clamp(min=1) - 1  # row of the last query
    if last_rows is not None:
        return _with_last_rows(scores, last_rows, whole, row, visible)
    if not last_queries:
        return scores
    # Every pooling of one query is the query.
    single = [
        *[q[:, :, -block_size:]] * len(q_pool),
        *([] if q_rope is None else [q_rope[:, :, -block_size:]]),
    ]
    own = torch.arange(num_keys - single[0].shape[2], num_keys, device=q.device) - start[:, None]
    positions = rows.gather(1, row).expand(-1, single[0].shape[2])
    largest = probabilities(
        torch.cat(single, -1).to(statistics_dtype(q)), positions, cols[:, None] <= own[..., None]
    )
    is_last = torch.arange(rows.shape[1], device=q.device) == row
    return scores.where(~is_last[:, None, :, None], scores.maximum(largest.amax(2, keepdim=True)))


def row_blocks(
    q: Tensor,
    num_keys: int,
    block_size: int,
    key_block_size: int | None,
    kv_start: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the starts of sequences, the positions of row blocks, and the blocks they see."""
    start = (
        torch.zeros(1, dtype=torch.long, device=q.device) if kv_start is None else kv_start.long()
    )
    keys = (num_keys - start)[:, None]
    rows = torch.arange(0, q.shape[2], block_size, device=q.device) + (keys - q.shape[2]).clamp(
        min=0
    )
    # end of the keys visible to a row block
    end = torch.where(rows < keys, (rows + block_size).minimum(keys), 0)
    cols = torch.arange(0, num_keys, key_block_size or block_size, device=q.device)
    return start, rows, cols < end[..., None]


def _with_last_rows(
    scores: Tensor, last_rows: Tensor, whole: Tensor | None, row: Tensor, visible: Tensor
) -> Tensor:
    """Returns the scores with those of the last rows, up to ``row [B | 1, 1]``."""
    count = last_rows.shape[2]
    base = (row - (count - 1)).clamp(min=0)
    index = (base + torch.arange(count, device=row.device)).expand(len(scores), -1)
    index = index[:, None, :, None].expand_as(last_rows)
    rows = scores.gather(2, index).maximum(last_rows)
    if whole is not None:
        rows = torch.where(whole[:, None, :, None], last_rows, rows)
    return scores.scatter(2, index, rows).masked_fill(~visible[:, None], 0)


def _apply_rope(x: Tensor, inv_freq: Tensor, positions: Tensor) -> Tensor:
    """Rotates ``x [B, H, T, hidden]`` at ``positions [B | 1, T]`` by fp32 angles."""
    angles = (positions[..., None].float() * inv_freq).to(x.dtype)[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat(
        [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1
    )
