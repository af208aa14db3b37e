"""Artifacts on a running model: exact where everything is read, counted where not, and gone without a trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import msattn
from msattn.trainer import artifacts
from msattn.trainer.attach import Sparse, attach, load
from msattn.trainer.config import GateConfig, SelectConfig
from msattn.trainer.errors import UserError
from msattn.trainer.models.identity import fingerprint
from msattn.trainer.saap.kmeans import KMeans
from msattn.trainer.saap.qmodel import QModel
from msattn.trainer.seer.gate import Gate
from msattn.trainer.seer.select import MeanPool, Selection, TopK
from msattn.trainer.serving.cache import BucketLayer
from tests.factory import FAMILIES, left_padded, random_tokens, tiny_model

BLOCK, BUCKETS, LAYERS = 16, 6, 2
ALL = SelectConfig(sparsity=0.0, dense_below=0)


@pytest.fixture
def model() -> Any:
    return tiny_model("llama")


def gate_for(model: Any) -> Gate:
    return Gate.build(model.config, GateConfig(block_size=BLOCK)).requires_grad_(False)


def partition(seed: int = 0) -> KMeans:
    centroids = torch.randn(LAYERS, 2, BUCKETS, 16, generator=torch.Generator().manual_seed(seed))
    return KMeans(torch.nn.functional.normalize(centroids, dim=-1), list(range(LAYERS)))


@contextmanager
def everything(model: Any, **options: Any) -> Iterator[Sparse]:
    """Gate and router attached so that every key is read."""
    settings: dict[str, Any] = {"probes": BUCKETS, "recent": 1, "sink": 0, "dense_layers": (), "qmodel": partition()}
    with attach(model, gate=gate_for(model), select=ALL, **settings | options) as sparse:
        yield sparse


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False, **options)


def save(folder: Path, model: Any, part: Gate | KMeans | QModel) -> Path:
    kind = {Gate: "gate", KMeans: "kmeans", QModel: "qmodel"}[type(part)]
    details = part.details() if isinstance(part, Gate) else {"layers": part.layers, "rope": part.rope}
    return artifacts.write(
        folder / kind,
        kind=kind,
        tensors=part.state_dict(),
        config={},
        model=fingerprint(model, id="tiny"),
        details=details,
        data="",
        seed=0,
        metrics={},
    )


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_reading_everything_is_dense(family: str) -> None:
    model = tiny_model(family)
    ids, mask = left_padded([random_tokens(1, n, seed=n)[0] for n in (45, 70)])
    tokens, logits = generate(model, ids, mask), model(ids, attention_mask=mask).logits
    with everything(model, measure_recall=True) as sparse:
        torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask > 0], logits[mask > 0], rtol=1e-4, atol=1e-4)
        assert torch.equal(generate(model, ids, mask), tokens)
        stats = sparse.stats()
    assert stats["sparsity"] == 0
    assert stats["selectivity"] == 1
    assert stats["dense_fallbacks"] == 0
    for key in ("recall", "prefill_recall", "decode_recall"):
        assert stats[key] == pytest.approx(1, abs=1e-6)


@torch.no_grad()
def test_leaves_no_trace(model: Any) -> None:
    ids = random_tokens(1, 50)
    before, config, attributes = model(ids).logits, model.config.to_dict(), sorted(vars(model.config))
    with everything(model):
        model(ids)
    with pytest.raises(UserError, match="left padding only"), everything(model):
        model(ids, attention_mask=(ids != ids[0, -1]).long())
    assert torch.equal(model(ids).logits, before)
    assert model.config.to_dict() == config
    assert sorted(vars(model.config)) == attributes
    assert model.config._attn_implementation == "sdpa"
    for module in model.modules():
        assert not any((module._forward_hooks, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs))


@torch.no_grad()
def test_left_padded_batch_equals_each_row_alone(model: Any) -> None:
    rows = [random_tokens(1, n, seed=n)[0] for n in (37, 80)]
    settings: dict[str, Any] = {"probes": 2, "recent": 5, "dense_layers": (0,)}
    with attach(model, gate=gate_for(model), select=SelectConfig(sparsity=0.5), qmodel=partition(), **settings) as sparse:
        ids, mask = left_padded(rows)
        options: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}
        together: Any = generate(model, ids, mask, **options)
        alone: list[Any] = [generate(model, row[None], **options) for row in rows]
        assert sparse.stats()["dense_fallbacks"] == 0
    for b, single in enumerate(alone):
        torch.testing.assert_close(torch.stack(together.logits)[:, b], torch.stack(single.logits)[:, 0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_stats_say_what_was_read(model: Any) -> None:
    ids = random_tokens(1, 160)  # 10 blocks: rows of 1 to 10 visible ones
    with attach(model, gate=gate_for(model), select=SelectConfig(sparsity=0.6), measure_recall=True) as sparse:
        assert set(sparse.stats().values()) == {None, 0}
        generate(model, ids)
        stats = sparse.stats()
    kept = sum(max(1, round(0.4 * row)) for row in range(1, 11))
    assert stats["sparsity"] == pytest.approx(1 - kept / 55)
    assert 0.4 < stats["recall"] < 1
    assert stats["selectivity"] is None
    assert stats["dense_fallbacks"] == 0  # decoding was not asked to be sparse

    with attach(model, qmodel=partition(), probes=0, recent=7, sink=1, dense_layers=(), measure_recall=True) as sparse:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
        stats = sparse.stats()
    assert stats["selectivity"] == pytest.approx(8 / 161)
    assert stats["sparsity"] is None
    assert 0 < stats["recall"] < 0.5


@torch.no_grad()
def test_baselines_need_no_gate(model: Any) -> None:
    ids = random_tokens(2, 100)
    outs = []
    for select in (Selection(TopK(0.5), MeanPool(BLOCK)), SelectConfig(sparsity=0.5, scores="mean_pool", block_size=BLOCK)):
        with attach(model, select=select):
            outs.append(model(ids).logits)
    assert torch.equal(*outs)
    assert not torch.allclose(outs[0], model(ids).logits, atol=1e-3)


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK])
@torch.no_grad()
def test_prompts_within_one_block_are_exact(model: Any, length: int) -> None:
    ids = random_tokens(2, length)
    tokens = generate(model, ids)
    with attach(model, gate=gate_for(model), qmodel=partition(), probes=1, recent=64):
        assert torch.equal(generate(model, ids), tokens)


@torch.no_grad()
def test_multiscale_reads_and_counts_fewer_tokens(model: Any) -> None:
    ids = random_tokens(1, 160)
    expected = model(ids).logits
    with attach(model, gate=gate_for(model), select=SelectConfig(policy="multiscale", shares=[1, 0, 0, 0])) as sparse:
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert sparse.stats()["sparsity"] == 0
    with attach(model, gate=gate_for(model), select=SelectConfig(policy="multiscale", shares=[0.2, 0, 0, 0.8])) as sparse:
        assert generate(model, ids).shape == (1, 170)
        assert 0.4 < sparse.stats()["sparsity"] < 0.7


@torch.no_grad()
def test_chunked_prefill_is_dense_and_counted(model: Any) -> None:
    ids = random_tokens(1, 64)
    expected = model(ids).logits
    with everything(model) as sparse:
        cache = DynamicCache()
        first = model(ids[:, :32], past_key_values=cache).logits
        assert sparse.stats()["dense_fallbacks"] == 0
        rest = model(ids[:, 32:63], past_key_values=cache).logits
        assert sparse.stats()["dense_fallbacks"] == LAYERS
        last = model(ids[:, 63:], past_key_values=cache).logits  # its keys have buckets: the chunks' too
        assert sparse.stats()["dense_fallbacks"] == LAYERS
    torch.testing.assert_close(torch.cat((first, rest, last), dim=1), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_short_prompts_are_dense_by_choice(model: Any) -> None:
    short, long = random_tokens(2, 63), random_tokens(2, 64)
    select = SelectConfig(sparsity=0.8, dense_below=64)
    with attach(model, gate=gate_for(model), select=select, qmodel=partition(), probes=1, recent=4, dense_layers=()) as sparse:
        logits = model(short).logits
        stats = sparse.stats()
        assert (stats["dense_by_choice"], stats["dense_fallbacks"], stats["sparsity"]) == (LAYERS, 0, None)
        generate(model, short)  # new tokens are routed after a dense prompt too
        stats = sparse.stats()
        assert (stats["dense_by_choice"], stats["dense_fallbacks"]) == (2 * LAYERS, 0)
        assert 0 < stats["selectivity"] < 1
        long_logits = model(long).logits
        stats = sparse.stats()
        assert stats["dense_by_choice"] == 2 * LAYERS
        assert stats["sparsity"] > 0.3
    torch.testing.assert_close(logits, model(short).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(long_logits, model(long).logits, atol=1e-3)


def test_from_which_length_on_prompts_are_sparse(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr("msattn.trainer.attach.break_even", lambda sparsity, device: asked.append(sparsity) or 4096)
    gate = gate_for(model)

    def length(**options: Any) -> int:
        with attach(model, **options) as sparse:
            return sparse.dense_below

    assert length(gate=gate) == 4096
    assert length(gate=gate, select=SelectConfig(sparsity=0.5)) == 4096
    assert asked == [0.9, 0.5]
    assert length(gate=gate, select=SelectConfig(dense_below=17)) == 17
    assert length(gate=gate, select=SelectConfig(policy="nucleus")) == 0, "its sparsity is not known beforehand"
    assert length(select=SelectConfig(scores="oracle")) == 0, "a baseline is there to be looked at"
    assert length(select=Selection(TopK(0.5), MeanPool(BLOCK))) == 0
    assert length(qmodel=partition(), probes=1) == 4096, "which no prompt asks for without a selection"
    with pytest.raises(UserError, match=r"select\.dense_below=-1: auto, or 0 or more tokens"):
        SelectConfig(dense_below=-1)
    with pytest.raises(UserError, match=r"select\.dense_below=never"):
        SelectConfig(dense_below="never")


@torch.no_grad()
def test_times_are_measured_when_asked_for(model: Any) -> None:
    ids = random_tokens(1, 64)
    with everything(model) as sparse:
        generate(model, ids)
        assert sparse.stats()["attention_s"] is None
    with everything(model, measure_time=True) as sparse:
        assert sparse.stats()["selection_s"] is None
        generate(model, ids)
        stats = sparse.stats()
    assert stats["selection_s"] > 0
    assert stats["attention_s"] > 0


@torch.no_grad()
def test_a_cache_from_outside_is_served_densely_and_counted(model: Any) -> None:
    ids = random_tokens(1, 40)
    cache = DynamicCache()
    model(ids[:, :39], past_key_values=cache)
    with attach(model, qmodel=partition(), probes=0, recent=1, dense_layers=(0,)) as sparse:
        logits = model(ids[:, 39:], past_key_values=cache).logits
        assert sparse.stats()["dense_fallbacks"] == 1
    torch.testing.assert_close(logits, model(ids).logits[:, -1:], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_cache_goes_on_in_the_next_context(model: Any) -> None:
    ids, router, cache = random_tokens(1, 40), partition(), DynamicCache()
    with attach(model, qmodel=router, probes=0):
        model(ids[:, :38], past_key_values=cache)
    with attach(model, qmodel=router, probes=BUCKETS, recent=1) as sparse:
        logits = model(ids[:, 38:39], past_key_values=cache).logits
        assert sparse.stats()["dense_fallbacks"] == 0
    torch.testing.assert_close(logits, model(ids).logits[:, 38:39], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_cache_may_come_by_position(model: Any) -> None:
    ids = random_tokens(1, 30)
    by_name, by_position = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with attach(model, qmodel=partition(), probes=BUCKETS, recent=4, dense_layers=()):
        want = model.model(ids, past_key_values=by_name).last_hidden_state
        got = model.model(ids, None, None, by_position).last_hidden_state
    torch.testing.assert_close(got, want)
    assert all(isinstance(layer, BucketLayer) for layer in by_position.layers)


@torch.no_grad()
def test_a_cache_of_another_partition_is_refused(model: Any) -> None:
    ids, cache = random_tokens(1, 40), DynamicCache(config=model.config)
    with attach(model, qmodel=partition(0), probes=1, dense_layers=()):
        model(ids[:, :30], past_key_values=cache)
    with attach(model, qmodel=partition(0), probes=1, dense_layers=()):  # the same centroids, loaded again
        model(ids[:, 30:31], past_key_values=cache)
    with attach(model, qmodel=partition(1), probes=1, dense_layers=()), pytest.raises(UserError, match="another k-means"):
        model(ids[:, 31:32], past_key_values=cache)


def test_beam_search(model: Any) -> None:
    ids = random_tokens(2, 30)
    expected = generate(model, ids, num_beams=3)
    with everything(model):
        assert torch.equal(generate(model, ids, num_beams=3), expected)


@torch.no_grad()
def test_dense_layers_read_every_key(model: Any) -> None:
    ids = random_tokens(1, 60)
    tokens = generate(model, ids)
    with attach(model, qmodel=partition(), probes=0, recent=1, dense_layers=(0, 1)) as sparse:
        assert torch.equal(generate(model, ids), tokens)
        assert sparse.stats()["selectivity"] is None
        assert sparse.stats()["dense_fallbacks"] == 0


@torch.no_grad()
def test_artifacts_from_disk(model: Any, tmp_path: Path) -> None:
    parts = gate_for(model), partition(), QModel(partition(), 2, 8).eval()
    paths = [save(tmp_path, model, part) for part in parts]
    assert [type(load(path)) for path in paths] == [Gate, KMeans, QModel]
    assert type(msattn.load(str(paths[2]))) is QModel
    ids = random_tokens(1, 50)
    for router_path, router in zip(paths[1:], parts[1:], strict=True):
        outs = []
        for gate, qmodel in ((paths[0], router_path), (parts[0], router)):
            with msattn.attach(model, gate=gate, qmodel=qmodel, probes=2, recent=4):
                outs.append(generate(model, ids, output_logits=True, return_dict_in_generate=True))
        assert torch.equal(torch.stack(outs[0].logits), torch.stack(outs[1].logits))


def test_mismatches_are_refused(model: Any, tmp_path: Path) -> None:
    gate, kmeans = (save(tmp_path, model, part) for part in (gate_for(model), partition()))

    def refused(message: str, on: Any = model, **options: Any) -> None:
        with pytest.raises(UserError, match=message), attach(on, **options):
            pass
        assert on.config._attn_implementation == "sdpa"

    refused("nothing to attach")
    refused("gate artifact made for tiny: its weights_hash is", tiny_model("llama", seed=1), gate=gate)
    refused("kmeans artifact made for tiny: its num_layers is 2", tiny_model("llama", num_hidden_layers=3), qmodel=kmeans)
    refused("kind=kmeans: accepted is gate", gate=kmeans)
    refused("it is a gate; accepted is a qmodel or a kmeans", qmodel=gate)
    refused("no such folder", gate=tmp_path / "nothing")
    refused("needs a gate artifact", select=SelectConfig())
    refused("give one of gate and select", gate=gate, select=Selection(TopK(0.5), MeanPool(BLOCK)))
    refused("probes=7: accepted are 0 to 6", qmodel=kmeans, probes=7)
    refused("recent=0", qmodel=kmeans, probes=1, recent=0)
    refused("sink=-1", qmodel=kmeans, probes=1, sink=-1)
    refused(r"dense_layers=\(2,\): accepted are 0 to 1", qmodel=kmeans, probes=1, dense_layers=(2,))
    refused("sliding window", tiny_model("mistral", sliding_window=8), gate=gate)


def test_attaching_twice_is_refused(model: Any) -> None:
    with everything(model), pytest.raises(UserError, match="attached"), everything(model):
        pass


@pytest.mark.gpu
@torch.no_grad()
def test_reading_everything_is_dense_on_the_gpu() -> None:
    model = tiny_model("llama", head_dim=64, hidden_size=256).cuda()
    ids, mask = (t.cuda() for t in left_padded([random_tokens(1, n, seed=n)[0] for n in (45, 200)]))
    logits = model(ids, attention_mask=mask).logits
    centroids = torch.randn(LAYERS, 2, BUCKETS, 64)
    options: dict[str, Any] = {"probes": BUCKETS, "recent": 1, "sink": 0, "dense_layers": ()}
    with attach(
        model, gate=gate_for(model), select=ALL, qmodel=KMeans(centroids, [0, 1]), measure_recall=True, **options
    ) as sparse:
        cache = DynamicCache()
        parts = [
            model(part, attention_mask=mask[:, :end], past_key_values=cache).logits
            for part, end in ((ids[:, :198], 198), (ids[:, 198:199], 199), (ids[:, 199:], 200))
        ]
        stats = sparse.stats()
    torch.testing.assert_close(torch.cat(parts, dim=1)[mask > 0], logits[mask > 0], rtol=1e-3, atol=1e-3)
    assert (stats["sparsity"], stats["selectivity"], stats["dense_fallbacks"]) == (0, 1, 0)
    assert stats["recall"] == pytest.approx(1, abs=1e-4)
