"""Hostile model folders: values in their JSON files, damaged files, weights that do not fit, tokenizers, templates, names.

A try is served right if every result equals that of the undamaged folder, or that of a second, direct way from the damaged files:
logits of transformers' own class with the same value, tokens of the library ``tokenizers``, texts of plain Jinja.
"""

import itertools
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2 import Environment
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from msattn.trainer.models import limited
from tests.adversary.model_folders import HOSTILE, REMOVED, TEXT, Copies, Outcome, edit, load_folder, save_base
from tests.adversary.tries import Tries
from tests.factory import FAMILIES, random_tokens

pytestmark = pytest.mark.area("model folders")

OTHER_KEYS = (  # of config.json, that the small model does not have
    "_attn_implementation",
    "_attn_implementation_internal",
    "_experts_implementation",
    "_name_or_path",
    "attn_implementation",
    "attn_logit_softcapping",
    "auto_map",
    "base_model_tp_plan",
    "chunk_size_feed_forward",
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
ROPE_KEYS = {  # by type of RoPE
    "default": ("rope_type", "rope_theta", "factor", "partial_rotary_factor", "type", "full_attention", "unknown"),
    "linear": ("rope_theta", "factor"),
    "dynamic": ("rope_theta", "factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "truncate"),
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
}
GENERATION_KEYS = ("eos_token_id", "bos_token_id", "pad_token_id", "num_beams", "max_length", "max_new_tokens", "do_sample")
GENERATION_KEYS += ("temperature", "top_k", "top_p", "repetition_penalty", "custom_generate", "cache_implementation", "max_time")
GENERATION_KEYS += ("stop_strings", "suppress_tokens", "bad_words_ids", "forced_eos_token_id", "use_cache", "watermarking_config")
GENERATION_KEYS += ("prompt_lookup_num_tokens", "num_return_sequences", "compile_config", "sequence_bias", "min_new_tokens")
GENERATION_KEYS += ("return_dict_in_generate", "guidance_scale", "penalty_alpha", "_from_model_config", "generation_kwargs")
TOKENIZER_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token", "additional_special_tokens", "extra_special_tokens")
TOKENIZER_KEYS += ("added_tokens_decoder", "chat_template", "model_max_length", "tokenizer_class", "auto_map", "padding_side")
TOKENIZER_KEYS += ("add_bos_token", "add_prefix_space", "clean_up_tokenization_spaces", "split_special_tokens", "vocab_file")
TOKENIZER_KEYS += ("init_inputs", "tokenizer_object", "tokenizer_file", "name_or_path", "model_input_names", "backend", "vocab")
TOKENIZER_KEYS += ("post_processor", "is_local", "truncation_side", "errors", "legacy", "self", "fix_mistral_regex", "merges")
DOCUMENTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "SECONDS", 1)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save_base(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture(scope="module")
def base(bases: dict[str, Path]) -> Path:
    return bases["llama"]


@pytest.fixture(scope="module")
def expected(base: Path) -> Outcome:
    return load_folder(base)


@pytest.fixture
def copies(base: Path, tmp_path: Path) -> Copies:
    return Copies(base, tmp_path / "model")


def logits_of_transformers(folder: Path) -> torch.Tensor:
    """Logits of transformers' class for ``config.json``, with the weights of the folder and nothing else of it."""
    config = json.loads((folder / "config.json").read_text())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="sdpa").eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    with torch.no_grad():
        return model(random_tokens(1, 9)).logits


def another_model(folder: Path, found: Outcome, expected: Outcome) -> bool:
    """Returns whether only logits differ, and are those of transformers' class, finite and different for each token."""
    same = found.logits.isfinite().all() and torch.equal(found.logits, logits_of_transformers(folder))
    return bool(same and found.logits.std() > 0.01 and found.tokens_equal(expected))


def test_values_of_the_configuration(tries: Tries, copies: Copies, expected: Outcome) -> None:
    """RMS norms may have another epsilon; every other key has one right value, or changes nothing."""
    keys = [*json.loads((copies.base / "config.json").read_text()), *OTHER_KEYS]
    for key, (name, value) in tries.chosen(itertools.product(keys, HOSTILE.items())):
        folder = copies.damaged(lambda at, key=key, value=value: edit(at, "config.json", key, value))
        epsilon = key == "rms_norm_eps" and value in (0, 0.5, 1)

        def served(found: Outcome, folder: Path = folder, epsilon: bool = epsilon) -> bool:
            return found.equals(expected) or (epsilon and another_model(folder, found, expected))

        tries.python(f"config.json {key}={name}", lambda folder=folder: load_folder(folder), served)


def test_values_of_rope(tries: Tries, copies: Copies, expected: Outcome) -> None:
    """Positive numbers of a RoPE type, and types, describe another model."""
    keys = [(kind, key) for kind, several in ROPE_KEYS.items() for key in several]
    for (kind, key), (name, value), place in tries.chosen(
        itertools.product(keys, HOSTILE.items(), ("rope_parameters", "rope_scaling"))
    ):

        def damage(at: Path, kind: str = kind, key: str = key, value: Any = value, place: str = place) -> None:
            edit(at, "config.json", "rope_parameters", REMOVED)
            edit(at, "config.json", place, dict(ROPES[kind]))
            edit(at, "config.json", f"{place}.{key}", value)

        folder = copies.damaged(damage)
        number = (type(value) in (int, float) and value > 0) or (key == "truncate" and isinstance(value, bool))

        def served(found: Outcome, folder: Path = folder, number: bool = number, kind: str = kind) -> bool:
            unchanged = found.equals(expected) and kind == "default"
            return unchanged or ((number or value is REMOVED) and another_model(folder, found, expected))

        tries.python(f"{place} {kind} {key}={name}", lambda folder=folder: load_folder(folder), served)


def test_values_of_generation(tries: Tries, copies: Copies, expected: Outcome) -> None:
    """Another end token ends greedy tokens earlier; every other key is refused, or changes nothing."""
    for key, (name, value) in tries.chosen(itertools.product(GENERATION_KEYS, HOSTILE.items())):
        folder = copies.damaged(lambda at, key=key, value=value: edit(at, "generation_config.json", key, value))
        ends = (value if isinstance(value, list) else [value]) if key == "eos_token_id" else [0]

        def served(found: Outcome, ends: list[Any] = ends) -> bool:
            first = next((i for i, token in enumerate(expected.greedy) if token in ends), len(expected.greedy))
            return found.with_greedy(expected.greedy[: first + 1]).equals(found) and found.with_greedy(expected.greedy).equals(expected)

        tries.python(f"generation_config.json {key}={name}", lambda folder=folder: load_folder(folder), served)


def test_values_of_the_tokenizer(tries: Tries, copies: Copies, expected: Outcome) -> None:
    """A text as chat template is the message; every other key is refused, or changes nothing."""
    for key, (name, value) in tries.chosen(itertools.product(TOKENIZER_KEYS, HOSTILE.items())):
        folder = copies.damaged(lambda at, key=key, value=value: edit(at, "tokenizer_config.json", key, value))
        message = expected.message
        if key == "chat_template" and isinstance(value, str):
            message = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(value).ids

        def served(found: Outcome, message: list[int] = message) -> bool:
            return found.message == message and found.with_message(expected.message).equals(expected)

        tries.python(f"tokenizer_config.json {key}={name}", lambda folder=folder: load_folder(folder), served)


def places(document: Any, prefix: str = "") -> Iterator[str]:
    """Yields the dotted paths of a JSON document, three of each list or object that is long."""
    items = list(document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ())
    for key, value in items if len(items) < 20 else items[:3]:
        yield f"{prefix}{key}"
        yield from places(value, f"{prefix}{key}.")


def test_values_of_the_vocabulary(tries: Tries, copies: Copies, expected: Outcome) -> None:
    """Another vocabulary is served if the library ``tokenizers`` alone gives the same tokens, and the model has them all."""
    keys = list(places(json.loads((copies.base / "tokenizer.json").read_text())))
    keys += ["normalizer.type", "post_processor.type", "decoder.type", "padding.strategy", "truncation.max_length"]
    for key, (name, value) in tries.chosen(itertools.product(keys, HOSTILE.items())):

        def damage(at: Path, key: str = key, value: Any = value) -> None:
            if "." in key:
                document = json.loads((at / "tokenizer.json").read_text())
                if document.get(key.partition(".")[0]) is None:
                    edit(at, "tokenizer.json", key.partition(".")[0], {})
            edit(at, "tokenizer.json", key, value)

        folder = copies.damaged(damage)

        def served(found: Outcome, folder: Path = folder) -> bool:
            direct = Tokenizer.from_file(str(folder / "tokenizer.json"))
            direct.no_padding()
            direct.no_truncation()
            same = found.text == direct.encode(TEXT).ids and max(found.text, default=128) < 128
            return same and torch.equal(found.logits, expected.logits) and found.greedy == expected.greedy

        tries.python(f"tokenizer.json {key}={name}", lambda folder=folder: load_folder(folder), served)


BOMBS = {  # tokenizers that take long or much memory for a text
    "doubling": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "t"}, "content": "tt"}] * 60}},
    "growing": {"normalizer": {"type": "Replace", "pattern": {"String": "t"}, "content": "t " * 10**6}},
    "backtracking": {"normalizer": {"type": "Replace", "pattern": {"Regex": "(t+)+$|(.*)*x"}, "content": ""}},
    "backtracking split": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(\\w+\\s?)+y"}, "behavior": "Isolated", "invert": False}},
    "wrong regex": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "((("}, "behavior": "Isolated", "invert": False}},
    "padding": {"padding": {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "t0"}},
    "truncation": {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}},
    "no unknown token": {"model": {"type": "WordLevel", "vocab": {"t0": 0}, "unk_token": "none"}},
    "high ids": {"model": {"type": "WordLevel", "vocab": {"t0": 0, "t3": 10**6}, "unk_token": "t0"}},
    "highest id": {"model": {"type": "WordLevel", "vocab": {"t0": 0, "t3": 2**32 - 1}, "unk_token": "t0"}},
    "high added id": {"added_tokens": [{"id": 10**6, "content": "t7", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}]},
    "high end id": {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {"x": {"id": "x", "ids": [10**6], "tokens": ["x"]}}}},
    "no merges": {"model": {"type": "BPE", "vocab": {"t": 0}, "merges": ["t 3"]}},
    "unigram": {"model": {"type": "Unigram", "vocab": [["t0", 0.0], ["t", -1e308]], "unk_id": 7}},
    "unigram of nothing": {"model": {"type": "Unigram", "vocab": [], "unk_id": None}},
    "dropout": {"model": {"type": "BPE", "vocab": {"t": 0, "3": 1, "t3": 2}, "merges": ["t 3"], "dropout": 0.5}},
    "many bytes": {"model": {"type": "BPE", "vocab": {}, "merges": [], "byte_fallback": True}},
}


