"""The description of passes of one new token for each request, which vLLM captures in CUDA graphs
with its padding.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from msattn.trainer.serving.engines.vllm.backend import Impl, clear_stats, stats
from tests.factory import prompts_of
from tests.vllm.engines import answers, engine

LENGTHS = [65, 700, 1, 330]
PAGE, PADDED = 64, 6
SPARSE: dict[str, Any] = {
    "gate": "embedded",
    "qmodel": "embedded",
    "probes": 4,
    "recent": 32,
    "sink": 1,
    "dense_below": 0,
}


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """The layers of an engine whose cache has the keys of a prompt, with their builder."""
    with engine(SPARSE) as llm:
        answers(llm, prompts_of(sum(LENGTHS)))
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
        ((group,),) = worker.model_runner.attn_groups
        yield group


def test_padded_passes_are_computed_as_others(group: Any) -> None:
    given = padded()
    got = attend(group, given)
    unpadded = replace(
        given, query_start_loc=given.query_start_loc[: len(LENGTHS) + 1],
        seq_lens=given.seq_lens[: len(LENGTHS)],
        num_reqs=len(LENGTHS), num_actual_tokens=len(LENGTHS), max_query_len=2,
        block_table_tensor=given.block_table_tensor[: len(LENGTHS)],
        slot_mapping=given.slot_mapping[: len(LENGTHS)],
    )  # fmt: skip
    torch.testing.assert_close(got[:, : len(LENGTHS)], attend(group, unpadded))


@pytest.mark.parametrize("number", [1, 2])
def test_passes_that_are_captured_wait_for_no_device(group: Any, number: int) -> None:
    """Of new tokens, or of some of their drafts. Fake tensors have no values that could be read."""
    builder, given = group.get_metadata_builder(), padded()
    given = replace(
        given, seq_lens=given.seq_lens[::number], num_reqs=PADDED // number, max_query_len=number,
        query_start_loc=given.query_start_loc[::number],
        block_table_tensor=given.block_table_tensor[::number],
    )  # fmt: skip
    support = builder.get_cudagraph_support(builder.vllm_config, builder.kv_cache_spec)
    assert support == AttentionCGSupport.UNIFORM_BATCH
    layer = builder.vllm_config.compilation_config.static_forward_context[group.layer_names[0]]
    q, k, v = heads(layer.impl, PADDED)
    with FakeTensorMode(allow_non_fake_inputs=True):
        metadata = replace(builder.build(0, given), drafts=4)
        metadata.begin_pass()
        metadata.inputs(0, q, k, v, scale=1.0, softcap=None)
    assert metadata.current.decoded is not None
    assert len(metadata.current.decoded.kv_len) == PADDED
    assert not metadata.current.prompts


def test_layers_run_before_they_are_captured(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the capture's lengths, which vLLM's own run before it may not have; it counts nothing
    and changes no request.
    """
    builder, given = group.get_metadata_builder(), padded()
    given = replace(
        given,
        seq_lens=torch.ones_like(given.seq_lens),
        slot_mapping=torch.full_like(given.slot_mapping, -1),
    )
    layers = builder.vllm_config.compilation_config.static_forward_context
    held = [layers[name].kv_cache[1:].clone() for name in group.layer_names]
    folded = builder.sparse.dispatch.routed.router._folded
    folded.clear()
    before = builder.sparse.stats()
    ran = []
    forward = Impl.forward
    monkeypatch.setattr(
        Impl,
        "forward",
        lambda self, layer, *args: ran.append(layer.layer_name) or forward(self, layer, *args),
    )
    metadata = builder.build_for_cudagraph_capture(given)
    assert ran == list(group.layer_names)
    assert metadata.tokens == PADDED
    assert len(folded) == len(builder.sparse.dispatch.routed.layers)
    assert builder.sparse.stats() == before
    assert all(
        torch.equal(layers[name].kv_cache[1:], kept)
        for name, kept in zip(group.layer_names, held, strict=True)
    )
    builder.build_for_cudagraph_capture(replace(given, max_query_len=2))
    assert len(ran) == len(group.layer_names)  # graphs hold new tokens only


def test_statistics_are_cleared(group: Any) -> None:
    worker = SimpleNamespace(model_runner=SimpleNamespace(attn_groups=((group,),)))
    attend(group, padded())
    assert stats(worker)["selectivity"]
    clear_stats(worker)
    assert not {name: value for name, value in stats(worker).items() if value}


def padded() -> CommonAttentionMetadata:
    """Returns a pass as vLLM describes it for a graph; requests of padding have no keys, and their
    slot is -1.
    """
    lengths = torch.tensor([*LENGTHS, *[0] * (PADDED - len(LENGTHS))], dtype=torch.int32)
    needed = -(-lengths // PAGE)
    table = torch.zeros(PADDED, 4096 // PAGE, dtype=torch.int32)
    for row, end, pages in zip(
        table, (1 + needed.cumsum(0)).tolist(), needed.tolist(), strict=True
    ):
        row[:pages] = torch.arange(end - pages, end)
    last = (lengths.long() - 1).clamp(min=0)
    slots = table.gather(1, last[:, None] // PAGE).squeeze(1).long() * PAGE + last % PAGE
    starts = torch.arange(PADDED + 1, dtype=torch.int32).clamp(max=len(LENGTHS))
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=PADDED,
        num_actual_tokens=PADDED,
        max_query_len=1, max_seq_len=4096, block_table_tensor=table,
        slot_mapping=torch.where(lengths > 0, slots, -1),
    )  # fmt: skip


def attend(group: Any, given: CommonAttentionMetadata) -> Tensor:
    """Returns the attention of the layers for random queries and keys, ``[layers, tokens, Hq,
    D]``.
    """
    builder = group.get_metadata_builder()
    metadata = builder.build(0, given)
    layers = builder.vllm_config.compilation_config.static_forward_context
    out = []
    for layer in (layers[name] for name in group.layer_names):
        q, k, v = heads(layer.impl, given.num_actual_tokens)
        out.append(
            layer.impl.forward(layer, q, k, v, layer.kv_cache, metadata, torch.empty_like(q))
        )
    return torch.stack(out)


def heads(impl: Impl, tokens: int) -> tuple[Tensor, ...]:
    """Returns random queries, keys and values ``[tokens, H, D]``, of which the first are the same
    for any number.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = (impl.num_heads, impl.num_kv_heads, impl.num_kv_heads)
    return tuple(
        torch.randn(PADDED, n, impl.head_size, generator=generator)[:tokens].half() for n in numbers
    )
