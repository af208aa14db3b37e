"""Tokens of vLLM with the backend: its own if everything is read, and those of an attached model of
transformers.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams

from msattn.trainer import models
from msattn.trainer.config import GateConfig, ModelConfig
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.serving.attach import attach
from msattn.trainer.serving.engines.vllm.backend import clear_stats, stats
from msattn.trainer.serving.paged.state import PagedState, PromptChunk
from tests.factory import prompts_of
from tests.serving.paged.batches import alone, pooled_again
from tests.sparse import save
from tests.vllm.engines import EVERY_KEY, NEW, OPTIONS, answers, cached_tokens, engine

RAGGED = [*prompts_of(1, 64, 65, 900), *prompts_of(400, 600, prefix=300)]
ALONE = {"min_new_tokens": NEW, "prefill_chunk_size": OPTIONS["max_num_batched_tokens"]}
SPARSE: dict[str, Any] = {
    "gate": "embedded",
    "qmodel": "embedded",
    "sparsity": 0.9,
    "recent": 256,
    "dense_below": 0,
}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Checks pooled keys against the cached ones wherever they are used; the numbers of blocks that
    were known.
    """
    found, pool = list[int](), PagedState.pool_keys

    def checked(self: PagedState, x: Any, chunk: PromptChunk, rotation: Any) -> torch.Tensor:
        pooled = pool(self, x, chunk, rotation)
        again = pooled_again(self, x, chunk, rotation)
        torch.testing.assert_close(pooled, again, rtol=0, atol=0.01)
        found.append(chunk.pooled)
        return pooled

    monkeypatch.setattr(PagedState, "pool_keys", checked)
    return found


def test_reading_every_key_gives_the_tokens_of_dense_vllm(known: list[int]) -> None:
    """Prompts are chunked, share prefixes, and decode beside other prompts. Blocks lie in one page,
    or in four of which some are shared.
    """
    with engine() as llm:
        expected = answers(llm, RAGGED)
    for page, cached in ((64, 576), (16, 592)):
        with engine(EVERY_KEY, block_size=page) as llm:
            assert answers(llm, RAGGED) == expected
            assert cached_tokens(llm, RAGGED[-1]) == cached
            assert answers(llm, RAGGED[-2:]) == expected[-2:]
            (counted,) = llm.collective_rpc(stats)
        read = (counted["sparsity"], counted["selectivity"], counted["dense_fallbacks"])
        assert read == (0, 1, 0)
        assert max(known[-2:]) == cached // 64  # on a GPU requests have another order


def test_preempted_requests_with_several_answers_give_the_tokens_of_dense_vllm(
    known: list[int],
) -> None:
    """All prompts together hold more pages than there are."""
    prompts = prompts_of(500, 600, 700)
    options = {"max_model_len": 1024, "disable_log_stats": False}
    sampling = SamplingParams(n=2, top_k=1, max_tokens=80, ignore_eos=True)
    with engine(num_gpu_blocks_override=24, **options) as llm:
        expected = answers(llm, prompts, sampling)
    for page, number in ((64, 24), (16, 90)):
        pages = {"block_size": page, "num_gpu_blocks_override": number}
        with engine(EVERY_KEY, **pages, **options) as llm:
            assert answers(llm, prompts, sampling) == expected
            metrics = {metric.name: metric for metric in llm.get_metrics()}
        assert metrics["vllm:num_preemptions"].value > 0
    assert max(known) > 0


@pytest.mark.parametrize(
    ("page", "reads"),
    [(64, {}), (128, {}), (16, {}), (64, {"keys": 0.05}), (32, {"keys": 0.05})],
    ids=["64", "128", "16", "keys", "keys, 32"],
)
def test_sparse_tokens_are_those_of_an_attached_model(page: int, reads: dict[str, float]) -> None:
    """Both read prompts in the same chunks."""
    prompts = prompts_of(900, 1100)
    model: Any = models.load(ModelConfig(name="tiny", path="embedded"), dtype="float32").model
    with attach(model, **SPARSE, **reads) as sparse:
        expected = [alone(model, prompt, NEW, **ALONE) for prompt in prompts]
        read = sparse.stats()
    options = {"block_size": page, "enable_prefix_caching": False, "dtype": "float32"}
    with engine(SPARSE | reads, **options) as llm:
        llm.collective_rpc(clear_stats)  # of passes that warm up
        assert [answers(llm, [prompt])[0][0] for prompt in prompts] == expected
        (counted,) = llm.collective_rpc(stats)
    for name in ("sparsity", "selectivity"):
        assert 0.05 < counted[name] < 0.9
    assert counted["sparsity"] == pytest.approx(read["sparsity"])
    assert counted["selectivity"] == pytest.approx(read["selectivity"], rel=0.02)