def test_tokenizers_that_explode(tries: Tries, copies: Copies, expected: Outcome) -> None:
    for name, changes in tries.chosen(BOMBS.items()):

        def damage(at: Path, changes: dict[str, Any] = changes) -> None:
            for key, value in changes.items():
                edit(at, "tokenizer.json", key, value)

        folder = copies.damaged(damage)
        tries.python(f"tokenizer.json {name}", lambda folder=folder: load_folder(folder), lambda found: found.equals(expected))


def test_damaged_documents(tries: Tries, copies: Copies, expected: Outcome) -> None:
    """Only a generation configuration may be left out."""
    for file, (name, damage) in tries.chosen(itertools.product(DOCUMENTS, document_damages())):
        folder = copies.damaged(lambda at, file=file, damage=damage: damage(at / file))
        same = name in ("repeated key", "link within")
        optional = file == "generation_config.json" and name in ("missing", "dangling link", "link to itself")

        def served(found: Outcome, same: bool = same, optional: bool = optional) -> bool:
            return (same or optional) and found.equals(expected)

        tries.python(f"{file} {name}", lambda folder=folder: load_folder(folder), served)


def document_damages() -> list[tuple[str, Callable[[Path], object]]]:
    rng = random.Random(0)

    def content(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
        return lambda path: path.write_bytes(change(path.read_bytes()))

    def link(target: str) -> Callable[[Path], object]:
        return lambda path: (path.unlink(), path.symlink_to(target))

    def moved(path: Path, at: Path) -> None:
        at.parent.mkdir(exist_ok=True)
        shutil.move(path, at)
        path.symlink_to(os.path.relpath(at, path.parent))

    damages: list[tuple[str, Callable[[Path], object]]] = [
        (f"cut at {share:.2f}", content(lambda data, share=share: data[: int(share * len(data))]))
        for share in (0, *(rng.uniform(0.01, 0.98) for _ in range(8)))
    ]
    damages += [
        (f"is {text[:20]!r}", content(lambda data, text=text: text))
        for text in (b"null", b"[]", b'"text"', b"7", b"NaN", b"\x00" * 100, b"[" * 10**5, b'{"a":' * 10**5, b"\xff\xfe{}", b"\xef\xbb\xbf{}")
    ]
    damages += [
        ("not UTF-8", content(lambda data: data.replace(b'"', b'\xff"', 1))),
        ("NaN", content(lambda data: data.replace(b"{", b'{"x": NaN, ', 1))),
        ("deep", content(lambda data: data.replace(b"{", b'{"x": ' + b"[" * 500 + b"]" * 500 + b", ", 1))),
        ("deeper", content(lambda data: data.replace(b"{", b'{"x": ' + b"[" * 10**5 + b"]" * 10**5 + b", ", 1))),
        ("long number", content(lambda data: data.replace(b"{", b'{"x": ' + b"1" * 10**4 + b", ", 1))),
        ("repeated key", content(lambda data: data.replace(b"{", b'{"backend": "tokenizers", ', 1) if b'"backend"' in data else data)),
        ("a gigabyte", lambda path: os.truncate(path, 2**30)),
        ("missing", lambda path: path.unlink()),
        ("folder", lambda path: (path.unlink(), path.mkdir())),
        ("pipe", lambda path: (path.unlink(), os.mkfifo(path))),
        ("dangling link", link("none.json")),
        ("link to itself", lambda path: (path.unlink(), path.symlink_to(path.name))),
        ("link to a device", link("/dev/zero")),
        ("link to a secret", link("/etc/passwd")),
        ("link to a folder", link("/")),
        ("link within", lambda path: moved(path, path.parent / "other" / "file")),
        ("link out", lambda path: moved(path, path.parent.parent / "outside" / path.name)),
    ]
    return damages


def weight_damages() -> Iterator[tuple[str, Callable[[Path], object]]]:
    rng = random.Random(1)

    def content(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
        return lambda at: (at / FILE).write_bytes(change((at / FILE).read_bytes()))

    def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
        def damage(at: Path) -> None:
            found = load_file(at / FILE)
            change(found)
            save_file(found, at / FILE, {"format": "pt"})

        return damage

    for share in (0, *(rng.uniform(0, 1) for _ in range(8))):
        yield f"cut at {share:.3f}", content(lambda data, share=share: data[: int(share * len(data))])
    for size in (0, 1, 2**20, 2**40, 2**63):
        yield f"header of {size} bytes", content(lambda data, size=size: struct.pack("<Q", size) + data[8:])
    for seed in range(12):  # the header of 2 kB decides the shapes
        yield f"header with noise {seed}", content(lambda data, seed=seed: noise(data, 8, 2000, 6, seed))
    yield "random bytes", content(lambda data: random.Random(0).randbytes(len(data)))
    yield "longer", content(lambda data: data + b"x")
    names = list(load_names())
    for name in names:
        yield f"without {name}", tensors(lambda found, name=name: found.pop(name))
        yield f"{name} transposed", tensors(lambda found, name=name: found.update({name: found[name].T.contiguous()}))
        yield f"{name} cut", tensors(lambda found, name=name: found.update({name: found[name][:-1].clone()}))
        yield f"{name} flat", tensors(lambda found, name=name: found.update({name: found[name].flatten()}))
        yield f"{name} renamed", tensors(lambda found, name=name: found.update({f"x.{name}": found.pop(name)}))
        yield f"{name} empty", tensors(lambda found, name=name: found.update({name: found[name][:0].clone()}))
        yield f"{name} is NaN", tensors(lambda found, name=name: found[name].view(-1)[:1].fill_(float("nan")))
        yield f"{name} is infinite", tensors(lambda found, name=name: found[name].view(-1)[-1:].fill_(float("inf")))
        for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64):
            yield f"{name} as {dtype}", tensors(lambda found, name=name, dtype=dtype: found.update({name: found[name].to(dtype)}))
    for extra in ("x", "model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "model.embed_tokens.scale"):
        yield f"with {extra}", tensors(lambda found, extra=extra: found.update({extra: torch.zeros(4)}))
    yield "of other letters", tensors(lambda found: [found.update({name.upper(): found.pop(name)}) for name in list(found)])
    yield "of nothing", tensors(lambda found: found.clear())


FILE = "model.safetensors"


def load_names() -> list[str]:
    layer = [f"model.layers.1.{part}.weight" for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "input_layernorm")]
    return ["model.embed_tokens.weight", *layer, "model.norm.weight", "lm_head.weight"]


def noise(data: bytes, first: int, last: int, count: int, seed: int) -> bytes:
    """Returns ``data`` with ``count`` random bytes between two places."""
    rng, changed = random.Random(seed), bytearray(data)
    for _ in range(count):
        changed[rng.randrange(first, last)] = rng.randrange(256)
    return bytes(changed)


def test_weights_that_do_not_fit(tries: Tries, copies: Copies, expected: Outcome) -> None:
    """No damage of the weights is served, except noise in the header that changes no name, shape or offset."""
    for name, damage in tries.chosen(weight_damages()):
        folder = copies.damaged(damage)
        tries.python(f"weights {name}", lambda folder=folder: load_folder(folder), lambda found: found.equals(expected))


@pytest.fixture
def sharded(base: Path, tmp_path: Path) -> Copies:
    """The model in two files of weights and an index."""
    shutil.copytree(base, tmp_path / "sharded")
    tensors = list(load_file(base / FILE).items())
    (tmp_path / "sharded" / FILE).unlink()
    parts = {"model-00001-of-00002.safetensors": dict(tensors[:7]), "model-00002-of-00002.safetensors": dict(tensors[7:])}
    for file, part in parts.items():
        save_file(part, tmp_path / "sharded" / file, {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "sharded" / INDEX).write_text(json.dumps(index))
    return Copies(tmp_path / "sharded", tmp_path / "model")


INDEX = "model.safetensors.index.json"


def test_shards(tries: Tries, sharded: Copies, base: Path, expected: Outcome, tmp_path: Path) -> None:
    """A file outside the folder is not read, not even with the right weights; a file of the index must exist."""
    shutil.copytree(base, tmp_path / "elsewhere")
    outside = ["../elsewhere/model.safetensors", str(tmp_path / "elsewhere/model.safetensors"), "/etc/passwd", "../../../etc/passwd"]
    outside += ["~/model.safetensors", "", ".", "..", "none.safetensors", "model.bin", "config.json", "a\0b", "\ud800", "x" * 5000]
    name = "model.norm.weight"
    cases: list[tuple[str, Callable[[Path], object]]] = [("undamaged", lambda at: None)]
    cases += [(f"{name} in {file!r:.40}", lambda at, file=file: edit_index(at, name, file)) for file in outside]
    cases += [(f"all in {file!r:.40}", lambda at, file=file: edit_index(at, None, file)) for file in outside]
    for key, (label, value) in itertools.product(("weight_map", "metadata", "x"), HOSTILE.items()):
        cases.append((f"{key}={label}", lambda at, key=key, value=value: edit(at, INDEX, key, value)))
    cases += [(f"{label}", lambda at, damage=damage: damage(at / INDEX)) for label, damage in document_damages()]
    for shard in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        cases.append((f"without {shard}", lambda at, shard=shard: (at / shard).unlink()))
        cases.append((f"pipe {shard}", lambda at, shard=shard: ((at / shard).unlink(), os.mkfifo(at / shard))))
        cases.append((f"folder {shard}", lambda at, shard=shard: ((at / shard).unlink(), (at / shard).mkdir())))
        cases.append((f"cut {shard}", lambda at, shard=shard: os.truncate(at / shard, 5000)))
    cases.append(("a tensor twice", twice))
    cases.append(("another checkpoint", lambda at: save_file({"x": torch.zeros(1)}, at / "shard-00000-model-00000-of-00001.safetensors")))
    for label, damage in tries.chosen(cases):
        folder = sharded.damaged(damage)
        tries.python(f"index {label}", lambda folder=folder: load_folder(folder), lambda found: found.equals(expected))


def edit_index(at: Path, name: str | None, file: str) -> None:
    index = json.loads((at / INDEX).read_text())
    index["weight_map"] = {key: file if name in (None, key) else value for key, value in index["weight_map"].items()}
    (at / INDEX).write_text(json.dumps(index))


def twice(at: Path) -> None:
    """The second file has other values of a tensor that the index assigns to the first."""
    first, second = sorted(at.glob("model-*.safetensors"))
    name = next(iter(load_file(first)))
    save_file(load_file(second) | {name: torch.zeros_like(load_file(first)[name])}, second, {"format": "pt"})


def test_pickled_weights(tries: Tries, copies: Copies, expected: Outcome) -> None:
    def pickled(change: Callable[[Path], object], **options: Any) -> Callable[[Path], object]:
        def damage(at: Path) -> None:
            torch.save(load_file(at / FILE), at / "pytorch_model.bin", **options)
            (at / FILE).unlink()
            change(at / "pytorch_model.bin")

        return damage

    def other(value: Any) -> Callable[[Path], object]:
        return pickled(lambda file: torch.save(value, file))

    rng = random.Random(2)
    cases = [("undamaged", pickled(lambda file: None)), ("old format", pickled(lambda file: None, _use_new_zipfile_serialization=False))]
    for share in (0, *(rng.uniform(0, 1) for _ in range(8))):
        cut = lambda file, share=share: os.truncate(file, int(share * file.stat().st_size))  # noqa: E731
        cases += [(f"cut at {share:.2f}", pickled(cut)), (f"old, cut at {share:.2f}", pickled(cut, _use_new_zipfile_serialization=False))]
    for seed in range(30):
        spoil = lambda file, seed=seed: file.write_bytes(noise(file.read_bytes(), 0, 1500, 3, seed))  # noqa: E731
        cases += [(f"noise {seed}", pickled(spoil)), (f"old, noise {seed}", pickled(spoil, _use_new_zipfile_serialization=False))]
    values = {"list": [1], "number": 1, "text": "x", "nothing": None, "object of numbers": {"a": 1}, "number keys": {1: torch.zeros(1)}, "tensor": torch.zeros(3), "nested": {"model": {"a": torch.zeros(1)}}, "empty": {}, "huge": {"model.norm.weight": torch.zeros(1).expand(2**40)}}
    cases += [(f"a {name}", other(value)) for name, value in values.items()]
    cases += [(f"bytes {data[:12]!r}", pickled(lambda file, data=data: file.write_bytes(data))) for data in (b"", b"PK", b"\x80\x02.", b"cos\nsystem\n(S'touch ran'\ntR.", b"{}", b"\x80\x04\x95" + b"\xff" * 8, b"I" + b"9" * 10**6 + b"\n.")]
    for name, damage in tries.chosen(cases):
        folder = copies.damaged(damage)
        right = "undamaged" in name or "old" in name or "noise" in name
        tries.python(f"pytorch_model.bin {name}", lambda folder=folder: load_folder(folder), lambda found, right=right: right and found.equals(expected))


TEMPLATES = {
    "loop": "{% for i in range(100000) %}{% for j in range(100000) %}{% for k in range(100000) %}{% endfor %}{% endfor %}{% endfor %}",
    "printing loop": "{% for i in range(100000) %}{% for j in range(100000) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "product": "{{ 't' * 10 ** 11 }}",
    "list": "{{ ([0] * 10 ** 10) | length }}",
    "doubling": "{% set n = namespace(x='tttttttt') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "width": "{{ '%99999999999d' % 1 }}",
    "format": "{{ '{:>99999999999}'.format(1) }}",
    "center": "{{ 't' | center(10 ** 11) }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "deep": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "syntax": "{% for %}",
    "unclosed": "{% if true %}",
    "unknown tag": "{% python %}",
    "unknown filter": "{{ 1 | hostile }}",
    "undefined": "{{ hostile.attribute }}",
    "undefined message": "{{ messages[7].content }}",
    "wrong type": "{{ messages + 1 }}",
    "division": "{{ 1 / 0 }}",
    "raises": "{{ raise_exception('no') }}",
    "raises lines": "{{ raise_exception('no\nTraceback\nmore') }}",
    "raises nothing": "{{ raise_exception('') }}",
    "raises an object": "{{ raise_exception(messages) }}",
    "includes": "{% include '/etc/passwd' %}",
    "imports": "{% import 'os' as os %}",
    "extends": "{% extends 'x' %}",
    "date": "{{ strftime_now('%Y' * 10 ** 9) }}",
    "wrong date": "{{ strftime_now(7) }}",
    "json": "{{ messages | tojson(indent=10 ** 11) }}",
    "lipsum": "{{ lipsum(n=10 ** 9) }}",
    "batch": "{{ range(9) | batch(10 ** 11, 'x') | list }}",
    "sort": "{{ [1, 'a'] | sort }}",
    "attribute": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
    "surrogate": "{{ '\\ud800' }}",
    "nothing": "",
    "long": "t1 " * 10**6,
    "messages as they are": "{{ messages[0].content }}",
    "control characters": "\x00\x1b[2J{{ messages[0].content }}",
}


def test_chat_templates(tries: Tries, copies: Copies, expected: Outcome) -> None:
    """A template that ends with little text is rendered as by plain Jinja; the others are refused."""
    small = {"nothing", "messages as they are", "control characters", "sort"}
    for (name, template), place in tries.chosen(itertools.product(TEMPLATES.items(), ("tokenizer_config.json", "chat_template.jinja"))):

        def damage(at: Path, template: str = template, place: str = place) -> None:
            edit(at, "tokenizer_config.json", "chat_template", REMOVED if place.endswith("jinja") else template)
            if place.endswith("jinja"):
                (at / place).write_text(template)

        folder = copies.damaged(damage)

        def served(found: Outcome, folder: Path = folder, name: str = name, template: str = template) -> bool:
            text = Environment().from_string(template).render(messages=[{"role": "user", "content": TEXT}])
            ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
            return (name in small or name == "long") and found.message == ids and found.with_message(expected.message).equals(expected)

        tries.python(f"template {name} in {place}", lambda folder=folder: load_folder(folder), served)


QUANTIZATION = ("awq", "bitsandbytes", "bitnet", "compressed-tensors", "fp8", "gptq", "hqq", "mxfp4", "quanto", "torchao", "gguf", "none", "")


def test_quantized_models(tries: Tries, copies: Copies, expected: Outcome) -> None:
    """Quantized weights need a library; without it they are refused."""
    keys = ("load_in_4bit", "bits", "weights", "bnb_4bit_compute_dtype", "modules_to_not_convert", "config_groups", "weight_block_size")
    cases = list(itertools.product(QUANTIZATION, keys, HOSTILE.items()))
    for method, key, (name, value) in tries.chosen(random.Random(3).sample(cases, 150)):
        quantization = {"quant_method": method, "load_in_8bit": True} | ({} if value is REMOVED else {key: value})
        folder = copies.damaged(lambda at, q=quantization: edit(at, "config.json", "quantization_config", q))
        tries.python(f"{method} {key}={name}", lambda folder=folder: load_folder(folder), lambda found: False)


def test_other_files(tries: Tries, copies: Copies, expected: Outcome) -> None:
    """Adapters, special tokens and more templates beside the model."""
    files = ("adapter_config.json", "special_tokens_map.json", "added_tokens.json", "model.safetensors.index.json", "processor_config.json")
    contents = {"nothing": "", "list": "[]", "noise": "{x", "object": "{}", "outside": json.dumps({"base_model_name_or_path": "/etc", "peft_type": "LORA", "eos_token": "t0"}), "tokens": json.dumps({"hostile": 10**6, "t3": 5}), "deep": "[" * 10**5}
    for file, (name, content) in tries.chosen(itertools.product(files, contents.items())):
        folder = copies.damaged(lambda at, file=file, content=content: (at / file).write_text(content))
        tries.python(f"{file} {name}", lambda folder=folder: load_folder(folder), lambda found: found.equals(expected))
