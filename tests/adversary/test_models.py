"""Hostile model folders: values in config.json, damaged files, weights that do not fit, names.

A try is served right if every result equals that of the undamaged folder, or what the libraries make of the damaged files
directly (:func:`tests.adversary.model_folders.right`).
"""

import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, LlamaConfig

from msattn.trainer.commands.compose import compose
from msattn.trainer.commands.own import own_overrides
from msattn.trainer.models import limited
from tests.adversary.model_folders import (
    CONFIG,
    GENERATION,
    HARMLESS,
    HOSTILE,
    REMOVED,
    SETTINGS,
    TEXT,
    VOCABULARY,
    WEIGHTS,
    Damage,
    Models,
    Outcome,
    attempt,
    drawn,
    edit,
    edited,
    file_damages,
    known_end,
    linked,
    load_folder,
)
from tests.adversary.tries import Tries
from tests.factory import FAMILIES, OTHER_FAMILIES, ROPES

pytestmark = pytest.mark.area("model folders")

INDEX, PICKLE = "model.safetensors.index.json", "pytorch_model.bin"
OTHER_KEYS = (  # of config.json, that the small models do not have
    "_attn_implementation",
    "_attn_implementation_internal",
    "_experts_implementation",
    "_name_or_path",
    "attn_implementation",
    "attn_logit_softcapping",
    "auto_map",
    "base_model_tp_plan",
    "configuration_files",
    "fusion_config",
    "id2label",
    "is_encoder_decoder",
    "layer_types",
    "max_window_layers",
    "name_or_path",
    "num_labels",
    "original_max_position_embeddings",
    "output_attentions",
    "output_hidden_states",
    "partial_rotary_factor",
    "per_layer_config",
    "problem_type",
    "quantization_config",
    "return_dict",
    "rope_scaling",
    "rope_theta",
    "save_pretrained",
    "sliding_window",
    "text_config",
    "tokenizer_class",
    "torch_dtype",
    "transformers_weights",
    "use_sliding_window",
)
UNREAD = (  # keys of config.json whose values neither msattn nor its tokenizer reads
    "_attn_implementation",
    "_attn_implementation_internal",
    "_experts_implementation",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "base_model_tp_plan",
    "dtype",
    "fusion_config",
    "id2label",
    "is_encoder_decoder",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "save_pretrained",
    "text_config",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
ROPE_KEYS = (
    "rope_type",
    "rope_theta",
    "type",
    "factor",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "unknown",
)
ROPE_KEYS_OF = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
METHODS = ("awq", "bitnet", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "mxfp4", "quanto", "torchao", "none", "")
METHOD_KEYS = ("load_in_4bit", "bits", "weights", "bnb_4bit_compute_dtype", "modules_to_not_convert", "config_groups")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short computing, no network."""
    monkeypatch.setattr(limited, "SECONDS", 4)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_values_of_the_configuration(tries: Tries, models: Models) -> None:
    keys = [(family, key) for family in FAMILIES for key in json.loads((models.base(family) / CONFIG).read_text())]
    keys += [(family, key) for family in FAMILIES for key in OTHER_KEYS]
    for (family, key), (name, value) in tries.chosen(drawn(product(keys, HOSTILE.items()), 110)):
        accepted = known_end(key, name, UNREAD)
        attempt(tries, models, f"{family} {key}={name}", edited(CONFIG, key, value=value), family=family, accepted=accepted)


def test_values_of_keys_that_some_families_have(tries: Tries, models: Models) -> None:
    common = {item.name for item in fields(LlamaConfig)} - {"rope_parameters"}
    keys = [
        (family, item.name) for family in OTHER_FAMILIES for item in fields(CONFIG_MAPPING[family]) if item.name not in common
    ]
    for (family, key), (name, value) in tries.chosen(drawn(product(keys, HOSTILE.items()), 60)):
        folder = models.damaged(edited(CONFIG, key, value=value), family=family)
        finite: Callable[[Outcome], bool] = lambda found: bool(found.logits.isfinite().all())  # noqa: E731
        tries.python(f"{family} {key}={name}", lambda folder=folder: load_folder(folder), finite)


def test_values_of_rope(tries: Tries, models: Models) -> None:
    keys = [(kind, key) for kind in ROPES for key in (*ROPE_KEYS, *ROPE_KEYS_OF.get(kind, ()))]
    cases = drawn(product(keys, ("rope_parameters", "rope_scaling"), HOSTILE.items()), 80)
    for (kind, key), place, (name, value) in tries.chosen(cases):
        damages = (
            edited(CONFIG, "rope_parameters", value=REMOVED),
            edited(CONFIG, place, value={"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}),
            edited(CONFIG, place, key, value=value),
        )
        attempt(tries, models, f"{place} of {kind}: {key}={name}", *damages)


def test_quantized_models(tries: Tries, models: Models) -> None:
    """Without its library a quantized model is refused."""
    for method, key, (name, value) in tries.chosen(drawn(product(METHODS, METHOD_KEYS, HOSTILE.items()), 40)):
        quantization = {"quant_method": method, key: None if value is REMOVED else value}
        attempt(tries, models, f"{method} {key}={name}", edited(CONFIG, "quantization_config", value=quantization))


def test_damaged_documents(tries: Tries, models: Models) -> None:
    for file in (CONFIG, GENERATION, VOCABULARY, SETTINGS):
        for name, damage in tries.chosen(file_damages(file)):
            accepted = None if name in HARMLESS or file == VOCABULARY else False
            attempt(tries, models, f"{file} {name}", damage, accepted=accepted)


def forms() -> dict[str, Damage]:
    """Returns the changes that bring a model into each form that transformers writes."""
    pickles = {f"pickled, {name}": pickled(ignored, **options) for name, options in PICKLES.items()}
    return {"whole": lambda at: None, "in parts": shard, **pickles}


@pytest.mark.slow
def test_undamaged(tries: Tries, models: Models) -> None:
    """Every family, in each form, is served."""
    for family, (form, change) in product(FAMILIES, forms().items()):  # always all
        attempt(tries, models, f"{family} {form}", change, family=family, accepted=True)


def test_other_files(tries: Tries, models: Models) -> None:
    """Adapters and files of other formats, beside the model."""
    files = ("adapter_config.json", "special_tokens_map.json", "added_tokens.json", INDEX, PICKLE, "processor_config.json")
    other_model = {"base_model_name_or_path": "/etc", "peft_type": "LORA", "eos_token": "t5", "tokenizer_class": "Own"}
    contents = ("[]", "{x", json.dumps(other_model), json.dumps({"hostile": 10**6, "t3": 5}), "[" * 10**5)
    for file, content in tries.chosen(product(files, contents)):
        attempt(tries, models, f"{file} is {content[:20]}", lambda at, file=file, text=content: (at / file).write_text(text))


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
        "flat": lambda tensor: tensor.flatten()[:-1].clone(),
        "empty": lambda tensor: tensor[:0].clone(),
        "longer": lambda tensor: torch.cat([tensor, tensor]),
        "with NaN": lambda tensor: tensor.view(-1).index_fill(0, torch.tensor([0]), float("nan")).view_as(tensor),
        "with infinity": lambda tensor: tensor.view(-1).index_fill(0, torch.tensor([5]), float("-inf")).view_as(tensor),
        "as int64": lambda tensor: tensor.long(),
        "as uint8": lambda tensor: tensor.byte(),
        "as bool": lambda tensor: tensor.bool(),
        "as complex64": lambda tensor: tensor.to(torch.complex64),
    }
    for label, change in changes.items():
        yield label, tensors(lambda found, change=change: found.update({name: change(found[name])}))


def file_of_weights_damages() -> Iterator[tuple[str, Damage]]:
    """Yields ways to damage the file with the tensors; its header takes the first 2 kB."""
    rng = random.Random(1)
    for share in (0, *(rng.uniform(0, 1) for _ in range(6))):
        yield f"cut at {share:.3f}", lambda at, share=share: cut(at / WEIGHTS, share)
    for size in (0, 1, 2**20, 2**40, 2**63):
        yield f"header of {size} bytes", lambda at, size=size: overwrite(at / WEIGHTS, 0, struct.pack("<Q", size))
    for seed in range(20):
        yield f"noise in the header {seed}", lambda at, seed=seed: noise(at / WEIGHTS, 8, 2000, seed)
    yield "random bytes", lambda at: (at / WEIGHTS).write_bytes(random.Random(0).randbytes(300_000))
    yield "no tensors", tensors(lambda found: found.clear())
    yield "a folder", lambda at: ((at / WEIGHTS).unlink(), (at / WEIGHTS).mkdir())
    yield "a pipe", lambda at: ((at / WEIGHTS).unlink(), os.mkfifo(at / WEIGHTS))
    yield "a link to a device", lambda at: ((at / WEIGHTS).unlink(), (at / WEIGHTS).symlink_to("/dev/zero"))
    yield "a link to the same", lambda at: linked(at / WEIGHTS, at.parent / "elsewhere" / WEIGHTS)
    yield "missing", lambda at: (at / WEIGHTS).unlink()
    for extra in ("x", "model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"):
        yield f"with {extra}", tensors(lambda found, extra=extra: found.update({extra: torch.zeros(4)}))


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


def test_weights(tries: Tries, models: Models) -> None:
    names = ("model.embed_tokens", "model.layers.1.self_attn.k_proj", "model.norm", "lm_head")
    cases = [(f"{name} {label}", damage) for name in names for label, damage in tensor_damages(f"{name}.weight")]
    for label, damage in tries.chosen([*cases, *file_of_weights_damages()]):
        accepted = True if label == "a link to the same" else None if label.startswith("noise") else False
        attempt(tries, models, f"weights: {label}", damage, accepted=accepted)


def shard(at: Path) -> None:
    """Splits the weights into two files with an index."""
    found = list(load_file(at / WEIGHTS).items())
    parts = {f"model-0000{i + 1}-of-00002.safetensors": dict(found[i::2]) for i in range(2)}
    for file, part in parts.items():
        save_file(part, at / file, {"format": "pt"})
    edit(at / INDEX, ("weight_map",), {name: file for file, part in parts.items() for name in part})
    edit(at / INDEX, ("metadata",), {"total_size": 1})
    (at / WEIGHTS).rename(at.parent / WEIGHTS)


def index_damages() -> Iterator[tuple[str, Damage]]:
    """Yields ways to damage an index and the files that it names."""
    yield "nothing", lambda at: None
    for file in (
        f"../{WEIGHTS}",
        "/etc/passwd",
        "~/x.safetensors",
        "",
        "..",
        "none.safetensors",
        CONFIG,
        "a\0b",
        "\ud800",
        "x" * 500,
    ):
        yield f"one in {file!r:.30}", edited(INDEX, "weight_map", "model.norm.weight", value=file)
        yield f"all in {file!r:.30}", lambda at, file=file: all_in(at, file)
    yield "all in an absolute path", lambda at: all_in(at, str(at.parent / WEIGHTS))
    for label, value in HOSTILE.items():
        yield f"weight_map={label}", edited(INDEX, "weight_map", value=value)
    yield from file_damages(INDEX)
    for part in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        yield f"without {part}", lambda at, part=part: (at / part).unlink()
        yield f"a pipe for {part}", lambda at, part=part: ((at / part).unlink(), os.mkfifo(at / part))
        yield f"cut {part}", lambda at, part=part: cut(at / part, 0.5)
    yield "a tensor twice", twice
    yield "another checkpoint", lambda at: save_file({"x": torch.ones(1)}, at / "shard-00000-model-00000-of-00001.safetensors")


def all_in(at: Path, file: str) -> None:
    names = json.loads((at / INDEX).read_text())["weight_map"]
    edit(at / INDEX, ("weight_map",), dict.fromkeys(names, file))


def twice(at: Path) -> None:
    """The second file has other values of a tensor that the index assigns to the first."""
    first, second = sorted(at.glob("model-*.safetensors"))
    name = next(iter(load_file(first)))
    save_file(load_file(second) | {name: torch.zeros_like(load_file(first)[name])}, second, {"format": "pt"})


def test_weights_in_parts(tries: Tries, models: Models) -> None:
    for label, damage in tries.chosen(index_damages()):
        accepted = True if label == "nothing" else None if label in HARMLESS else False
        attempt(tries, models, f"index: {label}", shard, damage, accepted=accepted)


def pickled(change: Damage, **options: Any) -> Damage:
    """Returns the damage that saves the weights by pickle and then changes the file."""

    def damage(at: Path) -> None:
        torch.save(load_file(at / WEIGHTS), at / PICKLE, **options)
        (at / WEIGHTS).rename(at.parent / WEIGHTS)
        change(at / PICKLE)

    return damage


def ignored(file: Path) -> None:
    """Leaves a file as it is."""


PICKLES: dict[str, dict[str, Any]] = {"zip": {}, "old": {"_use_new_zipfile_serialization": False}}


def pickle_damages() -> Iterator[tuple[str, Damage]]:
    rng = random.Random(2)
    for label, options in PICKLES.items():
        yield f"{label}, nothing", pickled(ignored, **options)
        for share in (0, *(rng.uniform(0, 1) for _ in range(5))):
            yield f"{label}, cut at {share:.2f}", pickled(lambda file, share=share: cut(file, share), **options)
        for seed in range(20):
            yield f"{label}, noise {seed}", pickled(lambda file, seed=seed: noise(file, 0, 1500, seed), **options)
    huge = {"model.norm.weight": torch.zeros(1).expand(2**40)}
    for value in ([1], 1, "x", None, {"a": 1}, {1: torch.ones(1)}, torch.ones(3), {"model": {"a": torch.ones(1)}}, {}, huge):
        yield f"a {type(value).__name__}", pickled(lambda file, value=value: torch.save(value, file))
    for content in (
        b"",
        b"PK",
        b"\x80\x02.",
        b"cos\nsystem\n(S'touch ran'\ntR.",
        b"\x80\x04\x95" + b"\xff" * 8,
        b"I" + b"9" * 10**6,
    ):
        yield f"bytes {content[:9]!r}", pickled(lambda file, content=content: file.write_bytes(content))


def test_pickled_weights(tries: Tries, models: Models) -> None:
    for label, damage in tries.chosen(pickle_damages()):
        accepted = True if label.endswith("nothing") else None if "noise" in label else False
        attempt(tries, models, f"pickle: {label}", damage, accepted=accepted)


NAMES = (
    "a b",
    "it's",
    'a"b',
    "a,b",
    "a=b",
    "[x]",
    "{a}",
    "$(touch ran)",
    "${oc.env:HOME}",
    "a\\b",
    "a'\\",
    "a\\${x}",
    "${x",
    "a\\'b",
    "#x",
    "-x",
    "~x",
    "é",
)
NAMES += ("a\nb", "\x1b[2J", "\udcff", "x" * 200, "%s", "null", "7", "snapshots", ".hidden")
NO_NAMES = ("", " ", "\n", "\0", "x" * 300, "x" * 10**5, "../../x", "x/y/z", "a/b\n", "a/\x1b[2J", "~nobody/x", "https://x.y/a")
NO_NAMES += ("..", "file:///x", "a/b@c", "-", "--", "{}", "/dev/null", "/dev/zero", "/proc/self", "/etc/passwd", "a/../b", "//")


def test_names(tries: Tries, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders with such names are served from Python and by ``--model``; other names are refused."""
    for name, load in tries.chosen([*product(NAMES, (load_folder, load_by_argument)), *product(NO_NAMES, (load_by_argument,))]):
        folder = models.damaged()
        monkeypatch.chdir(folder.parent)
        if name in NAMES:
            folder.rename(name)
        path = str(Path(name).absolute()) if load is load_folder else name
        right = models.expected().equals
        accepted = name in NAMES and name.isprintable()
        tries.python(f"{load.__name__} {path!r:.60}", lambda load=load, path=path: load(path), right, accepted=accepted)


def load_by_argument(model: str) -> Outcome:
    return load_folder(compose("generate", own_overrides(model, None)).model.path)


def test_commands(tries: Tries, models: Models) -> None:
    cases: list[tuple[str, Damage]] = [("nothing", lambda at: None)]
    cases += [
        (f"{key}={value}", edited(CONFIG, key, value=value)) for key in ("hidden_size", "auto_map") for value in (-1, [], "x")
    ]
    cases += [(f"{file} cut", lambda at, file=file: cut(at / file, 0.5)) for file in (CONFIG, WEIGHTS, VOCABULARY, SETTINGS)]
    cases += [("template", edited(SETTINGS, "chat_template", value="{% for")), ("pickle", pickled(lambda file: cut(file, 0.5)))]
    arguments = ("--prompt", TEXT, "select=quest", "max_new_tokens=2", "device=cpu")
    for label, damage in tries.chosen(cases):
        positions = edited(CONFIG, "max_position_embeddings", value=10**6)  # sizes that fit it are no reason for a line
        folder = models.damaged(positions, damage) if label != "config.json cut" else models.damaged(damage)
        right = lambda out: "are equal" in out  # noqa: E731
        accepted = True if label == "nothing" else None if label.startswith("auto_map") else False
        tries.command(label, "generate", "--model", str(folder), *arguments, right=right, accepted=accepted)
