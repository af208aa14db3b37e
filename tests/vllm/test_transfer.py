"""Prompts read in one process, by msattn, and answered in another, which receives their pages."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from msattn.trainer.serving.engines.vllm.backend import clear_stats, stats
from tests.factory import prompts_of
from tests.house.modules import ROOT
from tests.vllm.engines import answers, cached_tokens, engine

# the two tokens that the connector leaves to the receiving side are read densely on both sides
SPARSE: dict[str, Any] = {
    "gate": "embedded",
    "select": {"policy": "calibrated", "dense_queries": 2},
    "sparsity": 0.8,
    "dense_below": 0,
}
# without state beside the pages, and dense at these lengths
DENSE: dict[str, Any] = {"select": "quest", "dense_below": 4096}
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
WHOLE = {"max_num_batched_tokens": 1024}  # the connector sends prompts of one chunk
FEW_PAGES = {"num_gpu_blocks_override": 24, "max_model_len": 1024}


def test_tokens_are_those_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)  # the processes import this module
    prompts = prompts_of(641, 897)
    with engine(SPARSE, **WHOLE) as llm:
        first = [answers(llm, [prompt], FIRST)[0] for prompt in prompts]
        turns = [prompt + token for prompt, (token,) in zip(prompts, first, strict=True)]
        expected = [answers(llm, [turn])[0] for turn in turns]
    sent_first, sent = in_process(SPARSE, "kv_producer", tmp_path, prompts, FIRST)
    assert sent_first == first
    assert 0.3 < sent["sparsity"] < 0.9
    got, received = in_process(DENSE, "kv_consumer", tmp_path, turns)
    assert got == expected
    assert received["found"] == [640, 896]


BOTH: dict[str, Any] = SPARSE | {"qmodel": "embedded", "recent": 64}


@pytest.mark.parametrize(
    ("cache", "reads"), [({}, {}), ({"kv_cache_dtype": "fp8"}, {"keys": 0.1})], ids=["", "in FP8"]
)
def test_sparse_tokens_are_those_of_one_process(
    cache: dict[str, str],
    reads: dict[str, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Buckets and pooled keys of received keys are computed again, in pages that other requests
    have used; so are those of stored prompts, which the connector also loads for a producer.
    """
    monkeypatch.syspath_prepend(ROOT)
    prompts, others = prompts_of(641, 897), prompts_of(700, 1000)
    options = BOTH | reads
    with engine(options, **WHOLE, **cache) as llm:
        first = [answers(llm, [prompt], FIRST)[0] for prompt in prompts]
        turns = [prompt + token for prompt, (token,) in zip(prompts, first, strict=True)]
        llm.collective_rpc(clear_stats)
        expected = [answers(llm, [turn])[0] for turn in turns]
        (read,) = llm.collective_rpc(stats)
    in_process(options, "kv_producer", tmp_path, prompts, FIRST, cache=cache)
    for role in ("kv_consumer", "kv_producer"):
        got, received = in_process(options, role, tmp_path, turns, cache=cache, before=others)
        assert got == expected
        assert received["found"] == [640, 896]
        assert received["selectivity"] == pytest.approx(read["selectivity"], rel=0.02)
        assert 0 < received["selectivity"] < 0.9


def transfer(role: str, folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def in_process(*args: Any, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(served, *args, **options).result()


def served(
    msattn: dict[str, Any],
    role: str,
    folder: Path,
    prompts: list[list[int]],
    *sampling: Any,
    cache: Mapping[str, Any] = MappingProxyType({}),
    before: Sequence[list[int]] = (),
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the answers to prompts one by one, after those ``before``, and what was read for
    them.
    """
    given: dict[str, Any] = {**WHOLE, **(FEW_PAGES if before else {}), **cache}
    with engine(msattn, **given, kv_transfer_config=transfer(role, folder)) as llm:
        for prompt in before:
            answers(llm, [prompt])
        llm.reset_prefix_cache()
        llm.collective_rpc(clear_stats)
        got = [answers(llm, [prompt], *sampling)[0] for prompt in prompts]
        (counted,) = llm.collective_rpc(stats)
        found = [cached_tokens(llm, prompt) for prompt in prompts]
    return got, counted | {"found": found}
