"""Completion of overrides in the shell: groups, options, keys, and the choices of a key."""

import os
from collections.abc import Sequence
from glob import escape, glob
from itertools import chain
from typing import Any

from msattn.trainer.commands.jobs import COMMANDS
from msattn.trainer.commands.keys import CommandKeys, group_options, keys_of
from msattn.trainer.config import known_keys
from msattn.trainer.config.model import packaged_models
from msattn.trainer.errors import UserError


def complete(command: str, words: Sequence[str], incomplete: str) -> list[str]:
    """Returns the overrides of ``command`` that begin with ``incomplete``; ``words`` are the
    overrides before it.

    Bash splits ``key=val`` into ``key``, ``=`` and ``val``; then only the part after the equals
    sign is completed.
    """
    words, split = list(words), ""
    if words and words[-1] == "=":
        words.pop()
    if words and "=" not in words[-1] and not words[-1].startswith("~"):
        split = f"{words.pop()}="
    try:
        known = keys_of(command, words)
    except UserError:  # a word before is wrong, or a sweep
        known = keys_of(command)
    name, given, value = (split + incomplete).partition("=")
    matching = _values(known, name, value) if given else _names(known, name)
    return [text.removeprefix(split) for text in matching]


def complete_model(incomplete: str) -> list[str]:
    folders = [f"{path}/" for path in sorted(glob(f"{escape(incomplete)}*")) if os.path.isdir(path)]
    return [name for name in packaged_models() if name.startswith(incomplete)] + folders


def complete_topic(context: Any, incomplete: str) -> list[str]:
    """Returns the commands, groups and keys that begin with ``incomplete``; ``context`` is the
    command line's.
    """
    keys = [known_keys(command.schema) for command in COMMANDS.values()]
    names = dict.fromkeys(
        [
            *context.parent.command.list_commands(context),
            *group_options(),
            *chain.from_iterable(keys),
        ]
    )
    return [
        name
        for name in names
        if name.startswith(incomplete) and name.count(".") <= incomplete.count(".")
    ]


def _names(known: CommandKeys, incomplete: str) -> list[str]:
    """Returns ``group=`` and ``key=``; of nested keys only the part to the next dot, unless it is
    the only one.
    """
    names = [f"{name}=" for name in (*known.groups, *known.keys) if name.startswith(incomplete)]
    while True:
        parts = {name: name.find(".", len(incomplete)) + 1 or len(name) for name in names}
        stems = sorted({name[:end] for name, end in parts.items()})
        if len(stems) != 1 or not stems[0].endswith("."):
            return stems
        incomplete = stems[0]


def _values(known: CommandKeys, name: str, value: str) -> list[str]:
    """Returns ``name=value`` for the choices of a group or key. In a sweep or a list the last item
    is completed.
    """
    if name in known.groups:
        choices, is_list = [*known.groups[name].options], False
    elif name in known.keys:
        key = known.keys[name]
        choices, is_list = list(key.choices), isinstance(key.value, list)
        choices = choices or (["true", "false"] if isinstance(key.value, bool) else [])
    else:
        return []
    start = max(value.rfind(","), value.rfind("[")) + 1
    before = value[:start] or ("[" if is_list else "")
    return [f"{name}={before}{choice}" for choice in choices if choice.startswith(value[start:])]
