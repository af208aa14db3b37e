"""Speculative decoding: passes with several tokens of a request, some of which are rejected."""

from typing import Any

import pytest
from vllm.entrypoints.llm import LLM
from vllm.sampling_params import SamplingParams

from msattn.trainer.errors import UserError
from msattn.trainer.serving.engines.vllm.backend import clear_stats, stats
from msattn.trainer.serving.engines.vllm.plugin import backend_name
from tests.factory import prompts_of
from tests.vllm.engines import MODEL, NO_DRAFTS, SPARSE, answers, engine

DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
    "model": {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 3},
}
# for a draft model, vLLM takes a token per request off a chunk; here no prompt has several
WHOLE = {"max_num_batched_tokens": 2048, "max_num_seqs": 4}
LONG = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@NO_DRAFTS
@pytest.mark.parametrize(
    ("drafts", "reads"),
    [("ngram", {}), ("ngram", {"keys": 0.05}), ("model", {})],
    ids=["n-grams", "n-grams and a share of the keys", "a model"],
)
def test_greedy_tokens_are_those_without_drafts(drafts: str, reads: dict[str, float]) -> None:
    """Each query of drafts reads its own buckets."""
    prompts = [*prompts_of(1, 64, 700, 259), prompts_of(40)[0] * 8]
    options = SPARSE | reads
    with engine(options, **WHOLE) as llm:
        expected = alone(llm, prompts)
        (read,) = llm.collective_rpc(stats)
    with engine(
        options, **WHOLE, speculative_config=DRAFTS[drafts], disable_log_stats=False
    ) as llm:
        llm.collective_rpc(clear_stats)
        assert alone(llm, prompts) == expected
        (counted,) = llm.collective_rpc(stats)
        metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafted, accepted = (
        metrics[f"vllm:spec_decode_num_{name}_tokens"].value for name in ("draft", "accepted")
    )
    assert 0 < accepted < drafted
    assert counted["sparsity"] == pytest.approx(read["sparsity"], abs=0.05)
    assert counted["selectivity"] == pytest.approx(read["selectivity"], rel=0.3)
    assert counted["dense_fallbacks"] == 0


def alone(llm: LLM, prompts: list[list[int]]) -> list[list[list[int]]]:
    """Returns the answers to prompts that share no pass, where drafts would move their chunks."""
    return [answers(llm, [prompt], LONG)[0] for prompt in prompts]


def test_a_draft_model_with_the_backend_is_refused() -> None:
    drafts = DRAFTS["model"] | {"attention_backend": backend_name()}
    with (
        pytest.raises(UserError, match="msattn serves the model, not the draft model"),
        engine(SPARSE, **WHOLE, speculative_config=drafts),
    ):
        pass
