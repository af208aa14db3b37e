"""attach: dense results if everything is read, statistics of what is read, the restored model."""

from pathlib import Path
from typing import Any

import pytest
import torch

import msattn
from msattn.trainer.config import SelectConfig
from msattn.trainer.config.policies import TopK
from msattn.trainer.errors import UserError
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.selection import Selection
from msattn.trainer.methods.untrained.scores.mean_pool import MeanPool
from msattn.trainer.serving.attach import attach, load
from msattn.trainer.serving.statistics import SparseStats
from tests.factory import random_partition, random_tokens, tiny_model
from tests.serving.decoding import close, generate
from tests.sparse import BLOCK, LAYERS, attach_reading_all, gate_for, save


@pytest.fixture
def model() -> Any:
    return tiny_model("llama")


@torch.no_grad()
def test_norms_of_queries_and_keys_under_autocast() -> None:
    """They return fp32, as RoPE does, and values are bfloat16."""
    model, ids = tiny_model("qwen3"), random_tokens(1, 70)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(ids).logits
        with attach_reading_all(model) as sparse:
            torch.testing.assert_close(model(ids).logits, expected, rtol=0.05, atol=0.2)
            assert sparse.stats()["dense_fallbacks"] == 0


@torch.no_grad()
def test_stats_of_prefill_and_decoding(model: Any) -> None:
    ids = random_tokens(1, 160)  # 10 row blocks, which see 1 to 10 blocks
    with attach(
        model, gate=gate_for(model), select=SelectConfig(sparsity=0.6), measure_recall=True
    ) as sparse:
        assert set(sparse.stats().values()) == {None, 0}
        generate(model, ids)
        stats = sparse.stats()
    # sink, local and diagonal blocks at least
    kept = sum(min(row, max(3, round(0.4 * row))) for row in range(1, 11))
    assert stats["sparsity"] == pytest.approx(1 - kept / 55)
    assert stats["sparsity_by_layer"] == pytest.approx(dict.fromkeys(range(LAYERS), 1 - kept / 55))
    assert 0.4 < stats["recall"] < 1
    assert stats["selectivity"] is None
    assert stats["dense_fallbacks"] == 0  # decoding has no router

    with attach(
        model,
        qmodel=random_partition(),
        probes=0,
        recent=7,
        sink=1,
        dense_layers=(),
        measure_recall=True,
    ) as sparse:
        generate(model, ids, max_new_tokens=2)
        stats = sparse.stats()
    assert stats["selectivity"] == pytest.approx(8 / 161)
    assert stats["sparsity"] is None
    assert 0 < stats["recall"] < 0.5


@torch.no_grad()
def test_multiscale_counts_pooled_blocks_by_their_zoom(model: Any) -> None:
    ids = random_tokens(1, 160)
    expected = model(ids).logits
    with attach(
        model, gate=gate_for(model), select=SelectConfig(policy="multiscale", shares=[1, 0, 0, 0])
    ) as sparse:
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert sparse.stats()["sparsity"] == 0
    with attach(
        model,
        gate=gate_for(model),
        select=SelectConfig(policy="multiscale", shares=[0.2, 0, 0, 0.8]),
    ) as sparse:
        assert len(generate(model, ids)) == 20
        assert 0.4 < sparse.stats()["sparsity"] < 0.7


