"""Checks of values; their errors name the key, its value and the accepted values."""

import difflib
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from msattn.trainer.errors import UserError

DTYPES = ("auto", "float32", "float16", "bfloat16")
CHOICES = "choices"  # key of the accepted values in the metadata of a dataclass field


def choices(accepted: Collection[str]) -> dict[str, Collection[str]]:
    """Returns the metadata of a dataclass field whose value, or each value of a list, is one of ``accepted``.

    :func:`check_choices`, ``--help`` and the shell's completion read the accepted values from there.
    """
    return {CHOICES: accepted}


def check_choices(config: Any, prefix: str = "") -> None:
    """Raises UserError if a field of the dataclass ``config`` is none of its :func:`choices`; keys begin with ``prefix``."""
    for item in fields(config):
        if (accepted := item.metadata.get(CHOICES)) is not None:
            value = getattr(config, item.name)
            for each in value if isinstance(value, list) else [value]:
                one_of(prefix + item.name, each, accepted)


def require(condition: bool, key: str, value: object, accepted: str) -> None:
    """Raises UserError if ``condition`` is False."""
    if not condition:
        raise UserError(f"{key}={value}: {accepted}")


def one_of(key: str, value: str, accepted: Collection[str]) -> None:
    """Raises UserError, with the nearest accepted value, if ``value`` is not one of ``accepted``."""
    if value not in accepted:
        raise UserError(f"{key}={value}: accepted are {', '.join(accepted)}{nearest(value, accepted)}")


def nearest(key: str, accepted: Collection[str]) -> str:
    """Returns the hint `` (did you mean X?)`` for the accepted key nearest to ``key``, or an empty string."""
    near = difflib.get_close_matches(key, accepted, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
