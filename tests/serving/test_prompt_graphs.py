"""Tests of prompts as CUDA graphs, which a CPU emulates: a replay launches the captured kernels
again.
"""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from msattn.trainer.serving.attach import attach
from msattn.trainer.serving.contiguous.install import install_layers
from msattn.trainer.serving.graphs import prompt_graphs
from msattn.trainer.serving.graphs.prompt_graphs import PromptGraph, PromptGraphs
from tests.factory import random_tokens, tiny_model
from tests.serving.decoding import ROUTED, close
from tests.sparse import gate_for

BLOCKS: dict[str, Any] = {"select": {"sparsity": 0.5}, "dense_below": 0}


class Emulated:
    """A graph on a CPU, which runs what is captured, but counts nothing on the device then."""

    statistics: Any

    def capture_begin(self, capture_error_mode: str) -> None:
        self.held = [(x, x.clone()) for x in self.statistics._tensors()]

    def capture_end(self) -> None:
        for x, held in self.held:
            x.copy_(held)

    def replay(self) -> None:
        owner, launch, empty = self.owner, self.launch, self.empty  # type: ignore[attr-defined]
        cache, counts = copy.deepcopy(empty), self.statistics.counts
        owner.hidden.copy_(launch(owner.inputs, cache))
        self.statistics._counts = counts  # a replay runs nothing on the host
        for mine, new in zip(owner.cache.layers, cache.layers, strict=True):
            vars(mine).update(vars(new))


class NoEvent:
    """An event where nothing is asynchronous."""

    def record(self) -> None: ...
    def wait(self) -> None: ...


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, where: str) -> Iterator[None]:
    if where == "cuda":
        yield
        return
    begin = PromptGraph.begin

    def begin_emulated(self: Any, inputs: dict[str, Tensor], cache: Any, launch: Any) -> Tensor:
        empty, Emulated.statistics = copy.deepcopy(self.cache), self.statistics
        hidden = begin(self, inputs, cache, launch)
        vars(self.graph).update(owner=self, launch=launch, empty=empty)
        return hidden

    monkeypatch.setattr(PromptGraph, "begin", begin_emulated)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Emulated)
    monkeypatch.setattr(torch.cuda, "Event", NoEvent)
    monkeypatch.setattr(prompt_graphs, "on_capture_stream", lambda device: nullcontext())
    yield


def run(model: Any, ids: Tensor, steps: int = 3) -> tuple[Tensor, DynamicCache]:
    """Returns the logits of a prompt and of tokens after it, and the cache."""
    cache, logits = DynamicCache(config=model.config), []
    for part in (ids[:, :-steps], *ids[:, -steps:].split(1, dim=1)):
        mask = torch.ones_like(ids[:, : cache.get_seq_length() + part.shape[1]])
        logits.append(model(part, past_key_values=cache, attention_mask=mask).logits)
    return torch.cat(logits, dim=1), cache


@torch.inference_mode()
@pytest.mark.parametrize("options", [BLOCKS, ROUTED], ids=["blocks", "buckets"])
def test_replays_equal_ordinary_passes(options: dict[str, Any], where: str, emulated: None) -> None:
    model = tiny_model().to(where)
    options = options | ({"gate": gate_for(model)} if options is BLOCKS else {})
    texts = [random_tokens(1, 83, seed=seed).to(where) for seed in range(5)]
    with attach(model, **options, cuda_graphs=False) as sparse:
        expected, wanted = [run(model, ids)[0] for ids in texts], sparse.stats()
    with attach(model, **options) as sparse:
        steps: Any = vars(model.model)["forward"]
        steps.prompts = steps.prompts or PromptGraphs(model.model, sparse)
        steps.cuda_graphs = where == "cuda"
        found = [run(model, ids) for ids in texts]
        graphs: list[Any] = list(steps.prompts._graphs.values())
        assert [graph.graph is not None for graph in graphs] == [True]
        for (logits, _), want in zip(found, expected, strict=True):
            close(logits, want)
        stats = sparse.stats()
        assert stats["sparsity"] == pytest.approx(wanted["sparsity"])
        assert stats["selectivity"] == pytest.approx(wanted["selectivity"])
        # Caches are their own: later prompts have not changed those of earlier ones.
        again = DynamicCache(config=model.config)
        model(texts[2][:, :-3], past_key_values=again)
        layers: list[Any] = [found[2][1].layers, again.layers]
        for mine, fresh in zip(*layers, strict=True):
            close(mine.keys[:, :, :80], fresh.keys)
        padded = torch.ones_like(texts[0])
        padded[:, :9] = 0
        close(model(texts[0], attention_mask=padded).logits[:, 9:], model(texts[0][:, 9:]).logits)


