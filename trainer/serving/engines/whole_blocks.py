"""Chunks of prompts that end where a block of the selection ends: answers do not depend on what
else a pass computes.
"""

from collections.abc import Iterable, Iterator
from typing import Any


class WholeBlocks:
    """Cuts the prompts that a scheduler of transformers' continuous batching divides between passes
    at whole blocks.

    - A prompt that is cut elsewhere would have other row blocks.
    - A selection may look at the last tokens of a prompt one by one. They stay in one chunk as far
      as a pass has room for them.
    - Prefix sharing never takes these last tokens from the cache. If a single token were left, it
      would be decoded.
    - A prompt for which a pass has less than a block waits for a later pass. The prompts behind it
      wait, too: otherwise they would take its place again and again.

    The scheduler's methods that know the tokens left in a pass are replaced, and so is the search
    of its cache.
    """

    def __init__(self, scheduler: Any, block: int, last: int) -> None:
        self.block, self.last = block, last
        self._left = self._last = 0  # tokens of the pass
        self._process, self._schedule = scheduler._process_candidates, scheduler._schedule_request
        scheduler._process_candidates = self._process_candidates
        scheduler._schedule_request = self._schedule_request
        self._search = scheduler.cache.search_prefix_match
        scheduler.cache.search_prefix_match = self._search_prefix_match

    def _process_candidates(
        self, candidates: Iterable[Any], token_budget: int, *others: Any
    ) -> Any:
        """Stands in for the scheduler's method, with the same arguments."""
        self._left, self._last = token_budget, min(self.last, token_budget - self.block)
        return self._process(self._ready(candidates), token_budget, *others)

    def _ready(self, candidates: Iterable[Any]) -> Iterator[Any]:
        """Yields the requests that can join the pass: those with a new token to decode, and
        prompts of which a whole block fits, up to the first prompt that does not.
        """
        waits = False
        for state in candidates:
            if not _is_decoded(state):
                waits = waits or not self._chunk(state, len(state.remaining_prefill_tokens))
                if waits:
                    continue
            yield state

    def _schedule_request(
        self, state: Any, tokens: list[int], token_budget: int, *others: Any
    ) -> None:
        """Stands in for the scheduler's method, with the same arguments."""
        # a prefix in the cache has shortened what is left since the request was ready
        if not _is_decoded(state):
            token_budget = self._chunk(state, len(tokens)) or min(self.block, token_budget)
        self._schedule(state, tokens, token_budget, *others)
        self._left -= len(state.tokens_to_process)

    def _search_prefix_match(self, name: str, tokens: list[int]) -> int:
        """Stands in for the cache's method, which leaves one token or more, with the same
        arguments.
        """
        return self._search(name, tokens[: max(0, len(tokens) - self.last + 1)])

    def _chunk(self, state: Any, tokens: int) -> int:
        """Returns how many of the ``tokens`` that are left of a prompt the next pass takes."""
        if tokens <= self._left:
            return tokens
        first = state.position_offset
        end = min(first + self._left, first + tokens - self._last) // self.block * self.block
        return max(0, end - first)


def _is_decoded(state: Any) -> bool:
    return state.status.name == "DECODING"
