"""Hostile command lines: values of every key, malformed overrides and options, and runs at the ends of ranges."""

import copy
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from msattn.trainer.commands.compose import COMMANDS, compose, compose_raw, initialized_hydra, without_hydra
from msattn.trainer.config import POLICIES, SelectConfig, typed
from msattn.trainer.config.select import own_keys
from msattn.trainer.config.values import CHOICES
from tests.adversary.tries import Tries

pytestmark = pytest.mark.area("command line")

HUGE = int("9" * 30)
LIMIT = 2**32  # no integer beyond is sane
VALUES: dict[str, Any] = {  # the text of a value, and its meaning in Hydra's grammar
    "": "",
    "' '": " ",
    "'1'": "1",
    "1.0": 1.0,
    "1e3": 1000.0,
    "1e400": math.inf,
    "0": 0,
    "-1": -1,
    "1": 1,
    str(HUGE): HUGE,
    str(-(2**63) - 1): -(2**63) - 1,
    "nan": math.nan,
    "null": None,
    "true": True,
    "'false'": "false",
    "[]": [],
    "[1]": [1],
    "['1']": ["1"],
    "[[1]]": [[1]],
    "[true,nan]": [True, math.nan],
    f"[{HUGE}]": [HUGE],
    "{a:1}": {"a": 1},
    "${nowhere}": None,
    "${oc.env:MSATTN_HOSTILE}": "from the environment",
    "???": None,
    "x" * 10_000: "x" * 10_000,
    "'a\0b'": "a\0b",
    "'a\nb'": "a\nb",
    "'\udce9'": "\udce9",
    "'١٢'": "١٢",
    "../../x": "../../x",
}


def leaves_of(schema: type, prefix: str = "") -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yields every key of a schema that is no section: its name, annotation and choices."""
    for item in fields(schema):
        kinds = list(POLICIES.values()) if item.type is SelectConfig else [item.type]
        for kind in kinds:
            if isinstance(kind, type) and is_dataclass(kind):
                yield from leaves_of(kind, f"{prefix}{item.name}.")
            else:
                yield prefix + item.name, kind, tuple(item.metadata.get(CHOICES, ()))


KEYS = {  # name: the first command that has the key, its annotation and choices
    name: (command, kind, choices)
    for command in reversed(COMMANDS)
    for name, kind, choices in leaves_of(COMMANDS[command].schema)
}


def base_overrides(command: str, key: str) -> tuple[str, ...]:
    """Returns overrides with which ``command`` composes and has ``key``."""
    owners = [name for name, kind in POLICIES.items() if key.removeprefix("select.") in own_keys(kind)]
    if key.startswith("select.") and owners:
        return (f"select={owners[0]}", "artifacts.gate=gate")
    return ("artifacts.gate=gate",) if command == "finetune" else ()


@cache
def composed_once(command: str, overrides: tuple[str, ...]) -> Any:
    with initialized_hydra(command) as hydra:
        return without_hydra(compose_raw(hydra, command, overrides))


def compose_value(command: str, key: str, text: str) -> Any:
    """Returns what ``compose`` returns for ``key=text``, with the other keys composed once, which is faster."""
    overrides = base_overrides(command, key)
    config = copy.deepcopy(composed_once(command, overrides))
    try:
        value = OverridesParser.create().parse_override(f"{key}={text}").value()
        OmegaConf.update(config, key, value, merge=True)
    except (HydraException, OmegaConfBaseException, ValueError):
        return compose(command, [*overrides, f"{key}={text}"])
    return typed(config, COMMANDS[command].schema)


def holds(config: Any, key: str, value: Any, kind: Any, choices: tuple[str, ...]) -> bool:
    """Returns True if ``key`` of ``config`` is ``value``, and this has the annotated type and is sane."""
    found = config
    for part in key.split("."):
        found = getattr(found, part)
    if choices and not set(found if isinstance(found, list) else [found]) <= set(choices):
        return False
    if key in ("name", "model.name") and "/" in found:
        return False
    return fits(found, value, kind)


def fits(found: Any, value: Any, kind: Any) -> bool:
    if isinstance(kind, types.UnionType):
        return any(fits(found, value, each) for each in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        same = isinstance(value, list) and isinstance(found, list) and len(value) == len(found)
        return same and all(fits(*pair, typing.get_args(kind)[0]) for pair in zip(found, value, strict=True))
    if typing.get_origin(kind) is dict:
        return isinstance(value, dict) and found == value
    if kind is types.NoneType:
        return found is None and value is None
    if kind is float:
        return type(found) is float and type(value) in (int, float) and math.isfinite(found) and found == value
    if kind is int:
        return type(found) is int and type(value) is int and found == value and abs(found) <= LIMIT
    if kind is str and type(value) is int:
        value = str(value)
    return type(found) is kind and found == value and (kind is not str or found.isprintable())


def test_values_of_every_key(tries: Tries, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSATTN_HOSTILE", "from the environment")
    for key, text in tries.chosen([(key, text) for key in KEYS for text in VALUES]):
        command, kind, choices = KEYS[key]
        tries.python(
            f"{command} {key}={text[:40]!r}",
            lambda command=command, key=key, text=text: compose_value(command, key, text),
            lambda config, key=key, text=text, kind=kind, choices=choices: holds(config, key, VALUES[text], kind, choices),
        )
