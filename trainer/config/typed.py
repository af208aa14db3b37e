"""Conversion of a composed Hydra configuration into a dataclass."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin

from msattn.trainer.config.select import POLICIES, SelectConfig, check_keys, policy_class
from msattn.trainer.config.values import CHOICES, alternatives, has_type, nearest, require, shown
from msattn.trainer.errors import UserError, first_line

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


def typed(config: Any, schema: type[Config]) -> Config:
    """Returns the values of a composed OmegaConf ``config`` as an instance of the dataclass ``schema``.

    Types are strict: ``'1'`` is no number and 1 is not true. Only integers may stand for text, and for other numbers.

    Raises
    ------
    UserError : an unknown key (the message names the nearest known key), a wrong type, or a value out of range.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key}=???: a value is needed") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or error.key}: {first_line(error)}") from error
    return _section(values, schema, known_keys(schema))


def _section(values: Any, schema: type[Config], known: list[str], prefix: str = "") -> Config:
    """Returns the instance of ``schema`` with ``values``; ``known`` are all keys of the command, for hints."""
    require(isinstance(values, dict), prefix.rstrip("."), values, "a section, whose keys are set as in section.key=value")
    kind: Any = _policy_of(values) if schema is SelectConfig else schema
    types: dict[str, Any] = {item.name: item.type for item in fields(kind)}
    arguments = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in types:
            raise UserError(f"unknown key {shown(key)}{nearest(key, known)}")
        section = is_dataclass(types[name])
        arguments[name] = _section(value, types[name], known, f"{key}.") if section else _convert(value, types[name])
    for item in fields(kind):
        needed = item.default is MISSING and item.default_factory is MISSING and item.name not in values
        require(not needed, f"{prefix}{item.name}", "???", "a value is needed")
    return kind(**arguments)


def _convert(value: Any, kind: Any) -> Any:
    """Returns an integer as text or as another number where the annotation ``kind`` asks for it; other values as they are."""
    kinds = alternatives(kind)
    if isinstance(value, list):
        items = [get_args(each)[0] for each in kinds if get_origin(each) is list]
        return [_convert(each, items[0]) for each in value] if items else value
    if not has_type(value, int) or int in kinds:
        return value
    if float in kinds:
        return float(value) if abs(value) < 2**63 else value
    return str(value) if str in kinds else value


def _policy_of(select: Any) -> type[SelectConfig]:
    """Returns the dataclass of the policy that ``select`` names; raises UserError for keys that this policy does not have."""
    kind = policy_class(select.get("policy", SelectConfig.policy))
    try:
        check_keys(kind, select)
    except UserError as error:
        raise UserError(f"{error}; select={kind.policy} sets the policy together with its keys") from error
    return kind
