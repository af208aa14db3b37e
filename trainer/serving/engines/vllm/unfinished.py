"""Chunks that do not end their prompts. Only what the scheduler sends to a worker tells them."""

from typing import Any

from msattn.trainer.methods.gate.attn_gate import LAST_QUERIES


class UnfinishedChunks:
    """The chunks of the current pass that do not end their prompts, in ``sizes``: numbers of
    queries and of keys.

    The question that ends a prompt may begin in the chunk before the last one. So a chunk after
    which fewer than ``LAST_QUERIES`` tokens follow counts as an end, too. A pair that also belongs
    to an end of another prompt is left out.
    """

    def __init__(self) -> None:
        self.sizes: set[tuple[int, int]] = set()
        self._lengths: dict[str, int] = {}  # tokens of each request that are read as a prompt

    def begin(self, scheduled: Any) -> None:
        """Begins the pass of vLLM's SchedulerOutput."""
        for name in scheduled.finished_req_ids:
            self._lengths.pop(name, None)
        new, cached = scheduled.scheduled_new_reqs, scheduled.scheduled_cached_reqs
        # a preempted request is read again with its answer; for runner V2 it is a new one
        self._lengths |= {each.req_id: _length(each) for each in new}
        for name in cached.resumed_req_ids & cached.all_token_ids.keys():
            self._lengths[name] = len(cached.all_token_ids[name])
        computed = {each.req_id: each.num_computed_tokens for each in new}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        unfinished, ends = set[tuple[int, int]](), set[tuple[int, int]]()
        for name, queries in scheduled.num_scheduled_tokens.items():
            keys = computed[name] + queries
            before_last = self._lengths[name] - keys >= LAST_QUERIES
            (unfinished if before_last else ends).add((queries, keys))
        self.sizes = unfinished - ends

    def end(self) -> None:
        """Ends the pass: vLLM's dummy passes contain no prompts."""
        self.sizes = set()


def _length(request: Any) -> int:
    """Returns the number of a new request's tokens that are read as a prompt."""
    tokens = (request.prefill_token_ids, request.prompt_token_ids, request.prompt_embeds)
    return len(next(each for each in tokens if each is not None))
