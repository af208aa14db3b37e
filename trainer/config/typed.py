"""From what Hydra composed to a schema's dataclass."""

import difflib
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from msattn.trainer.errors import UserError

Config = TypeVar("Config")


def known_keys(schema: type, prefix: str = "") -> list[str]:
    """Every dotted key of a config dataclass, for nearest-key hints."""
    keys: list[str] = []
    for item in fields(schema):
        keys.append(prefix + item.name)
        if isinstance(item.type, type) and is_dataclass(item.type):
            keys += known_keys(item.type, f"{prefix}{item.name}.")
    return keys


def nearest(key: str, accepted: list[str]) -> str:
    """`` (did you mean X?)`` for the accepted key nearest to ``key``, or nothing."""
    near = difflib.get_close_matches(key, accepted, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _unfreeze(node: Any, schema: type) -> None:
    """OmegaConf marks the nodes of frozen dataclasses read-only; composing needs them open, the resulting object is frozen."""
    from omegaconf import OmegaConf

    for item in fields(schema):
        if isinstance(item.type, type) and is_dataclass(item.type):
            if OmegaConf.is_missing(node, item.name):
                OmegaConf.set_readonly(node, False)
                node[item.name] = OmegaConf.structured(item.type)
            _unfreeze(node[item.name], item.type)
    OmegaConf.set_readonly(node, False)


def typed(config: Any, schema: type[Config]) -> Config:
    """Merge a composed OmegaConf ``config`` onto ``schema``.

    Raises
    ------
    UserError : an unknown key (the nearest is named), a wrong type, or a value out of range.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

    try:
        target = OmegaConf.structured(schema)
        _unfreeze(target, schema)
        target.merge_with(config)
        return OmegaConf.to_object(target)  # pyright: ignore[reportReturnType]
    except UserError:
        raise
    except ConfigKeyError as error:
        key = error.full_key or str(error.key)
        raise UserError(f"unknown key {key}{nearest(key, known_keys(schema))}") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or error.key}: {str(error).splitlines()[0]}") from error
