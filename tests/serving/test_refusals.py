"""Arguments, caches, prompts and calls that are refused by name, or left to the model."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer

from msattn.trainer.config import SelectConfig
from msattn.trainer.config.policies import TopK
from msattn.trainer.errors import UserError
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.selection import Selection
from msattn.trainer.methods.untrained.routers.quest import QuestBlocks
from msattn.trainer.methods.untrained.routers.random import RandomBuckets
from msattn.trainer.methods.untrained.scores.mean_pool import MeanPool
from msattn.trainer.serving.attach import attach
from msattn.trainer.serving.hooks import check_inputs
from tests.factory import random_partition, random_tokens, tiny_config, tiny_model
from tests.methods.gate.random_gates import random_decode_gate
from tests.serving.decoding import ROUTED
from tests.sparse import BLOCK, gate_for, save

# routers, made when a test needs them
ROUTERS: dict[str, Callable[[], Any]] = {
    "k-means": random_partition,
    "classifiers": lambda: QModel(random_partition(), 2, 24),
    "decode gates": random_decode_gate,
    "gates of 3 layers": lambda: random_decode_gate(num_hidden_layers=3),
    "gates of 2 heads": lambda: random_decode_gate(num_attention_heads=2),
    "pages of 3 heads": lambda: QuestBlocks(8, [0], 3),
    "layers 0 and 2": lambda: RandomBuckets(8, [0, 2], 2),
}
# a router, other arguments, the message
REFUSED: list[tuple[str | None, dict[str, Any], str]] = [
    (None, {}, "nothing to attach"),
    (None, {"sparsity": 0.5}, "sparsity=0.5: there is nothing to select"),
    (None, {"select": SelectConfig()}, "needs a gate artifact"),
    (None, {"select": "best"}, "select=best: expected topk, calibrated"),
    (
        None,
        {"select": {"policy": "nucleus", "sparsity": 0.5}},
        "select.sparsity: policy=nucleus accepts mass",
    ),
    (
        None,
        {"select": "nucleus", "sparsity": 0.5},
        "select.sparsity: policy=nucleus accepts mass",
    ),
    (None, {"select": {"policy": "topk", "sparsty": 0.5}}, "unknown key select.sparsty"),
    (None, {"select": "quest", "sparsity": 1.5}, "^sparsity=1.5: expected a number in"),
    (
        None,
        {"gate": "embedded", "select": {"key_block_size": 16}},
        r"^select\.key_block_size=16: the gate's blocks have 64; expected this size, or null$",
    ),
    (None, {"gate": "outputs/none/gate"}, "artifact outputs/none/gate: no such folder"),
    (None, {"gate": Path("outputs/none")}, "artifact outputs/none: no such folder"),
    (
        None,
        {"qmodel": "qest"},
        r"^qmodel=qest: expected clusters, .*, embedded, the folder .*artifact \(did you mean "
        r"quest\?\)",
    ),
    (
        None,
        {"qmodel": "outputs/none", "probes": -1},
        r"^probes=-1: expected an integer in \[0, 1e6\], or null",
    ),
    (None, {"select": "quest", "keys": 0.05}, "^keys=0.05: only decoding with a router uses it"),
    (
        None,
        {"select": "quest", "threshold": 0.1},
        "^threshold=0.1: only decoding with a router uses it",
    ),
    ("k-means", {"probes": 7}, "probes=7: expected 0 to 6"),
    ("k-means", {"probes": 1, "recent": 0}, "recent=0"),
    ("k-means", {"probes": 1, "sink": -1}, "sink=-1"),
    (
        "k-means",
        {"probes": 1, "dense_layers": (2,)},
        r"dense_layers=\(2,\): expected 0 to 1",
    ),
    ("k-means", {"keys": 0.05}, "^keys=0.05: needs a query classifier"),
    ("classifiers", {"keys": 0.05}, "^keys=0.05: this router has no calibrated thresholds"),
    ("classifiers", {"keys": "0.05"}, "^keys='0.05': expected a number"),
    (
        "classifiers",
        {"keys": 0.05, "probes": 2},
        "^keys=0.05: probes=2 is given too; give one of the two",
    ),
    ("decode gates", {"probes": 17}, "probes=17: expected 0 to 16"),
    ("decode gates", {"keys": 15}, r"keys=15: expected 16 \(a block\) to 256 keys"),
    ("decode gates", {"keys": 257}, "keys=257: expected 16"),
    ("decode gates", {"keys": 20.5}, "keys=20.5: expected null, a share"),
    ("decode gates", {"keys": float("inf")}, "keys=inf: expected null, a share"),
    ("decode gates", {"keys": 0.1}, "keys=0.1: this router has no calibrated thresholds"),
    ("decode gates", {"threshold": 1.0}, r"threshold=1.0: expected a number in \(0, 1\)"),
    ("decode gates", {"threshold": float("nan")}, "threshold=nan: expected a number"),
    ("decode gates", {"threshold": 0.1, "keys": 32}, "threshold=0.1: keys=32 is given too"),
    ("decode gates", {"threshold": 0.1, "probes": 3}, "threshold=0.1: probes=3 is given too"),
    ("gates of 3 layers", {}, "its num_layers is 3, this model's is 2"),
    ("gates of 2 heads", {}, "its num_heads is 2, this model's is 4"),
    ("pages of 3 heads", {"probes": 1}, "kv_heads is 3, this model's is 2"),
    ("layers 0 and 2", {"probes": 1}, r"qmodel.layers=\[0, 2\]: expected layers from 0 to 1"),
]


@pytest.fixture(scope="module")
def model() -> Any:
    """A model that no test changes."""
    return tiny_model()


def check_refused(model: Any, options: dict[str, Any], message: str) -> None:
    """Asserts that the model keeps its attention."""
    with pytest.raises(UserError, match=message), attach(model, **options):
        pass
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("router", "options", "message"), REFUSED)
def test_arguments_that_are_refused(
    model: Any, router: str | None, options: dict[str, Any], message: str
) -> None:
    routed = {} if router is None else {"qmodel": ROUTERS[router]()}
    check_refused(model, routed | options, message)


def test_artifacts_and_models_that_do_not_fit(model: Any, tmp_path: Path) -> None:
    gate, kmeans = (
        save(tmp_path, model, module) for module in (gate_for(model), random_partition())
    )
    of_other_weights = "gate artifact made for tiny: its weights_hash is"
    check_refused(tiny_model(seed=1), {"gate": gate, "strict": True}, of_other_weights)
    of_another_rope = "gate artifact made for tiny: its rope is"
    check_refused(tiny_model("llama", "linear"), {"gate": gate}, of_another_rope)
    of_fewer_layers = "kmeans artifact made for tiny: its num_layers is 2"
    check_refused(tiny_model(num_hidden_layers=3), {"qmodel": kmeans}, of_fewer_layers)
    check_refused(tiny_model("mistral", sliding_window=8), {"gate": gate}, "sliding window")
    check_refused(tiny_model().double(), {"select": "quest"}, r"model\.dtype=float64: expected")
    check_refused(model, {"gate": kmeans}, "kind=kmeans: expected gate")
    expected = "this is a gate for prefill; expected a qmodel, a decode_gate or a kmeans"
    check_refused(model, {"qmodel": gate}, expected)
    both = {"gate": gate, "select": Selection(TopK(sparsity=0.5), MeanPool(BLOCK))}
    check_refused(model, both, "give one of gate and select")


@torch.no_grad()
def test_caches_that_cannot_be_taken_over_are_named() -> None:
    model, ids = tiny_model(), random_tokens(1, 40)
    sliding = DynamicCache(config=transformers.MistralConfig(num_hidden_layers=2, sliding_window=8))
    sliding.update(torch.zeros(1, 2, 9, 16), torch.zeros(1, 2, 9, 16), 0)
    caches = {
        "an offloaded cache": DynamicCache(config=model.config, offloading=True),
        "DynamicCache with layers of type DynamicSlidingWindowLayer": sliding,
        "EncoderDecoderCache": EncoderDecoderCache(DynamicCache(), DynamicCache()),
    }
    with attach(model, select="quest"):
        for name, cache in caches.items():
            with pytest.raises(
                UserError, match=f"past_key_values: {name}.*expected a DynamicCache or StaticCache"
            ):
                model(ids, past_key_values=cache)


@torch.no_grad()
def test_a_static_cache_has_as_many_positions_as_its_owner_gave_it() -> None:
    model, ids = tiny_model(), random_tokens(1, 60)
    cache = StaticCache(config=model.config, max_cache_len=60)
    with attach(model, **ROUTED):
        with pytest.raises(UserError, match="max_cache_len=59: 60 tokens need as many positions"):
            model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=59))
        model(ids, past_key_values=cache)
        with pytest.raises(UserError, match="max_cache_len=60: 61 tokens"):
            model(ids[:, :1], past_key_values=cache)
    with (
        attach(model, select="quest"),
        pytest.raises(UserError, match="max_cache_len=60: 61 tokens"),
    ):
        model(ids[:, :1], past_key_values=cache)


@torch.no_grad()
def test_a_prompt_beyond_the_positions_is_refused() -> None:
    model = tiny_model()
    with attach(model, select="quest"):
        with pytest.raises(
            UserError, match="prompt of 257 tokens: the model has positions for 256"
        ):
            model(random_tokens(1, 257))
        cache = DynamicCache(config=model.config)
        model(random_tokens(1, 200), past_key_values=cache)
        with pytest.raises(UserError, match="prompt of 57 tokens after 200 cached ones"):
            model(random_tokens(1, 57), past_key_values=cache)
        assert cache.get_seq_length() == 200


@torch.no_grad()
def test_ids_masks_and_caches_of_another_shape() -> None:
    model, ids = tiny_model(), random_tokens(2, 40)
    past = DynamicCache(config=model.config)
    deeper = DynamicCache(config=tiny_config(num_hidden_layers=3))
    model(ids, past_key_values=past)
    inputs: dict[str, dict[str, Any]] = {
        "input_ids: 128 is no token; expected 0 to 127": {"input_ids": ids + 128 - ids.max()},
        "input_ids: -1 is no token": {"input_ids": ids - ids.min() - 1},
        r"input_ids of float32 \[2, 40\]: expected int64 \[batch, tokens\]": {
            "input_ids": ids.float()
        },
        r"inputs_embeds of float64 \[2, 40, 64\]: expected float32": {
            "inputs_embeds": torch.zeros(2, 40, 64).double()
        },
        r"attention_mask of int64 \[1, 40\]: expected a 2D mask \[2, 40\]": {
            "input_ids": ids,
            "attention_mask": ids[:1],
        },
        r"position_ids of type list: expected integers \[2, 40\]": {
            "input_ids": ids,
            "position_ids": ids.tolist(),
        },
        r"it holds \[2, 2, 40, 16\] .*; expected \[1, 2, 40, 16\]": {
            "input_ids": ids[:1],
            "past_key_values": past,
        },
        "it has 3 layers; expected 2": {"input_ids": ids, "past_key_values": deeper},
    }
    with attach(model, select="quest"):
        for message, arguments in inputs.items():
            with pytest.raises(UserError, match=message):
                model(**arguments)


@pytest.mark.gpu
def test_ids_of_single_tokens_are_not_read() -> None:
    decoder, ids = tiny_model().get_decoder().to("cuda"), random_tokens(2, 3).to("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        check_inputs(decoder, {"input_ids": ids[:, :1]}, cached=5)
        with pytest.raises(RuntimeError, match="synchroniz"):
            check_inputs(decoder, {"input_ids": ids}, cached=5)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@torch.no_grad()
def test_a_capacity_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model().to("cuda")
    with attach(model, select="quest"):
        model(random_tokens(1, 10).to("cuda"))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
        monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)
        with pytest.raises(
            UserError,
            match=r"a cache of 1,280 positions for 3 sequences needs [\d,]+ bytes more, and 0",
        ):
            model(random_tokens(3, 100).to("cuda"))


@torch.no_grad()
def test_a_cache_that_the_hooks_missed_is_refused_not_read_densely() -> None:
    model, ids, cache = tiny_model(), random_tokens(1, 60), DynamicCache()
    with attach(model, **ROUTED):
        with pytest.raises(UserError, match="call the model, not its layers"):
            model.model.forward(ids)
        model.model(ids, use_cache=True, past_key_values=cache)  # deprecated in transformers 5.24
    assert cache.get_seq_length() == 60
    assert type(cache.layers[0]) is not DynamicLayer


@torch.no_grad()
def test_other_outputs_and_other_calls(where: str) -> None:
    model = tiny_model().to(where)
    ids, cache = random_tokens(1, 60).to(where), DynamicCache(config=model.config)
    with attach(model, **ROUTED), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(ids[:, :50], past_key_values=cache)
        assert model.model(ids[:, 50:51], past_key_values=cache, return_dict=False)[0].shape == (
            1,
            1,
            64,
        )
        model.config.output_hidden_states = True
        assert len(model(ids[:, 51:52], past_key_values=cache).hidden_states) == 3
        model.config.output_hidden_states = False
        assert model(
            ids[:, 52:53], past_key_values=cache, output_hidden_states=False
        ).logits.shape == (1, 1, 128)
        types = torch.zeros(1, 2, device=where)
        assert model(ids[:, 53:54], past_key_values=cache, token_types=types).logits.shape == (
            1,
            1,
            128,
        )
        with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
            model()
        with pytest.raises(UserError, match=r"crop\(20\): expected a negative number"):
            cache.crop(20)
        long = DynamicCache(config=model.config)
        model(random_tokens(1, 250).to(where), past_key_values=long)
        model(ids[:, :10], past_key_values=long)  # a draft may exceed the positions
