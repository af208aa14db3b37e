"""The groups and keys of a command, with defaults and choices; explanations come from the schemas
and ``conf/``.
"""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from msattn.trainer.commands.compose import compose_raw, initialized_hydra, without_hydra
from msattn.trainer.commands.jobs import COMMANDS
from msattn.trainer.config import BASELINES, POLICIES, SelectConfig, leaves
from msattn.trainer.config.schema import choices_of
from msattn.trainer.config.select import UNTRAINED

CONF = Path(__file__).parents[2] / "conf"


@dataclass(frozen=True)
class Key:
    name: str
    value: Any  # the value that is composed, with resolved interpolations
    comment: str  # the explanation in the schema
    # the values that the key, or each of its items, accepts; empty if it is not an enumeration
    choices: tuple[str, ...] = ()
    # what has the key, e.g. ``select=nucleus``, if the composed configuration lacks it
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
    """A configuration group: its options with their explanations, and the option that is composed,
    None if there is none.
    """

    name: str
    options: dict[str, str]
    chosen: str | None


@dataclass(frozen=True)
class CommandKeys:
    groups: dict[str, Group]
    keys: dict[str, Key]


def keys_of(
    command: str, overrides: Sequence[str] = (), *, every_policy: bool = False
) -> CommandKeys:
    """Returns the groups and keys of a command with their values, with ``every_policy`` the keys of
    all policies.
    """
    from omegaconf import OmegaConf

    schema = COMMANDS[command].schema
    with initialized_hydra(command) as hydra:
        composed = compose_raw(hydra, command, overrides)
        chosen = {
            name: option
            for name, option in composed.hydra.runtime.choices.items()
            if not name.startswith("hydra")
        }
        options = {
            name: _usable(schema, name, hydra.config_loader.get_group_options(name))
            for name in sorted(chosen)
        }
        values: Any = OmegaConf.to_container(without_hydra(composed), resolve=True)
    keys = _keys(schema, values)
    if every_policy and "select" in values:
        for policy in POLICIES:
            keys = (
                _keys(
                    SelectConfig, SelectConfig(policy).as_dict(), "select.", only=f"select={policy}"
                )
                | keys
            )
    groups = {
        name: Group(name, {option: first_sentence(name, option) for option in usable}, chosen[name])
        for name, usable in options.items()
    }
    return CommandKeys(groups, keys)


def _keys(schema: Any, values: Any, prefix: str = "", only: str = "") -> dict[str, Key]:
    return {
        name: Key(
            name,
            value,
            item.metadata["help"],
            tuple(_usable(schema, name, choices_of(item.type))),
            only,
        )
        for name, item, value in leaves(schema, values, prefix)
    }


def _usable(schema: Any, name: str, choices: Sequence[str]) -> list[str]:
    refused = getattr(schema, "refused", {}) if name.startswith("select") else {}
    return [choice for choice in choices if choice not in refused]


def group_options() -> dict[str, list[str]]:
    """Returns the options of the packaged groups of all commands, without composing anything."""
    options: dict[str, list[str]] = {}
    for path in sorted(CONF.glob("*/**/*.yaml")):
        options.setdefault(path.parent.relative_to(CONF).as_posix(), []).append(path.stem)
    options["select"] = [*POLICIES, *BASELINES]
    return dict(sorted(options.items()))


def first_sentence(group: str, option: str) -> str:
    """Returns the first sentence of the comment at the start of an option's file, or of a
    selection's docstring.
    """
    path = CONF / group / f"{option}.yaml"
    if group == "select" and option in POLICIES:
        return _first_paragraph(str(POLICIES[option].__doc__)).replace("``", "")
    if group == "select" and option in BASELINES:
        source = ast.parse((UNTRAINED / f"scores/{option}.py").read_bytes())
        return f"Untrained: {_first_paragraph(ast.get_docstring(source) or '')}"
    # otherwise an option of --config-dir
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    comment = [
        line.removeprefix("#").strip()
        for line in takewhile(lambda line: line.startswith("#"), lines)
    ]
    text = " ".join(line for line in comment if not line.startswith("@package"))
    return re.split(r"(?<=\.)\s+(?=[A-Z]|msattn)", text)[0]


def _first_paragraph(text: str) -> str:
    """Returns the first paragraph of a docstring in one line."""
    return " ".join(text.partition("\n\n")[0].split())


def as_override(value: Any) -> str:
    """Returns a value as it is written in an override: ``null``, ``true``, ``[a,b]``; a mapping
    only as ``{...}``.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(as_override, value))}]"
    return "{...}" if isinstance(value, dict) else str(value)
