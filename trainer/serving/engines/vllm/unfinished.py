"""Chunks of prompts that others follow. What the scheduler sends to a worker tells them; the
description of a pass, which the backend gets, does not.
"""

from typing import Any


class UnfinishedChunks:
    """The chunks of the current pass that do not end their prompts, in ``sizes``: numbers of
    queries and of keys.

    A pair that belongs to a chunk at the end of another prompt, too, is left out.
    """

    def __init__(self) -> None:
        self.sizes: set[tuple[int, int]] = set()
        self._lengths: dict[str, int] = {}  # tokens of each request that are read as a prompt

    def begin(self, scheduled: Any) -> None:
        """Begins the pass of vLLM's SchedulerOutput."""
        for name in scheduled.finished_req_ids:
            self._lengths.pop(name, None)
        new, cached = scheduled.scheduled_new_reqs, scheduled.scheduled_cached_reqs
        # a preempted request is read again with its answer: as a new one by vLLM's second runner
        self._lengths |= {
            each.req_id: len(each.prefill_token_ids or each.prompt_token_ids or ()) for each in new
        }
        for name in cached.resumed_req_ids & cached.all_token_ids.keys():
            self._lengths[name] = len(cached.all_token_ids[name])
        computed = {each.req_id: each.num_computed_tokens for each in new}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        unfinished, ends = set[tuple[int, int]](), set[tuple[int, int]]()
        for name, queries in scheduled.num_scheduled_tokens.items():
            keys = computed[name] + queries
            (unfinished if keys < self._lengths[name] else ends).add((queries, keys))
        self.sizes = unfinished - ends

    def end(self) -> None:
        """Ends the pass: those that vLLM makes up belong to no prompt."""
        self.sizes = set()
