"""Pages: buckets of neighbouring keys, for routers that choose by position or by a summary of a page's keys."""

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from msattn.trainer.saap.untrained import UntrainedRouter

if TYPE_CHECKING:
    from msattn.trainer.models.tap import LayerInputs

PAGE_SIZE = 16  # keys
NOT_FAR = float("-inf")  # score of a page in the dense window


class PageRouter(UntrainedRouter):
    """Chooses among the far pages of a sequence, those with a key before the dense window.

    The number of pages grows with the sequence, so ``num_buckets`` is only a unit: a query with ``p`` probes visits
    ``p / num_buckets`` of the far pages, at least one, as it reads about this share of the far keys with other routers.
    """

    @abstractmethod
    def summarize(self, k: Tensor, start: Tensor | None) -> Tensor:
        """Returns a summary of each page of keys after RoPE ``k [B, Hkv, N, D]``, N >= 1: ``[B, Hkv, num_pages(N), S]``.

        ``start [B]`` is the left padding. A last page that is not full is one of its keys so far.
        """

    @abstractmethod
    def head_scores(self, summaries: Tensor, q: Tensor) -> Tensor:
        """Returns the page scores of each query head: ``[B, Hq, P]``.

        ``q [B, Hq, 1, D]`` are queries after RoPE; ``summaries [B or 1, Hkv, P, S]`` are those of their sequences.
        """

    def scores(self, summaries: Tensor, q: Tensor) -> Tensor:
        """Returns :meth:`head_scores` summed over each query group: ``[B, Hkv, P]``."""
        return self.head_scores(summaries, q).unflatten(1, (self.kv_heads, -1)).sum(2)

    def choose(self, scores: Tensor, probes: int) -> Tensor:
        """Returns the far pages with the highest ``scores [B, H, P]``: int32 ``[B, H, L]``, -1 where a row has fewer.

        Pages that are not far have the score ``NOT_FAR``, see :func:`only_far`.
        """
        pages, unit = scores.shape[-1], self.num_buckets
        most = min(pages, max(min(probes, 1), (2 * probes * pages + unit) // (2 * unit)))
        best = scores.topk(most, dim=-1).indices
        rank = torch.arange(most, device=best.device)
        return best.masked_fill(rank >= self.visited(scores, torch.full_like(rank[:1], probes)), -1).to(torch.int32)

    def visited(self, scores: Tensor, probes: Tensor) -> Tensor:
        """Returns the number of pages that are visited with each of ``probes [n]``, by ``scores [B, H, P]``: ``[B, H, n]``."""
        far = (scores > NOT_FAR).sum(-1, keepdim=True)
        rounded = (2 * probes * far + self.num_buckets) // (2 * self.num_buckets)
        return rounded.maximum(probes.clamp(max=1)).minimum(far)

    def probe_pages(
        self, x: "LayerInputs", summaries: Tensor, window: int | Tensor, probes: int, *, by_head: bool = False
    ) -> Tensor:
        """Returns the pages that the newest token of each sequence visits: int32 ``[B, Hkv, L]``.

        Parameters
        ----------
        x : one query of each sequence.
        summaries : ``[B or 1, Hkv, P, S]``; pages that are not far may hold anything.
        window : number of last keys that are read anyway, one for all sequences or ``[B]``.
        by_head : each query head has its own pages: ``[B, Hq, L]``.
        """
        keys = torch.full_like(x.q[:, 0, 0, 0], x.num_keys, dtype=torch.long) if x.kv_len is None else x.kv_len
        before_window = keys - window - (0 if x.kv_start is None else x.kv_start)
        scores = (self.head_scores if by_head else self.scores)(summaries, x.q)
        return self.choose(only_far(scores, before_window), probes)


def num_pages(keys: int) -> int:
    """Returns the number of pages of ``keys`` keys."""
    return -(-keys // PAGE_SIZE)


def page_of_keys(first: int, end: int, start: Tensor | None, device: torch.device) -> Tensor:
    """Returns the pages of the keys at positions ``first`` to ``end - 1``: int32 ``[B or 1, 1, N]``, -1 for left padding.

    Pages are counted from the end of the padding ``start [B]``.
    """
    positions = torch.arange(first, end, dtype=torch.int32, device=device)[None, None]
    positions = positions if start is None else positions - start[:, None, None].int()
    return positions.div(PAGE_SIZE, rounding_mode="floor").clamp(min=-1)


def only_far(scores: Tensor, before_window: Tensor) -> Tensor:
    """Returns ``scores [B, H, P]`` with ``NOT_FAR`` for pages without a key among the first ``before_window [B]`` ones."""
    first_keys = PAGE_SIZE * torch.arange(scores.shape[-1], device=scores.device)
    return scores.masked_fill(first_keys >= before_window[:, None, None], NOT_FAR)
