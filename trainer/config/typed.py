"""Conversion of a composed Hydra configuration into a dataclass."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from msattn.trainer.config.select import POLICIES, SelectConfig, check_keys, policy_class
from msattn.trainer.config.values import CHOICES, nearest
from msattn.trainer.errors import UserError

Config = TypeVar("Config")


def known_keys(schema: type, prefix: str = "") -> list[str]:
    """Returns every dotted key of a config dataclass, including those of all selection policies, for nearest-key hints."""
    keys: list[str] = []
    for item in fields(schema):
        keys.append(prefix + item.name)
        for group in POLICIES.values() if item.type is SelectConfig else [item.type]:
            if isinstance(group, type) and is_dataclass(group):
                keys += known_keys(group, f"{prefix}{item.name}.")
    return list(dict.fromkeys(keys))  # policies share keys


def leaves(schema: type, values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Yields the keys of ``values`` that are no sections: dotted name, accepted values (empty if not an enumeration), value.

    ``values`` are plain containers that fit the dataclass ``schema``.
    """
    for item in fields(schema):
        if item.name not in values:
            continue
        name, value = prefix + item.name, values[item.name]
        group = policy_class(value["policy"]) if item.type is SelectConfig else item.type
        if isinstance(group, type) and is_dataclass(group):
            yield from leaves(group, value, f"{name}.")
        else:
            yield name, tuple(item.metadata.get(CHOICES, ())), value


def _unfreeze(node: Any, schema: type, config: Any) -> None:
    """Makes a structured node and its groups writable for the merge; the final dataclass is frozen again.

    OmegaConf marks the nodes of frozen dataclasses read-only. The policy in ``config`` determines the class of a selection.
    """
    from omegaconf import OmegaConf

    OmegaConf.set_readonly(node, False)
    for item in fields(schema):
        if isinstance(item.type, type) and is_dataclass(item.type):
            given = config.get(item.name) or {}
            group = _policy_of(given) if item.type is SelectConfig else item.type
            if OmegaConf.is_missing(node, item.name):
                node[item.name] = OmegaConf.structured(group)
            _unfreeze(node[item.name], group, given)


def _policy_of(select: Any) -> type[SelectConfig]:
    """Returns the dataclass of the policy that ``select`` names; raises UserError for keys that this policy does not have."""
    kind = policy_class(str(select.get("policy", SelectConfig.policy)))
    try:
        check_keys(kind, select)
    except UserError as error:
        raise UserError(f"{error}; select={kind.policy} sets the policy together with its keys") from error
    return kind


def typed(config: Any, schema: type[Config]) -> Config:
    """Merges a composed OmegaConf ``config`` into the dataclass ``schema``.

    Raises
    ------
    UserError : an unknown key (the message names the nearest known key), a wrong type, or a value out of range.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

    try:
        target = OmegaConf.structured(schema)
        _unfreeze(target, schema, config)
        target.merge_with(config)
        return OmegaConf.to_object(target)  # pyrefly: ignore[bad-return]
    except UserError:
        raise
    except ConfigKeyError as error:
        key = error.full_key or str(error.key)
        raise UserError(f"unknown key {key}{nearest(key, known_keys(schema))}") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or error.key}: {str(error).splitlines()[0]}") from error
