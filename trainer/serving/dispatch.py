"""The decision how attention is computed, for contiguous and paged caches and for steps: dense, over blocks, or over buckets.

A pass over several tokens, of a prompt or after cached ones, reads the blocks of a selection (SeerAttention). A pass over one
new token, or over a few as in the verification of a draft, reads the dense window and the buckets of a router (SAAP) for each.
"""

import sys
from dataclasses import dataclass
from enum import StrEnum

from msattn.trainer.methods.buckets import MAX_ROUTED_TOKENS
from msattn.trainer.methods.selection import Selection
from msattn.trainer.serving.routed import RoutedDecoding


class Way(StrEnum):
    """Ways to compute attention; the dense ones but the first are counted under their values."""

    DENSE = "dense"
    DENSE_BY_CHOICE = "dense_by_choice"
    DENSE_FALLBACK = "dense_fallbacks"
    BLOCKS = "blocks"
    BUCKETS = "buckets"


@dataclass(frozen=True)
class Dispatch:
    """Decides by lengths how the attention of a layer is computed."""

    selection: Selection | None
    routed: RoutedDecoding | None
    dense_below: int  # number of keys below which prompts are dense, because that is faster

    def is_prompt(self, queries: int, keys: int) -> bool:
        """Returns whether the tokens of a pass are served together as a prompt, rather than each as a new token."""
        return queries == keys or queries > (1 if self.routed is None else MAX_ROUTED_TOKENS)

    def of_prompt(self, queries: int, keys: int, *, known: bool = True, ends: bool = True) -> Way:
        """Returns the way of a prompt, or of a chunk after which it ``ends``.

        ``known`` says whether a gate has what it needs of cached keys.
        """
        if self.selection is None:
            return Way.DENSE
        if keys < self.dense_below or (ends and queries <= self.selection.always.dense_queries):
            return Way.DENSE_BY_CHOICE
        return Way.BLOCKS if known or self.selection.gate is None else Way.DENSE_FALLBACK

    def of_tokens(self, layer: int, keys: int | None, batch: int, *, known: bool = True) -> Way:
        """Returns the way of new tokens of a ``batch`` of sequences; ``keys`` is the number of keys of the longest one.

        It is None where only the device knows them, as in CUDA graphs; ``known`` says whether keys have buckets to read.
        """
        if self.routed is None or layer not in self.routed.layers:
            return Way.DENSE
        if keys is not None and keys < self.routed_from(batch):
            return Way.DENSE_BY_CHOICE
        return Way.BUCKETS if known else Way.DENSE_FALLBACK

    def routed_from(self, batch: int) -> int:
        """Returns the number of keys from which new tokens read buckets."""
        return self.routed.routed_from(batch) if self.routed is not None and self.routed.layers else sys.maxsize
