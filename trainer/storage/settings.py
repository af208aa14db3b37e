"""Comparison of the settings of resumed work with those of the interrupted work."""

import json
from collections.abc import Mapping
from typing import Any

from msattn.trainer.errors import UserError

START_AGAIN = "overwrite=true without resume=true"  # drops the work of an earlier training


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens ``{"train": {"lr": 0.1}}`` to ``{"train.lr": 0.1}``, the names that the command line
    uses.
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= (
            flat_settings(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return flat


def check_settings(
    what: str,
    before: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    partly: bool = False,
    start_again: str = START_AGAIN,
) -> None:
    """Raises UserError, with the first key and both values, if the settings of ``what`` differ from
    those of ``current``. If that is given ``partly``, settings that are not known yet are absent or
    None.

    The message names the settings with which the work would ``start_again``.
    """
    # JSON turns tuples into lists
    before, current = flat_settings(before), flat_settings(json.loads(json.dumps(current)))
    for key in before | current:
        if partly and current.get(key) is None:
            continue
        if before.get(key) != current.get(key):
            raise UserError(
                f"{what} has {key}={before.get(key)}, not {current.get(key)}; "
                f"use the same settings, or {start_again} to start again"
            )
