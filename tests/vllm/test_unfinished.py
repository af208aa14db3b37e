"""Chunks that others follow, from what the scheduler sends."""

from types import SimpleNamespace as Sent
from typing import Any

import torch

from msattn.trainer.serving.engines.vllm.unfinished import UnfinishedChunks


def scheduled(
    number: dict[str, int],
    *,
    new: dict[str, tuple[int, int]] | None = None,
    cached: dict[str, int] | None = None,
    resumed: dict[str, int] | None = None,
    finished: tuple[str, ...] = (),
) -> Any:
    """Returns a pass with a ``number`` of tokens of each request: ``new`` ones by their lengths and
    computed tokens, ``cached`` ones by the latter; ``resumed`` ones have these many tokens.
    """
    cached, resumed = cached or {}, resumed or {}
    return Sent(
        num_scheduled_tokens=number,
        finished_req_ids=set(finished),
        scheduled_new_reqs=[
            Sent(
                req_id=name,
                prompt_token_ids=[0] * length,
                prefill_token_ids=None,
                prompt_embeds=None,
                num_computed_tokens=computed,
            )
            for name, (length, computed) in (new or {}).items()
        ],
        scheduled_cached_reqs=Sent(
            req_ids=[*cached],
            num_computed_tokens=[*cached.values()],
            resumed_req_ids={*resumed},
            all_token_ids={name: [0] * length for name, length in resumed.items()},
        ),
    )


def test_chunks_before_the_last_one_of_a_prompt() -> None:
    chunks = UnfinishedChunks()
    chunks.begin(scheduled({"a": 200, "b": 56}, new={"a": (200, 0), "b": (900, 64)}))
    assert chunks.sizes == {(56, 120)}
    chunks.end()
    assert chunks.sizes == set()
    chunks.begin(scheduled({"a": 1, "b": 255}, cached={"a": 200, "b": 120}))
    assert chunks.sizes == {(255, 375)}
    chunks.begin(scheduled({"a": 4, "b": 525}, cached={"a": 201, "b": 375}))  # with drafts
    assert chunks.sizes == set()


def test_a_question_may_begin_in_the_chunk_before_the_last_one() -> None:
    chunks = UnfinishedChunks()
    chunks.begin(scheduled({"a": 256, "b": 512}, new={"a": (319, 0), "b": (576, 0)}))
    assert chunks.sizes == {(512, 512)}


def test_prompts_may_be_embeddings() -> None:
    chunks, given = UnfinishedChunks(), scheduled({"a": 256}, new={"a": (0, 0)})
    given.scheduled_new_reqs[0].prompt_token_ids = None
    given.scheduled_new_reqs[0].prompt_embeds = torch.zeros(700, 8)
    chunks.begin(given)
    assert chunks.sizes == {(256, 256)}


def test_preempted_requests_are_read_again_with_their_answers() -> None:
    chunks = UnfinishedChunks()
    chunks.begin(scheduled({"a": 200}, new={"a": (200, 0)}))
    chunks.begin(scheduled({"a": 200}, cached={"a": 0}, resumed={"a": 280}))
    assert chunks.sizes == {(200, 200)}
    again = scheduled({"a": 230}, new={"a": (200, 0)})
    again.scheduled_new_reqs[0].prefill_token_ids = [0] * 300
    chunks.begin(again)
    assert chunks.sizes == {(230, 230)}


def test_a_chunk_as_large_as_the_last_one_of_another_prompt_counts_as_last() -> None:
    chunks = UnfinishedChunks()
    chunks.begin(scheduled({"a": 128, "b": 128}, new={"a": (128, 0), "b": (900, 0)}))
    assert chunks.sizes == set()


def test_a_name_may_be_used_again() -> None:
    chunks = UnfinishedChunks()
    chunks.begin(scheduled({"a": 200}, new={"a": (900, 0)}))
    chunks.begin(scheduled({"a": 200}, new={"a": (200, 0)}, finished=("a",)))
    assert chunks.sizes == set()
