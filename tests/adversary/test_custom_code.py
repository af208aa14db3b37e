"""Code in the files of a model: modules that its JSON names, pickles, templates. None runs, also if
standard input says yes.

The payloads write a file. A try ends well if there is no such file, and the model is refused or
served as without the payload.
"""

import io
import json
import os
import pickle
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.adversary.model_folders import (
    CONFIG,
    GENERATION,
    SETTINGS,
    WEIGHTS,
    Damage,
    Models,
    attempt,
    edited,
)
from tests.adversary.tries import Tries, spread

MARKER = "ran"  # the file that payloads write, in the working directory
CODE = f"""
open({MARKER!r}, "w").close()

class Own:
    def __getattr__(self, name):
        open({MARKER!r}, "w").close()

def generate(model, **options):
    open({MARKER!r}, "w").close()
"""
CLASSES = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "AutoModel", "AutoProcessor")
MODULES = (
    "own.py",
    "modeling_llama.py",
    "configuration_llama.py",
    "tokenization_llama.py",
    "custom_generate/generate.py",
)


class Payload:
    """Code that unpickling runs."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.parts = call, arguments

    def __reduce__(self) -> Any:
        return self.parts


PAYLOADS = (Payload(open, MARKER, "w"), Payload(os.system, f"touch {MARKER}"), Payload(exec, CODE))
ESCAPES = (
    "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
    "{{ lipsum.__globals__['os'].popen('touch ran').read() }}",
    "{{ self.__init__.__globals__.__builtins__.open('ran', 'w') }}",
    "{{ (messages | attr('append')).__self__.__class__.__base__.__subclasses__() }}",
    "{{ strftime_now.__globals__['__builtins__']['open']('ran', 'w') }}",
    "{% set x = {}.__class__.__base__ %}{{ x.__subclasses__() }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ messages | map('attr', '__class__') | list }}{{ messages.__class__.mro() }}",
)


@pytest.fixture(autouse=True)
def _marked(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads write their file to an empty folder, and questions are answered by yes."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 1000))
    monkeypatch.setattr("builtins.input", lambda *_: "y")


def attempt_without_code(tries: Tries, models: Models, case: str, *damages: Damage) -> None:
    attempt(tries, models, case, *damages)
    if Path(MARKER).exists():
        Path(MARKER).unlink()
        tries.bad.append(f"{case}: the code ran")


def modules(at: Path) -> None:
    """Writes the modules of a folder with code of its own."""
    for name in MODULES:
        (at / name).parent.mkdir(exist_ok=True)
        (at / name).write_text(CODE)


def named_modules() -> Iterator[tuple[str, Damage]]:
    """Yields ways in which JSON files name modules."""
    references = ("own.Own", "modeling_llama.Own", "nobody/nothing--own.Own", "../model/own.Own")
    files = product((CONFIG, SETTINGS, "processor_config.json", GENERATION), CLASSES)
    for (file, name), reference in spread(files, references):
        yield f"{file} {name}={reference}", edited(file, "auto_map", name, value=reference)
    for value in ("own.Own", ["own.Own", None], [], {"AutoTokenizer": ["own.Own", "own.Own"]}):
        yield f"{SETTINGS} auto_map={value}", edited(SETTINGS, "auto_map", value=value)
    for key, value in spread(
        ("model_type", "tokenizer_class", "architectures"), ("own", "own.Own", ["Own"])
    ):
        yield f"{CONFIG} {key}={value}", edited(CONFIG, key, value=value)
        yield f"{SETTINGS} {key}={value}", edited(SETTINGS, key, value=value)
    for key in (
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_internal",
        "_experts_implementation",
    ):
        yield f"{CONFIG} {key}", edited(CONFIG, key, value="nobody/nothing")
    yield (
        "custom_generate",
        edited(GENERATION, "custom_generate", value="custom_generate/generate.py"),
    )


@pytest.mark.slow
def test_modules(tries: Tries, models: Models) -> None:
    """A tokenizer with code of its own is refused; a model of a known family needs none."""
    own = edited(CONFIG, "model_type", value="own")
    for (name, damage), unknown in spread(named_modules(), (False, True, False)):
        attempt_without_code(
            tries,
            models,
            f"{name}, unknown={unknown}",
            modules,
            *([own] if unknown else []),
            damage,
        )


def test_pickles(tries: Tries, models: Models) -> None:
    """As the weights, among them, and as a part that an index names."""
    for place, (payload, protocol) in spread(
        [*PLACES, *PLACES], zip(PAYLOADS, (0, 2, 4), strict=True)
    ):

        def damage(
            at: Path, payload: Payload = payload, protocol: int = protocol, place: str = place
        ) -> None:
            PLACES[place](at, payload, protocol)

        attempt_without_code(
            tries, models, f"{payload.parts[0]} by protocol {protocol} in {place}", damage
        )


def alone(at: Path, payload: Payload, protocol: int) -> None:
    (at / WEIGHTS).unlink()
    (at / "pytorch_model.bin").write_bytes(pickle.dumps(payload, protocol))


def among_weights(at: Path, payload: Payload, protocol: int) -> None:
    found = load_file(at / WEIGHTS) | {"model.extra": payload}
    (at / WEIGHTS).unlink()
    torch.save(found, at / "pytorch_model.bin", pickle_protocol=max(protocol, 2))


def in_a_part(at: Path, payload: Payload, protocol: int) -> None:
    names = list(load_file(at / WEIGHTS))
    (at / WEIGHTS).unlink()
    (at / "part.bin").write_bytes(pickle.dumps(dict.fromkeys(names, payload), protocol))
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        (at / index).write_text(
            json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "part.bin")})
        )


def as_safetensors(at: Path, payload: Payload, protocol: int) -> None:
    (at / WEIGHTS).write_bytes(pickle.dumps(payload, protocol))


PLACES = {
    "the weights": alone,
    "the weights of one name": among_weights,
    "a part": in_a_part,
    "safetensors": as_safetensors,
}


def test_templates(tries: Tries, models: Models) -> None:
    for escape in ESCAPES:
        attempt_without_code(
            tries, models, f"template {escape}", edited(SETTINGS, "chat_template", value=escape)
        )
