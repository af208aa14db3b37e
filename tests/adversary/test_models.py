"""Hostile model folders: values in config.json, damaged files, weights that do not fit, names.

A try is served right if every result equals that of the undamaged folder, or what the libraries
make of the damaged files directly (:func:`tests.adversary.model_folders.right`).
"""

import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, LlamaConfig

from msattn.trainer.commands.compose import compose
from msattn.trainer.commands.own import own_overrides
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
    Outcome,
    attempt,
    edit,
    edited,
    file_damages,
    known_end,
    linked,
    load_folder,
    right,
)
from tests.adversary.tries import Tries, spread
from tests.factory import FAMILIES, OTHER_FAMILIES, ROPES, tiny_model

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


@pytest.mark.slow
def test_values_of_keys_that_some_families_have(tries: Tries, models: Models) -> None:
    common = {item.name for item in fields(LlamaConfig)} - {"rope_parameters"}
    keys = {
        item.name: family
        for family in OTHER_FAMILIES
        for item in fields(CONFIG_MAPPING[family])
        if item.name not in common
    }
    for (key, family), (name, value) in spread(keys.items(), HOSTILE.items()):
        folder = models.damaged(edited(CONFIG, key, value=value), family=family)
        finite: Callable[[Outcome], bool] = lambda found: bool(found.logits.isfinite().all())  # noqa: E731
        tries.python(f"{family} {key}={name}", lambda folder=folder: load_folder(folder), finite)


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


def forms() -> dict[str, Damage]:
    """Returns the changes that bring a model into each form that transformers writes."""
    pickles = {f"pickled, {name}": pickled(**options) for name, options in PICKLES.items()}
    return {"whole": lambda at: None, "in parts": shard, **pickles}


def test_other_files(tries: Tries, models: Models) -> None:
    """Adapters and files of other formats, beside the model."""
    files = (
        "adapter_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        INDEX,
        PICKLE,
        "processor_config.json",
    )
    other_model = {
        "base_model_name_or_path": "/etc",
        "peft_type": "LORA",
        "eos_token": "t5",
        "tokenizer_class": "Own",
    }
    contents = (
        "[]",
        "{x",
        json.dumps(other_model),
        json.dumps({"hostile": 10**6, "t3": 5}),
        "[" * 10**5,
    )
    for file, content in spread((*files, *files), contents):
        attempt(
            tries,
            models,
            f"{file} is {content[:20]}",
            lambda at, file=file, text=content: (at / file).write_text(text),
        )


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
    for label, value in drawn(HOSTILE.items(), 6):
        yield f"weight_map={label}", edited(INDEX, "weight_map", value=value)
    yield from drawn(file_damages(INDEX), 6)
    part = "model-00002-of-00002.safetensors"
    yield f"without {part}", lambda at: (at / part).unlink()
    yield f"a pipe for {part}", lambda at: ((at / part).unlink(), os.mkfifo(at / part))
    yield f"cut {part}", lambda at: cut(at / part, 0.5)
    yield "a tensor twice", twice
    yield (
        "another checkpoint",
        lambda at: save_file(
            {"x": torch.ones(1)}, at / "shard-00000-model-00000-of-00001.safetensors"
        ),
    )


def all_in(at: Path, file: str) -> None:
    names = json.loads((at / INDEX).read_text())["weight_map"]
    edit(at / INDEX, ("weight_map",), dict.fromkeys(names, file))


def twice(at: Path) -> None:
    """The second file has other values of a tensor that the index assigns to the first."""
    first, second = sorted(at.glob("model-*.safetensors"))
    name = next(iter(load_file(first)))
    save_file(
        load_file(second) | {name: torch.zeros_like(load_file(first)[name])},
        second,
        {"format": "pt"},
    )


@pytest.mark.slow
def test_weights_in_parts(tries: Tries, models: Models) -> None:
    for label, damage in index_damages():
        accepted = True if label == "nothing" else None if label in HARMLESS else False
        attempt(tries, models, f"index: {label}", shard, damage, accepted=accepted)


def pickled(change: Damage = lambda file: None, **options: Any) -> Damage:
    """Returns the damage that saves the weights by pickle and then may change the file."""

    def damage(at: Path) -> None:
        torch.save(load_file(at / WEIGHTS), at / PICKLE, **options)
        (at / WEIGHTS).rename(at.parent / WEIGHTS)
        change(at / PICKLE)

    return damage


PICKLES: dict[str, dict[str, Any]] = {"zip": {}, "old": {"_use_new_zipfile_serialization": False}}


