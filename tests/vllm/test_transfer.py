"""Prompts read in one process, by msattn, and answered in another, which receives their pages."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from msattn.trainer.errors import UserError
from msattn.trainer.serving.engines.vllm.backend import stats
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


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_received_pages_without_their_state_are_refused(role: str, tmp_path: Path) -> None:
    message = f"kv_transfer_config.kv_role={role}: pages would come without .* expected kv_producer"
    given = {"kv_transfer_config": transfer(role, tmp_path)}
    with pytest.raises(UserError, match=message), engine(SPARSE, **given):
        pass


def transfer(role: str, folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def in_process(*args: Any) -> tuple[list[Any], dict[str, Any]]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(served, *args).result()


def served(
    msattn: dict[str, Any], role: str, folder: Path, prompts: list[list[int]], *sampling: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the answers to prompts one by one, and what was read for them."""
    with engine(msattn, **WHOLE, kv_transfer_config=transfer(role, folder)) as llm:
        got = [answers(llm, [prompt], *sampling)[0] for prompt in prompts]
        (counted,) = llm.collective_rpc(stats)
        found = [cached_tokens(llm, prompt) for prompt in prompts]
    return got, counted | {"found": found}
