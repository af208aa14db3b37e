"""Hostile model folders: values in config.json, damaged files, weights that do not fit.

A try is served right if every result equals that of the undamaged folder, or what the libraries
make of the damaged files directly (:func:`tests.adversary.model_folders.right`).
"""

import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from msattn.trainer.models import limited
from tests.adversary.damage import REMOVED, drawn
from tests.adversary.model_folders import (
    CONFIG,
    GENERATION,
    HARMLESS,
    HOSTILE,
    SETTINGS,
    VOCABULARY,
    WEIGHTS,
    Damage,
    Models,
    attempt,
    edited,
    file_damages,
    known_end,
    linked,
)
from tests.adversary.tries import Tries, spread
from tests.factory import FAMILIES, ROPES

INDEX, PICKLE = "model.safetensors.index.json", "pytorch_model.bin"
OTHER_KEYS = (  # of config.json, that the small models do not have
    "attn_logit_softcapping", "auto_map", "configuration_files", "id2label", "layer_types",
    "max_window_layers", "num_labels",
    "original_max_position_embeddings", "partial_rotary_factor", "per_layer_config",
    "quantization_config", "rope_scaling",
    "rope_theta", "sliding_window", "tokenizer_class", "transformers_weights", "use_sliding_window",
)  # fmt: skip
UNREAD = (  # keys of config.json whose values neither msattn nor its tokenizer reads
    "_attn_implementation", "_attn_implementation_internal", "_experts_implementation",
    "_name_or_path", "architectures",
    "attn_implementation", "base_model_tp_plan", "fusion_config", "is_encoder_decoder",
    "name_or_path",
    "output_attentions", "output_hidden_states", "problem_type", "return_dict", "save_pretrained",
    "text_config",
    "torch_dtype", "transformers_version",
)  # fmt: skip
ROPE_KEYS = ("rope_type", "rope_theta", "type", "factor", "partial_rotary_factor", "unknown")
ROPE_KEYS_OF = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short computing, no network."""
    monkeypatch.setattr(limited, "SECONDS", 4)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.slow
def test_values_of_the_configuration(tries: Tries, models: Models) -> None:
    """Each key with a value, and each value; families in turn where it matters."""
    own = [key for key in json.loads((models.base() / CONFIG).read_text()) if key not in UNREAD]
    read = spread(spread((*own, *OTHER_KEYS, *own), HOSTILE), FAMILIES)
    # a tokenizer of another family may read such a key
    unread = spread(spread(UNREAD, HOSTILE), ("llama",))
    for (key, name), family in (*read, *unread):
        change, accepted = edited(CONFIG, key, value=HOSTILE[name]), known_end(key, name, UNREAD)
        attempt(tries, models, f"{family} {key}={name}", change, family=family, accepted=accepted)


def test_values_of_rope(tries: Tries, models: Models) -> None:
    keys = [(kind, key) for kind in ROPES for key in (*ROPE_KEYS, *ROPE_KEYS_OF.get(kind, ()))]
    for ((kind, key), (name, value)), place in spread(
        spread(keys, HOSTILE.items()), ("rope_parameters", "rope_scaling")
    ):
        damages = (
            edited(CONFIG, "rope_parameters", value=REMOVED),
            edited(CONFIG, place, value={"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}),
            edited(CONFIG, place, key, value=value),
        )
        attempt(tries, models, f"{place} of {kind}: {key}={name}", *damages)


def test_quantized_models(tries: Tries, models: Models) -> None:
    """Without its library a quantized model is refused."""
    for method, key in spread(
        ("awq", "bitsandbytes", "fp8", "gptq", "torchao", "none"),
        ("load_in_4bit", "bits", "weights"),
    ):
        attempt(
            tries,
            models,
            method,
            edited(CONFIG, "quantization_config", value={"quant_method": method, key: "hostile"}),
        )


def test_damaged_documents(tries: Tries, models: Models) -> None:
    for file in (CONFIG, GENERATION, VOCABULARY, SETTINGS):
        for name, damage in drawn(file_damages(file), 6) if file != CONFIG else file_damages(file):
            accepted = None if name in HARMLESS or file == VOCABULARY else False
            attempt(tries, models, f"{file} {name}", damage, accepted=accepted)


def tensors(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Returns the damage that changes the tensors of a file and writes them again."""

    def damage(at: Path) -> None:
        found = load_file(at / WEIGHTS)
        change(found)
        save_file(found, at / WEIGHTS, {"format": "pt"})

    return damage


