"""Checks of values; their errors name the key, its value and the accepted values."""

import difflib
from collections.abc import Sequence

from msattn.trainer.errors import UserError

DTYPES = ("auto", "float32", "float16", "bfloat16")


def require(condition: bool, key: str, value: object, accepted: str) -> None:
    """Raises UserError if ``condition`` is False."""
    if not condition:
        raise UserError(f"{key}={value}: {accepted}")


def one_of(key: str, value: str, accepted: tuple[str, ...]) -> None:
    """Raises UserError, with the nearest accepted value, if ``value`` is not one of ``accepted``."""
    if value not in accepted:
        raise UserError(f"{key}={value}: accepted are {', '.join(accepted)}{nearest(value, accepted)}")


def nearest(key: str, accepted: Sequence[str]) -> str:
    """Returns the hint `` (did you mean X?)`` for the accepted key nearest to ``key``, or an empty string."""
    near = difflib.get_close_matches(key, accepted, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
