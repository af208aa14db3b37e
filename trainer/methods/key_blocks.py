"""Blocks of neighboring keys as buckets, for routers that choose by position or by a summary of
the keys in a block.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from msattn.trainer.methods.buckets import Buckets, Router, queries_at
from msattn.trainer.methods.budgets import Budget
from msattn.trainer.models.layer_attention import LayerInputs

NOT_FAR = float("-inf")  # score of a block in the dense window


class BlockRouter(Router):
    """Chooses among the far blocks of a sequence, which have a key before the dense window.

    ``num_buckets`` is the largest number of probes. Other blocks have the score ``NOT_FAR``, see
    :meth:`only_far`.
    A subclass with its own :meth:`visit` and :meth:`scores_at` needs no :meth:`summarize` and no
    :meth:`head_scores`.
    """

    grouping = "blocks"
    block_size: int  # keys of a block; blocks are counted from the end of the left padding
    # poolings of a block's keys before RoPE that summarize needs, see pool_blocks
    pools: Sequence[str] = ()

    def summarize(self, x: LayerInputs) -> Tensor:
        """Returns a summary of each block: ``[B, Hkv, count_blocks(M, block_size), S]``.

        ``x`` holds all keys after RoPE and, if there are :attr:`pools` and cached keys, pooled keys
        before RoPE. A partial last block is summarized from its keys so far.
        """
        raise NotImplementedError

    def head_scores(
        self, layer: int, summaries: Tensor, q_nope: Tensor, q: Tensor, positions: Tensor
    ) -> Tensor:
        """Returns the block scores of each query head: ``[B, Hq, P]``.

        ``summaries [B or 1, Hkv, P, S]`` are those of the queries' sequences, ``q_nope`` and
        ``q [B, Hq, 1, D]`` queries before and after RoPE. Their ``positions`` int ``[B]`` are
        counted from the end of the left padding.
        """
        raise NotImplementedError

    def scores(
        self, layer: int, summaries: Tensor, q_nope: Tensor, q: Tensor, positions: Tensor
    ) -> Tensor:
        """Returns :meth:`head_scores` summed over each query group: ``[B, Hkv, P]``."""
        return (
            self.head_scores(layer, summaries, q_nope, q, positions)
            .unflatten(1, (self.kv_heads, -1))
            .sum(2)
        )

    def visit(
        self,
        x: LayerInputs,
        budget: Budget,
        buckets: Buckets,
        *,
        window: int | Tensor = 0,
        by_head: bool = False,
    ) -> Tensor:
        if (summaries := buckets.summaries) is None:
            return x.q.new_empty(len(x.q), (x.q if by_head else x.k).shape[1], 0, dtype=torch.int32)
        scores = self.far_scores(x, summaries, window, by_head=by_head)
        return self.choose(scores, budget, buckets.sizes)

    def buckets_of_keys(self, x: LayerInputs) -> tuple[Tensor, int]:
        blocks = block_of_keys(0, x.num_keys, None, self.block_size, x.k.device)
        return blocks.expand(1, x.k.shape[1], -1).contiguous(), count_blocks(
            x.num_keys, self.block_size
        )

    def scores_at(
        self, x: LayerInputs, positions: Tensor, recent: int, *, by_head: bool = False
    ) -> Tensor:
        q_nope, q = queries_at(x, positions)
        queries = replace(x, q=q, q_nope=q_nope, kv_len=positions + 1)
        return self.far_scores(queries, self.summarize(x), recent, by_head=by_head)

    def best(self, scores: Tensor, probes: int) -> Tensor:
        """Returns the far blocks with the highest ``scores [B, H, P]``: int32 ``[B, H, L]``, -1
        where a row has fewer.
        """
        # computed on the host
        most = int(self.visited(torch.tensor(scores.shape[-1]), torch.tensor(probes)))
        best = scores.topk(most, dim=-1).indices
        counts = self.visited(num_far(scores), torch.full((1,), probes, device=best.device))
        return best.masked_fill(torch.arange(most, device=best.device) >= counts, -1).to(
            torch.int32
        )

    def ranked(self, scores: Tensor) -> Tensor:
        return self.best(scores, self.num_buckets)

    def only_far(self, scores: Tensor, before_window: Tensor) -> Tensor:
        first_keys = self.block_size * torch.arange(scores.shape[-1], device=scores.device)
        return scores.masked_fill(first_keys >= before_window[:, None, None], NOT_FAR)

    def far_scores(
        self, x: LayerInputs, summaries: Tensor, window: int | Tensor, *, by_head: bool = False
    ) -> Tensor:
        """Returns the scores of the newest token of each sequence: ``[B, Hkv, P]``, ``NOT_FAR`` for
        other blocks.

        ``x`` holds one query of each sequence; ``summaries [B or 1, Hkv, P, S]`` of blocks that are
        not far are ignored. ``window`` is the number of last keys that are always read, one for all
        sequences or ``[B]``. With ``by_head`` the result has the scores of each query head:
        ``[B, Hq, P]``.
        """
        keys = (
            torch.full_like(x.q[:, 0, 0, 0], x.num_keys, dtype=torch.long)
            if x.kv_len is None
            else x.kv_len
        )
        keys = keys - (0 if x.kv_start is None else x.kv_start)
        score = self.head_scores if by_head else self.scores
        return self.only_far(score(x.layer, summaries, x.q_nope, x.q, keys - 1), keys - window)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Returns the softmax of ``scores [B, H, P]`` over the far blocks, 0 for the others and in
        rows without far ones.
        """
        far = scores > NOT_FAR
        return (
            scores.masked_fill(~far, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~far, 0)
        )


def count_blocks(keys: int, size: int) -> int:
    """Returns the number of blocks of ``size`` keys that hold ``keys`` keys."""
    return -(-keys // size)


def block_of_keys(
    first: int, end: int, start: Tensor | None, size: int, device: torch.device
) -> Tensor:
    """Returns the blocks of the keys at positions ``first`` to ``end - 1``: int32
    ``[B or 1, 1, N]``, -1 for left padding.

    Blocks are counted from the end of the padding ``start [B]``.
    """
    positions = torch.arange(first, end, dtype=torch.int32, device=device)[None, None]
    positions = positions if start is None else positions - start[:, None, None].int()
    return positions.div(size, rounding_mode="floor").clamp(min=-1)


def num_far(scores: Tensor) -> Tensor:
    """Returns the number of far blocks of ``scores [B, H, P]``: int64 ``[B, H, 1]``."""
    return (scores > NOT_FAR).sum(-1, keepdim=True)


def block_products(queries: Tensor, summaries: Tensor) -> Tensor:
    """Returns the products of ``queries [B, Hkv, R, S]`` and ``summaries [B or 1, Hkv, P, S]``:
    ``[B, Hkv, R, P]``.

    A single set of summaries, for queries of one sequence, is not copied.
    """
    rows = queries.unflatten(0, (len(summaries), -1)).transpose(1, 2)  # [sequences, Hkv, n, R, S]
    products = rows.flatten(2, 3) @ summaries.mT  # [sequences, Hkv, n * R, P]
    return products.unflatten(2, rows.shape[2:4]).transpose(1, 2).flatten(0, 1)
