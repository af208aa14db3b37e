"""Checks of values; their errors name the key, its value and the accepted values."""

import difflib
import re
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from msattn.trainer.errors import UserError

DTYPES = ("auto", "float32", "float16", "bfloat16")
CHOICES = "choices"  # key of the accepted values in the metadata of a dataclass field
INTERVAL = "interval"  # key of the accepted numbers
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, and surrogates, which UTF-8 lacks
LONGEST_SHOWN = 200  # characters of a value in a message


def choices(accepted: Collection[str]) -> dict[str, Collection[str]]:
    """Returns the metadata of a dataclass field whose value, or each value of a list, is one of ``accepted``.

    :func:`check`, ``--help`` and the shell's completion read the accepted values from there.
    """
    return {CHOICES: accepted}


def within(interval: str) -> dict[str, str]:
    """Returns the metadata of a dataclass field whose number, or each number of a list, is in ``interval``, e.g. ``[0, 1)``."""
    return {INTERVAL: interval}


def check(config: Any, prefix: str = "") -> None:
    """Raises UserError for a field of the dataclass ``config`` that has another type than annotated, or is not accepted.

    Accepted are the :func:`choices` of the field, numbers :func:`within` its interval, and text without control characters.
    Keys begin with ``prefix``. Fields that are dataclasses have a check of their own.
    """
    for item in fields(config):
        key, value, interval = prefix + item.name, getattr(config, item.name), item.metadata.get(INTERVAL)
        if is_dataclass(value) and has_type(value, item.type):
            continue
        require(has_type(value, item.type), key, repr(value), f"accepted is {_type_name(item.type)}")
        several = isinstance(value, list | tuple)
        for each in value if several else [value]:
            if isinstance(each, str):
                require(not UNPRINTABLE.search(each), key, value, "accepted is text without control characters, in UTF-8")
                one_of(key, each, item.metadata.get(CHOICES, [each]))
            elif interval is not None and each is not None:
                null = "null, or " if has_type(None, item.type) else ""
                require(_contains(interval, each), key, value, f"{null}{'each ' if several else ''}in {interval}")


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Returns the types of the annotation ``kind``: one, or those of a union."""
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def has_type(value: object, kind: Any) -> bool:
    """Returns True if ``value`` has the annotated type ``kind``. An integer is also a number; True and False are neither."""
    return any(_has_type(value, each) for each in alternatives(kind))


def _has_type(value: object, kind: Any) -> bool:
    if get_origin(kind) is list:
        return isinstance(value, list | tuple) and all(has_type(item, get_args(kind)[0]) for item in value)
    accepted = {int: Integral, float: Real}.get(kind, get_origin(kind) or kind)
    return isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))


def _type_name(kind: Any) -> str:
    lists = {list[int]: "a list of integers", list[float]: "a list of numbers", list[str]: "a list of texts"}
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "a mapping", NoneType: "null"}
    return ", or ".join((lists | names)[each if each in lists else get_origin(each) or each] for each in alternatives(kind))


def _contains(interval: str, number: float) -> bool:
    low, high = map(float, interval[1:-1].split(","))
    return (low < number or (number == low and interval[0] == "[")) and (
        number < high or (number == high and interval[-1] == "]")
    )


def require(condition: bool, key: str, value: object, accepted: str) -> None:
    """Raises UserError if ``condition`` is False."""
    if not condition:
        raise UserError(f"{key}={shown(value)}: {accepted}")


def shown(value: object) -> str:
    """Returns ``value`` as a part of one printable line, cut if it is long."""
    text = str(value)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def one_of(key: str, value: object, accepted: Collection[str]) -> None:
    """Raises UserError, with the nearest accepted value, if ``value`` is not one of ``accepted``."""
    if not isinstance(value, str) or value not in accepted:
        raise UserError(f"{key}={shown(value)}: accepted are {', '.join(accepted)}{nearest(str(value), accepted)}")


def folder_name(key: str, value: str) -> None:
    """Raises UserError if ``value`` is not the name of a folder."""
    require(value.strip() not in ("", ".", "..") and "/" not in value, key, value, "a folder name")


def nearest(key: str, accepted: Collection[str]) -> str:
    """Returns the hint `` (did you mean X?)`` for the accepted key nearest to ``key``, or an empty string."""
    near = difflib.get_close_matches(key, accepted, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