def test_gates_of_16_keys_and_pages_as_large(tmp_path: Path) -> None:
    model: Any = models.load(ModelConfig(name="tiny", path="embedded"), dtype="float32").model
    gate = Gate.build(model.config, GateConfig(block_size=64, key_block_size=16))
    given = SPARSE | {"gate": str(save(tmp_path, model, gate)), "select": "topk", "sparsity": 0.7}
    (prompt,) = prompts_of(900)
    with attach(model, **given) as sparse:
        expected = alone(model, prompt, NEW, **ALONE)
        read = sparse.stats()
    with engine(given, block_size=16, dtype="float32") as llm:
        llm.collective_rpc(clear_stats)
        assert answers(llm, [prompt]) == [[expected]]
        (counted,) = llm.collective_rpc(stats)
    assert counted["sparsity"] == pytest.approx(read["sparsity"])
    assert 0.5 < counted["sparsity"] < 0.8


def test_a_cached_prefix_is_not_read_again_and_its_blocks_can_be_selected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prefix ends with a chunk, so that both engines cut the prompt at the same places."""
    first, second = prompts_of(532, 900, prefix=512)
    options = SPARSE | {"select": "topk", "sparsity": 0.7}
    with engine(options, enable_prefix_caching=False) as llm:
        expected = answers(llm, [second])
    chunks, pool = list[tuple[Any, ...]](), PagedState.pool_keys

    def recorded(self: PagedState, x: Any, chunk: PromptChunk, *others: Any) -> torch.Tensor:
        chunks.append((chunk.queries, chunk.keys, chunk.pooled, chunk.ends_prompt))
        return pool(self, x, chunk, *others)

    monkeypatch.setattr(PagedState, "pool_keys", recorded)
    for page in (64, 16):
        with engine(options, block_size=page) as llm:
            answers(llm, [first])
            chunks.clear()
            llm.collective_rpc(clear_stats)
            assert answers(llm, [second]) == expected
            (counted,) = llm.collective_rpc(stats)
        assert set(chunks) == {(256, 768, 512 // 64, False), (132, 900, 768 // 64, True)}
        assert 0.5 < counted["sparsity"] < 0.8


def test_a_prefix_that_decoding_left_is_read_sparsely(known: list[int]) -> None:
    """Pages of decoded tokens have no pooled keys; later prompts recover them."""
    (prompt,) = prompts_of(640)
    long = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    with engine() as llm:
        (((turn),),) = answers(llm, [prompt], long)
        second = prompt + turn + prompts_of(333)[0]
        expected = answers(llm, [second])
    for page in (64, 16):
        with engine(EVERY_KEY, block_size=page) as llm:
            assert answers(llm, [prompt], long) == [[turn]]
            known.clear()
            assert answers(llm, [second]) == expected
            (counted,) = llm.collective_rpc(stats)
        assert known[0] == 640 // 64
        assert counted["dense_fallbacks"] == 0


def test_short_prompts_and_a_gate_or_a_router_alone() -> None:
    (prompt,) = prompts_of(500)
    with engine() as llm:
        expected = answers(llm, [prompt])
    with engine({**SPARSE, "dense_below": 1000}) as llm:
        assert answers(llm, [prompt]) == expected
        (counted,) = llm.collective_rpc(stats)
    assert (counted["sparsity"], counted["selectivity"]) == (0, 1)
    assert counted["dense_by_choice"] > 0
    for name in ("gate", "qmodel"):
        unused = ("probes",) if name == "gate" else ("select", "sparsity")
        options = {
            key: value
            for key, value in EVERY_KEY.items()
            if key not in (*unused, *({"gate", "qmodel"} - {name}))
        }
        with engine(options) as llm:
            assert answers(llm, [prompt]) == expected
