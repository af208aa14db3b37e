"""Checks of values; their errors name the key, its value and the accepted values."""

import difflib
import re
from collections.abc import Collection

from msattn.trainer.errors import UserError

DTYPES = ("auto", "float32", "float16", "bfloat16")
# control characters, and surrogates, which UTF-8 lacks
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
LONGEST_SHOWN = 200  # characters of a value in a message


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
    """Raises UserError, with the nearest accepted value, if ``value`` is not one of
    ``accepted``.
    """
    if not isinstance(value, str) or value not in accepted:
        raise UserError(
            f"{key}={shown(value)}: expected {', '.join(accepted)}{nearest(str(value), accepted)}"
        )


def folder_name(key: str, value: str) -> None:
    """Raises UserError if ``value`` is not the name of a folder."""
    require(
        value.strip() not in ("", ".", "..") and "/" not in value,
        key,
        value,
        "expected a folder name",
    )


def nearest(key: str, accepted: Collection[str]) -> str:
    """Returns the hint `` (did you mean X?)`` for the accepted key nearest to ``key``, or an empty
    string.
    """
    near = [] if key in accepted else difflib.get_close_matches(key, accepted, n=1)
    near = near or [each for each in accepted if key and each.startswith(key) and each != key]
    return f" (did you mean {near[0]}?)" if near else ""


def power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
