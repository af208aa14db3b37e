"""The groups and keys of a command, with defaults and choices; explanations are the comments of the YAML files in ``conf/``."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from msattn.trainer.commands.compose import compose_raw, initialized_hydra, without_hydra
from msattn.trainer.commands.jobs import COMMANDS
from msattn.trainer.config import BASELINES, leaves
from msattn.trainer.config.select import UNTRAINED

CONF = Path(__file__).parents[2] / "conf"


@dataclass(frozen=True)
class Key:
    """A key of a command.

    Attributes
    ----------
    value : the value that is composed, with resolved interpolations.
    comment : the comment in YAML.
    choices : the values that the key, or each of its items, accepts; empty if it is not an enumeration.
    only : what has the key, e.g. ``select=nucleus``, if the composed configuration lacks it.
    """

    name: str
    value: Any
    comment: str
    choices: tuple[str, ...] = ()
    only: str = ""

    @property
    def override(self) -> str:
        """The key and its value, as they are written on the command line."""
        return f"{self.name}={as_override(self.value)}"

    @property
    def explanation(self) -> str:
        """The comment, followed by the choices if it does not name them all."""
        named = all(re.search(rf"\b{re.escape(choice)}\b", self.comment) for choice in self.choices)
        text = self.comment if named else f"{self.comment}: {', '.join(self.choices)}"
        return f"{self.only}: {text}" if self.only else text


@dataclass(frozen=True)
class Group:
    """A configuration group: its options with their explanations, and the option that is composed, None if there is none."""

    name: str
    options: dict[str, str]
    chosen: str | None


@dataclass(frozen=True)
class CommandKeys:
    """The groups and the keys of a command, by name."""

    groups: dict[str, Group]
    keys: dict[str, Key]


def keys_of(command: str, overrides: Sequence[str] = (), *, whole: str | None = None) -> CommandKeys:
    """Returns the groups and keys of ``command``, with the values that ``overrides`` compose.

    Parameters
    ----------
    whole : a group whose other options may have further keys, e.g. ``select``; these keys are returned too.

    Raises
    ------
    UserError : Hydra refuses an override.
    """
    with initialized_hydra(command) as hydra:
        composed = compose_raw(hydra, command, overrides)
        chosen = {name: option for name, option in composed.hydra.runtime.choices.items() if not name.startswith("hydra")}
        options = {name: hydra.config_loader.get_group_options(name) for name in sorted(chosen)}
        keys = _composed_keys(hydra, command, composed, overrides)
        for option in options.get(whole or "", ()):
            if any(not _has(keys, f"{whole}.{key}") for key in _top_keys(str(whole), option)):
                override = f"{whole}={option}"
                found = _composed_keys(hydra, command, compose_raw(hydra, command, [override]), [override])
                keys |= {name: replace(key, only=override) for name, key in found.items() if name not in keys}
    groups = {
        name: Group(name, {option: first_sentence(name, option) for option in found}, chosen[name])
        for name, found in options.items()
    }
    return CommandKeys(groups, keys)


def _has(keys: dict[str, Key], name: str) -> bool:
    return name in keys or any(key.startswith(f"{name}.") for key in keys)


def _composed_keys(hydra: Any, command: str, composed: Any, overrides: Sequence[str]) -> dict[str, Key]:
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    files = hydra.config_loader.compute_defaults_list(COMMANDS[command].config, list(overrides), RunMode.RUN).defaults
    comments: dict[str, str] = {}
    for file in files:  # in the order of composition; a file that overrides a value may leave out the comment
        path = CONF / f"{file.config_path}.yaml"
        if path.is_file():
            comments |= {f"{file.package}.{key}".lstrip("."): text for key, text in yaml_keys(path) if text}
    values: Any = OmegaConf.to_container(without_hydra(composed), resolve=True)
    found = leaves(COMMANDS[command].schema, values)
    return {name: Key(name, value, comments.get(name, ""), choices) for name, choices, value in found}


def _top_keys(group: str, option: str) -> set[str]:
    """Returns the keys at the top of an option's own file; none for options that set keys of other groups."""
    path = CONF / group / f"{option}.yaml"
    if not path.is_file() or "# @package" in path.read_text(encoding="utf-8"):
        return set()
    return {key for key, _ in yaml_keys(path) if "." not in key} - {"defaults"}


def group_options() -> dict[str, list[str]]:
    """Returns the options of the packaged groups of all commands, without composing anything."""
    found: dict[str, list[str]] = {}
    for path in sorted(CONF.glob("*/**/*.yaml")):
        found.setdefault(path.parent.relative_to(CONF).as_posix(), []).append(path.stem)
    found["select"].extend(BASELINES)
    return dict(sorted(found.items()))


def yaml_keys(path: Path) -> list[tuple[str, str]]:
    """Returns every key of a YAML file, by its full name in the file, with the comment behind it."""
    found = []
    above: list[tuple[int, str]] = []  # indentation and name of the enclosing keys
    for line in path.read_text(encoding="utf-8").splitlines():
        if parsed := re.fullmatch(r"( *)(\w+):.*?(?:  # (.*))?", line):
            indent, key, comment = parsed.groups()
            above = [*(entry for entry in above if entry[0] < len(indent)), (len(indent), key)]
            found.append((".".join(name for _, name in above), comment or ""))
    return found


def first_sentence(group: str, option: str) -> str:
    """Returns the first sentence of the comment at the start of an option's file."""
    path = CONF / group / f"{option}.yaml"
    if group == "select" and option in BASELINES:
        described = ast.get_docstring(ast.parse((UNTRAINED / f"{option}.py").read_text(encoding="utf-8"))) or ""
        return f"Untrained: {described.splitlines()[0]}"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []  # else an option of --config-dir
    comment = [line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines)]
    text = " ".join(line for line in comment if not line.startswith("@package"))
    return re.split(r"(?<=\.)\s+(?=[A-Z]|msattn)", text)[0]


def as_override(value: Any) -> str:
    """Returns a value as it is written in an override: ``null``, ``true``, ``[a,b]``; a mapping only as ``{...}``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(as_override, value))}]"
    return "{...}" if isinstance(value, dict) else str(value)