@torch.inference_mode()
def test_a_graph_counts_nothing_of_other_threads(
    where: str, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a prompt is captured, another thread counts 5 passes, which are counted once."""
    model, captured = tiny_model().to(where), prompt_graphs.captured

    def captured_meanwhile(launch: Any) -> Any:
        other = Thread(target=sparse.statistics.count, args=("dense_fallbacks", 5))
        other.start()
        other.join()
        return captured(launch)

    monkeypatch.setattr(prompt_graphs, "captured", captured_meanwhile)
    with attach(model, gate=gate_for(model), **BLOCKS) as sparse:
        steps: Any = vars(model.model)["forward"]
        steps.prompts = steps.prompts or PromptGraphs(model.model, sparse)
        counted = []
        for seed in range(4):
            run(model, random_tokens(1, 20, seed=seed).to(where), steps=1)
            counted.append(sparse.stats()["dense_fallbacks"])
    assert counted == [0, 5, 5, 5]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("lengths", "captured", "replayed"),
    [
        ([20, 20, 21, 22, 23, 20], [20], [20]),
        ([20, 21, 20, 21, 22, 23, 20, 21], [20, 21], [20, 21]),
        ([20, 21, 22] * 3, [20, 21], [20, 21]),
        ([20, 21] * 2 + [22] * 4 + [21], [20, 21, 22], [22, 21]),
    ],
    ids=["one length", "single other lengths", "three lengths in turn", "another length"],
)
def test_graphs_are_kept_while_they_are_used(
    lengths: list[int],
    captured: list[int],
    replayed: list[int],
    where: str,
    emulated: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph is replaced only if none of the latest prompts used it."""
    monkeypatch.setattr(prompt_graphs, "MAX_RECENT", 4)
    found: dict[str, list[int]] = {"begin": [], "replay": []}

    def counted(name: str) -> Any:
        own, calls = getattr(PromptGraph, name), found[name]

        def call(self: PromptGraph, inputs: dict[str, Tensor], *given: Any) -> Tensor:
            calls.append(next(iter(inputs.values())).shape[1])
            return own(self, inputs, *given)

        return call

    for name in found:
        monkeypatch.setattr(PromptGraph, name, counted(name))
    model = tiny_model().to(where)
    with attach(model, gate=gate_for(model), **BLOCKS) as sparse:
        steps: Any = vars(model.model)["forward"]
        steps.prompts = steps.prompts or PromptGraphs(model.model, sparse)
        for length in lengths:
            run(model, random_tokens(1, length + 1).to(where), steps=1)
    assert found == {"begin": captured, "replay": replayed}


@torch.inference_mode()
def test_what_is_not_a_graph(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    with attach(model, **ROUTED) as sparse:
        graphs = PromptGraphs(model.model, sparse)
        cache, ids = DynamicCache(config=model.config), random_tokens(1, 20)
        assert not graphs.serves({}, cache)
        assert graphs.run({"input_ids": ids}, model.model.forward) is None  # there is no cache
        model(ids, past_key_values=cache)
        assert not graphs.serves({"input_ids": ids}, cache)  # it has tokens
        monkeypatch.setattr(prompt_graphs, "MAX_TOKENS", 19)
        empty = DynamicCache(config=model.config)
        install_layers(empty, None, num_layers=len(empty.layers))
        assert graphs.serves({"input_ids": ids}, empty)
        assert not PromptGraphs(model.model, sparse).serves({"input_ids": ids}, empty)
