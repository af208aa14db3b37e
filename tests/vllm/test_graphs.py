"""CUDA graphs of vLLM that hold passes of new tokens with their attention, on a GPU."""

from typing import Any

import pytest
from vllm.platforms import current_platform

from msattn.trainer.serving.engines.vllm.backend import Builder
from tests.factory import prompts_of
from tests.vllm.engines import EVERY_KEY, answers, engine

SPARSE: dict[str, Any] = {"gate": "embedded", "qmodel": "embedded", "dense_below": 0}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}


@pytest.mark.gpu
@pytest.mark.parametrize("options", [EVERY_KEY, SPARSE], ids=["every key", "sparse"])
def test_captured_passes_give_the_tokens_of_others(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The five requests are padded to eight."""
    monkeypatch.setattr(type(current_platform), "_global_graph_pool", None)  # that of an engine of before has ended with it
    prompts = prompts_of(1, 64, 700, 333, 65)
    captured = []
    build = Builder.build_for_cudagraph_capture
    monkeypatch.setattr(
        Builder, "build_for_cudagraph_capture", lambda self, given: (captured.append(given.num_reqs), build(self, given))[1]
    )
    with engine(options) as llm:
        expected = answers(llm, prompts)
    assert not captured
    with engine(options, enforce_eager=False, compilation_config=GRAPHS) as llm:
        assert {1, 2, 4, 8} <= set(captured)
        assert answers(llm, prompts) == expected