def pickle_damages() -> Iterator[tuple[str, Damage]]:
    for label, options in PICKLES.items():
        yield f"{label}, nothing", pickled(**options)
        yield f"{label}, cut", pickled(lambda file: cut(file, 0.5), **options)
        yield f"{label}, noise", pickled(lambda file: noise(file, 0, 1500, 0), **options)
    huge = {"model.norm.weight": torch.zeros(1).expand(2**40)}
    for value in (
        [1],
        None,
        {"a": 1},
        {1: torch.ones(1)},
        torch.ones(3),
        {"model": {"a": torch.ones(1)}},
        {},
        huge,
    ):
        yield (
            f"a {type(value).__name__}",
            pickled(lambda file, value=value: torch.save(value, file)),
        )
    for content in (b"", b"PK", b"cos\nsystem\n(S'touch ran'\ntR.", b"I" + b"9" * 10**6):
        yield (
            f"bytes {content[:9]!r}",
            pickled(lambda file, content=content: file.write_bytes(content)),
        )


def test_pickled_weights(tries: Tries, models: Models) -> None:
    for label, damage in pickle_damages():
        accepted = True if label.endswith("nothing") else None if "noise" in label else False
        attempt(tries, models, f"pickle: {label}", damage, accepted=accepted)


NAMES = (
    "it's", 'a"b', "a,b", "a=b", "[x]", "$(touch ran)", "${oc.env:HOME}", "a\\b", "a\\${x}", "-x",
    "~x", "é", "\x1b[2J",
    "\udcff",
)  # fmt: skip
NAMES += (
    "x" * 200, "%s", "null", "7", "snapshots",
)  # fmt: skip
NO_NAMES = (
    "", " ", "\n", "\0", "x" * 300, "../../x", "a/b\n", "~nobody/x", "https://x.y/a", "..", "a/b@c",
    "--", "/dev/zero", "//",
)  # fmt: skip


@pytest.mark.slow
def test_names(tries: Tries, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders with such names are served from Python and by ``--model``; other names are
    refused.
    """
    for name, load in [
        *spread(NAMES, (load_folder, load_by_argument)),
        *product(NO_NAMES, (load_by_argument,)),
    ]:
        folder = models.damaged()
        monkeypatch.chdir(folder.parent)
        if name in NAMES:
            folder.rename(name)
        path = str(Path(name).absolute()) if load is load_folder else name
        served = models.expected().equals
        accepted = name in NAMES and name.isprintable()
        tries.python(
            f"{load.__name__} {path!r:.60}",
            lambda load=load, path=path: load(path),
            served,
            accepted=accepted,
        )


def load_by_argument(model: str) -> Outcome:
    return load_folder(compose("generate", own_overrides(model, None)).model.path)


NAME, COMMIT = "someone/small", "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache, without the Hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def cached(cache: Path, folder: Path) -> Path:
    """Copies a folder to the cache as the Hub's client does: blobs by hash, links in a snapshot.
    Returns the snapshot.
    """
    repository = cache / f"models--{NAME.replace('/', '--')}"
    shutil.rmtree(repository, ignore_errors=True)
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            blob = hashlib.sha256(path.read_bytes()).hexdigest()
            shutil.copy(path, repository / "blobs" / blob)
            (snapshot / path.name).symlink_to(f"../../blobs/{blob}")
        else:
            shutil.move(path, snapshot / path.name)
    return snapshot


def attempt_cached(
    tries: Tries, models: Models, cache: Path, case: str, *damages: Damage, accepted: bool
) -> None:
    expected, snapshot = models.expected(), cached(cache, models.damaged(*damages))
    tries.python(
        case,
        lambda: load_folder(NAME),
        lambda found: right(snapshot, found, expected),
        accepted=accepted,
    )


@pytest.mark.slow
def test_undamaged_hub_models(tries: Tries, models: Models, cache: Path) -> None:
    for form, change in forms().items():
        attempt_cached(tries, models, cache, form, change, accepted=True)


def test_adapters_of_hub_models(tries: Tries, models: Models, cache: Path, tmp_path: Path) -> None:
    """transformers would load the base model that the adapter names; another complete model is
    there, with other weights.
    """
    other = tmp_path / "other"
    tiny_model(seed=7).save_pretrained(other)
    bases = {"a folder": str(other), "itself": NAME, "nowhere": "no/thing", "nothing": None}
    for (form, change), (base, name) in spread(forms().items(), bases.items()):

        def with_adapter(at: Path, name: str | None = name) -> None:
            edit(at / "adapter_config.json", ("base_model_name_or_path",), name)
            edit(at / "adapter_config.json", ("peft_type",), "LORA")

        attempt_cached(
            tries, models, cache, f"{form}, adapter of {base}", change, with_adapter, accepted=False
        )