def tensor_damages(name: str) -> Iterator[tuple[str, Damage]]:
    """Yields ways to damage one tensor."""
    yield "left out", tensors(lambda found: found.pop(name))
    yield "renamed", tensors(lambda found: found.update({f"x.{name}": found.pop(name)}))
    changes: dict[str, Callable[[Any], Any]] = {
        "cut": lambda tensor: tensor[:-1].clone(),
        "empty": lambda tensor: tensor[:0].clone(),
        "longer": lambda tensor: torch.cat([tensor, tensor]),
        "with NaN": lambda tensor: (
            tensor.view(-1).index_fill(0, torch.tensor([0]), float("nan")).view_as(tensor)
        ),
        "with infinity": lambda tensor: (
            tensor.view(-1).index_fill(0, torch.tensor([5]), float("-inf")).view_as(tensor)
        ),
        "as int64": lambda tensor: tensor.long(),
        "as complex64": lambda tensor: tensor.to(torch.complex64),
    }
    for label, change in changes.items():
        yield label, tensors(lambda found, change=change: found.update({name: change(found[name])}))


def file_of_weights_damages() -> Iterator[tuple[str, Damage]]:
    """Yields ways to damage the file with the tensors; its header takes the first 2 kB."""
    rng = random.Random(1)
    for share in (0, *(rng.uniform(0, 1) for _ in range(2))):
        yield f"cut at {share:.3f}", lambda at, share=share: cut(at / WEIGHTS, share)
    for size in (0, 1, 2**20, 2**40, 2**63):
        yield (
            f"header of {size} bytes",
            lambda at, size=size: overwrite(at / WEIGHTS, 0, struct.pack("<Q", size)),
        )
    for seed in range(4):
        yield (
            f"noise in the header {seed}",
            lambda at, seed=seed: noise(at / WEIGHTS, 8, 2000, seed),
        )
    yield "random bytes", lambda at: (at / WEIGHTS).write_bytes(random.Random(0).randbytes(300_000))
    yield "no tensors", tensors(lambda found: found.clear())
    yield "a folder", lambda at: ((at / WEIGHTS).unlink(), (at / WEIGHTS).mkdir())
    yield "a pipe", lambda at: ((at / WEIGHTS).unlink(), os.mkfifo(at / WEIGHTS))
    yield (
        "a link to a device",
        lambda at: ((at / WEIGHTS).unlink(), (at / WEIGHTS).symlink_to("/dev/zero")),
    )
    yield "a link to the same", lambda at: linked(at / WEIGHTS, at.parent / "elsewhere" / WEIGHTS)
    yield "missing", lambda at: (at / WEIGHTS).unlink()
    for extra in ("x", "model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"):
        yield (
            f"with {extra}",
            tensors(lambda found, extra=extra: found.update({extra: torch.zeros(4)})),
        )


def cut(path: Path, share: float) -> None:
    os.truncate(path, int(share * path.stat().st_size))


def overwrite(path: Path, start: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(content)


def noise(path: Path, first: int, last: int, seed: int) -> None:
    """Overwrites three random bytes between two places."""
    rng = random.Random(seed)
    for _ in range(3):
        overwrite(path, rng.randrange(first, last), rng.randbytes(1))


@pytest.mark.slow
def test_weights(tries: Tries, models: Models) -> None:
    names = ("model.embed_tokens", "model.layers.1.self_attn.k_proj", "model.norm", "lm_head")
    cases = [
        [(f"{name} {label}", damage) for label, damage in tensor_damages(f"{name}.weight")]
        for name in names
    ]
    one_each = [cases[number % len(names)][number] for number in range(len(cases[0]))]
    for label, damage in [*one_each, *file_of_weights_damages()]:
        accepted = (
            True if label == "a link to the same" else None if label.startswith("noise") else False
        )
        attempt(tries, models, f"weights: {label}", damage, accepted=accepted)