@torch.no_grad()
def test_short_prompts_are_dense_by_choice(model: Any) -> None:
    short, long = random_tokens(2, 63), random_tokens(2, 64)
    select = SelectConfig(sparsity=0.8, sink_blocks=0, local_blocks=0)
    routed = {"probes": 1, "recent": 4, "dense_layers": ()}
    with attach(
        model,
        gate=gate_for(model),
        select=select,
        qmodel=random_partition(),
        dense_below=64,
        **routed,
    ) as sparse:
        logits = model(short).logits
        stats = sparse.stats()
        assert (stats["dense_by_choice"], stats["dense_fallbacks"], stats["sparsity"]) == (
            LAYERS,
            0,
            0,
        )
        generate(model, short)  # new tokens are routed after a dense prompt as well
        stats = sparse.stats()
        assert (stats["dense_by_choice"], stats["dense_fallbacks"]) == (2 * LAYERS, 0)
        assert 0 < stats["selectivity"] < 1
        long_logits = model(long).logits
        stats = sparse.stats()
        assert stats["dense_by_choice"] == 2 * LAYERS
        assert 0.1 < stats["sparsity"] < 0.3, "one prompt of three was sparse"
    torch.testing.assert_close(logits, model(short).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(long_logits, model(long).logits, atol=1e-3)


def test_dense_below_by_policy_and_scores(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msattn.trainer.models.break_even.BREAK_EVEN", {0: {0.5: 4096, 0.8: 2048}})
    gate = gate_for(model)

    def dense_below(**options: Any) -> int:
        with attach(model, **options) as sparse:
            return sparse.dispatch.dense_below

    assert dense_below(gate=gate) == 4096
    assert dense_below(gate=gate, select=SelectConfig(sparsity=0.8)) == 2048
    assert dense_below(gate=gate, dense_below=17) == 17
    assert dense_below(gate=gate, select=SelectConfig(policy="nucleus")) == 0, (
        "the sparsity of nucleus is not known in advance"
    )
    assert dense_below(select=SelectConfig(scores="oracle")) == 0, (
        "the oracle needs dense attention anyway"
    )
    assert dense_below(select=Selection(TopK(sparsity=0.5), MeanPool(BLOCK))) == 0
    assert dense_below(qmodel=random_partition(), probes=1) == 0, "unused without a selection"
    for value in (-1, "never"):
        with pytest.raises(UserError, match=rf"dense_below={value!r}: expected an integer"):
            dense_below(gate=gate, dense_below=value)


@torch.no_grad()
def test_dense_layers_read_every_key(model: Any) -> None:
    ids = random_tokens(1, 60)
    dense = generate(model, ids)
    with attach(
        model, qmodel=random_partition(), probes=0, recent=1, dense_layers=(0, 1)
    ) as sparse:
        close(generate(model, ids), dense)
        assert sparse.stats()["selectivity"] is None
        assert sparse.stats()["dense_fallbacks"] == 0


@torch.no_grad()
def test_saved_artifacts_match_loaded_ones(model: Any, tmp_path: Path) -> None:
    modules = gate_for(model), random_partition(), QModel(random_partition(), 2, 8).eval()
    paths = [save(tmp_path, model, module) for module in modules]
    assert [type(load(path)) for path in paths] == [Gate, KMeans, QModel]
    assert type(msattn.load(str(paths[2]))) is QModel
    ids = random_tokens(1, 50)
    for router_path, router in zip(paths[1:], modules[1:], strict=True):
        found = []
        for gate, qmodel in ((paths[0], router_path), (modules[0], router)):
            with msattn.attach(model, gate=gate, qmodel=qmodel, probes=2, recent=4):
                found.append(generate(model, ids))
        assert torch.equal(*found)


def test_stats_print_in_a_line() -> None:
    model = tiny_model()
    with attach(model, gate=gate_for(model), select=SelectConfig(sparsity=0.0)) as sparse:
        assert str(sparse.stats()) == "no pass was counted"
        model(random_tokens(1, 160))
        stats = sparse.stats()
    assert isinstance(stats, dict)
    assert f"{stats}" == "sparsity 0"
    assert (
        repr(SparseStats(stats | {"dense_by_choice": 3, "recall": 0.98765}))
        == "sparsity 0, recall 0.988, dense_by_choice 3"
    )
    assert repr(SparseStats(sparsity_by_layer={0: 0.5, 1: 0.75})) == "sparsity_by_layer 0.5 to 0.75"
