"""Decision on how attention is computed (dense, over blocks, or over buckets), for contiguous and
paged caches and for steps.

A pass over several tokens, of a prompt or after cached ones, reads the blocks of a selection
(SeerAttention). A pass over one new token, or over a few such as draft tokens, reads the dense
window and the buckets of a router (SAAP) for each token.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from msattn.trainer.methods.buckets import MAX_ROUTED_TOKENS, Router
from msattn.trainer.methods.budgets import Budget
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.selection import Selection

# names under which dense passes are counted
BY_CHOICE, FALLBACK = "dense_by_choice", "dense_fallbacks"
INT32_MAX = torch.iinfo(torch.int32).max
Attention = TypeVar("Attention")


class Decision(NamedTuple, Generic[Attention]):
    """Decision how the attention of a layer is computed in a pass."""

    attention: Attention | None  # None: dense
    # the name under which the dense pass is counted; None: it is not
    dense_reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Decoding over a dense window and the buckets of a router, in the routed layers."""

    router: Router
    budget: Budget
    recent: int
    sink: int
    layers: frozenset[int]  # the routed ones
    # each query head visits its own buckets; otherwise a query group shares them
    independent: bool = False


@dataclass(frozen=True)
class Dispatch:
    """Decides from lengths how the attention of a layer is computed."""

    selection: Selection | None
    routed: Routing | None
    dense_below: int  # number of keys below which prompts are dense, because that is faster
    # number of sequences -> number of keys from which their new tokens read buckets
    shortest_routed: Callable[[int], int]

    @property
    def gate(self) -> Gate | None:
        """The gate that scores blocks, if one does."""
        return None if self.selection is None else self.selection.gate

    @property
    def routed_layers(self) -> frozenset[int]:
        """The layers whose new tokens read buckets."""
        return frozenset() if self.routed is None else self.routed.layers

    def is_prompt(self, queries: int, keys: int) -> bool:
        """Returns True if the tokens of a pass are read together as a prompt, False if each is read
        as a new token.
        """
        return queries == keys or queries > (1 if self.routed is None else MAX_ROUTED_TOKENS)

    def decide_prompt(
        self, queries: int, keys: int, *, known: bool = True, ends: bool = True
    ) -> Decision[Selection]:
        """Decides for a prompt or a chunk of one.

        ``ends`` is True for the last chunk, and ``known`` if a gate has what it needs of cached
        keys.
        """
        if self.selection is None:
            return Decision(None)
        if keys < self.dense_below or (ends and queries <= self.selection.always.dense_queries):
            return Decision(None, BY_CHOICE)
        return Decision(self.selection) if known or self.gate is None else Decision(None, FALLBACK)

    def decide_tokens(
        self, layer: int, keys: int | None, batch: int, *, known: bool = True
    ) -> Decision[Routing]:
        """Decides for new tokens of a ``batch`` of sequences; ``keys`` is the number of keys of the
        longest one.

        It is None where only the device knows them, as in CUDA graphs; ``known`` says whether keys
        have buckets to read.
        """
        if layer not in self.routed_layers:
            return Decision(None)
        if keys is not None and self.tokens_until_routed(keys, batch):
            return Decision(None, BY_CHOICE)
        return Decision(self.routed) if known else Decision(None, FALLBACK)

    def tokens_until_routed(self, keys: int, batch: int) -> int:
        """Returns the number of tokens that sequences of ``keys`` keys decode densely before they
        read buckets.
        """
        return max(0, self.shortest_routed(batch) - keys) if self.routed_layers else sys.maxsize

    def short_sequences(
        self, batch: int, keys: Any, padding: Tensor | None = None
    ) -> Tensor | None:
        """Returns a mask of the sequences that are too short to read buckets, bool ``[B]``; None if
        no sequence can be.

        A sequence has ``keys`` (an int or ``[B]``) less ``padding [B]`` keys, numbers that stay on
        the device. The window of a short sequence is widened to all of its keys, so that it reads
        the same keys in a batch as alone.
        """
        shortest = self.shortest_routed(batch)
        if shortest <= 1:
            return None
        return (keys if padding is None else keys - padding) < min(shortest, INT32_MAX)


def whole_window(window: int | Tensor, keys: int | Tensor, short: Tensor | None) -> int | Tensor:
    """Returns the length of the dense window: ``window``, or all ``keys`` of sequences that are
    ``short``.
    """
    return window if short is None else torch.where(short, keys, window).int()
