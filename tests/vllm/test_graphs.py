"""Compiled passes, and CUDA graphs of vLLM that hold passes of new tokens with their attention, on
a GPU.
"""

from typing import Any

import pytest
from vllm.compilation import monitor
from vllm.platforms import current_platform

from msattn.trainer.serving.engines.vllm.backend import Builder, clear_stats, stats
from tests.factory import prompts_of
from tests.vllm.engines import EVERY_KEY, MODEL, answers, cached_tokens, engine

SPARSE: dict[str, Any] = {"gate": "embedded", "qmodel": "embedded", "dense_below": 0}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
COMPILED = {"cudagraph_capture_sizes": [1, 2, 4, 8]}  # vLLM's defaults, but for the sizes


@pytest.mark.skipif(not current_platform.is_cpu(), reason="for CPUs")
def test_compiled_passes_read_chunks_and_prefixes_sparsely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU vLLM compiles without graphs; with this variable, without inductor, too. In fp32,
    compiled layers round as others do.
    """
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    prompts = prompts_of(700, 900, prefix=512)
    options = SPARSE | {"select": "topk", "sparsity": 0.7, "recent": 64}
    with engine(options, enable_prefix_caching=False, dtype="float32") as llm:
        expected = [answers(llm, [prompt]) for prompt in prompts]
    with engine(options, enforce_eager=False, dtype="float32") as llm:
        assert llm.llm_engine.vllm_config.compilation_config.mode.name == "DYNAMO_TRACE_ONCE"
        for prompt, tokens in zip(prompts, expected, strict=True):
            llm.collective_rpc(clear_stats)
            assert answers(llm, [prompt]) == tokens
            (counted,) = llm.collective_rpc(stats)
            assert 0.4 < counted["sparsity"] < 0.8
            assert 0.05 < counted["selectivity"] < 0.5
        assert cached_tokens(llm, prompts[-1]) == 896


@pytest.mark.gpu
@pytest.mark.parametrize("options", [EVERY_KEY, SPARSE], ids=["every key", "sparse"])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_captured_passes_give_the_tokens_of_others(
    cache_dtype: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The five requests are padded to eight."""
    # that of an engine of before has ended with it
    monkeypatch.setattr(type(current_platform), "_global_graph_pool", None)
    prompts = prompts_of(1, 64, 700, 333, 65)
    captured = []
    build = Builder.build_for_cudagraph_capture
    monkeypatch.setattr(
        Builder,
        "build_for_cudagraph_capture",
        lambda self, given: (captured.append(given.num_reqs), build(self, given))[1],
    )
    given = {"kv_cache_dtype": cache_dtype}
    with engine(options, **given) as llm:
        expected = answers(llm, prompts)
    assert not captured
    with engine(options, enforce_eager=False, compilation_config=GRAPHS, **given) as llm:
        assert {1, 2, 4, 8} <= set(captured)
        assert answers(llm, prompts) == expected


@pytest.mark.gpu
def test_captured_passes_of_drafts_give_the_tokens_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft model always finds its three drafts."""
    monkeypatch.setattr(type(current_platform), "_global_graph_pool", None)
    # engines with drafts forbid further captures in their process when they have captured
    monkeypatch.setattr(monitor, "cudagraph_capturing_enabled", True)
    prompts, captured = prompts_of(64, 700, 333, 65), set[int]()
    build = Builder.build_for_cudagraph_capture
    monkeypatch.setattr(
        Builder,
        "build_for_cudagraph_capture",
        lambda self, given: (captured.add(given.max_query_len), build(self, given))[1],
    )
    drafts = {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 3}
    given = {"speculative_config": drafts, "max_num_batched_tokens": 2048, "max_num_seqs": 4}
    with engine(SPARSE, **given) as llm:
        expected = [answers(llm, [prompt]) for prompt in prompts]
    graphs = GRAPHS | {"cudagraph_capture_sizes": [4, 8, 16]}
    with engine(SPARSE, enforce_eager=False, compilation_config=graphs, **given) as llm:
        assert 4 in captured
        assert [answers(llm, [prompt]) for prompt in prompts] == expected


@pytest.mark.gpu
def test_the_defaults_give_the_tokens_of_compiled_passes_without_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All but attention is compiled, and captured for short prompts."""
    monkeypatch.setattr(type(current_platform), "_global_graph_pool", None)
    prompts = [*prompts_of(1, 3, 7, 64, 700), *prompts_of(333, 400, prefix=320)]
    defaults = {"enforce_eager": False, "max_num_batched_tokens": 256}
    with engine(SPARSE, compilation_config={"cudagraph_mode": "NONE"}, **defaults) as llm:
        expected = answers(llm, prompts)
    with engine(SPARSE, compilation_config=COMPILED, **defaults) as llm:
        chosen = llm.llm_engine.vllm_config.compilation_config
        assert (chosen.mode.name, chosen.cudagraph_mode.name) == (
            "VLLM_COMPILE",
            "FULL_AND_PIECEWISE",
        )
        assert answers(llm, prompts) == expected
        assert cached_tokens(llm, prompts[-1]) == 384
