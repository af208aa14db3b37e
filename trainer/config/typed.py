"""Composed Hydra configurations and their schemas: defaults, keys, and conversion into a
dataclass.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar

from msattn.trainer.config.schema import one_line
from msattn.trainer.config.select import SelectConfig
from msattn.trainer.errors import UserError, first_line

Config = TypeVar("Config")


def defaults(schema: Any) -> dict[str, Any]:
    """Returns the defaults of a dataclass and its sections as plain containers, ``???`` for a value
    that is needed.

    Without those of ``select``, whose keys depend on the policy.
    """
    values = {}
    for item in fields(schema):
        if is_dataclass(item.type):
            values |= {} if item.type is SelectConfig else {item.name: defaults(item.type)}
        elif item.default_factory is not MISSING:
            values[item.name] = item.default_factory()
        else:
            values[item.name] = "???" if item.default is MISSING else item.default
    return values


def known_keys(schema: Any, prefix: str = "") -> list[str]:
    """Returns every dotted key of a config dataclass, for nearest-key hints."""
    keys: list[str] = []
    for item in fields(schema):
        keys.append(prefix + item.name)
        if is_dataclass(item.type):
            keys += known_keys(item.type, f"{prefix}{item.name}.")
    return keys


def leaves(
    schema: Any, values: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Field[Any], Any]]:
    """Yields the dotted name, field and value of each key of ``values`` that is no section; they
    fit ``schema``.
    """
    for item in fields(schema):
        if item.name not in values:
            continue
        name, value = prefix + item.name, values[item.name]
        if is_dataclass(item.type):
            yield from leaves(item.type, value, f"{name}.")
        else:
            yield name, item, value


def typed(config: Any, schema: type[Config]) -> Config:
    """Returns the values of a composed ``config`` as the dataclass ``schema``, which may refuse
    them.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
    from pydantic import TypeAdapter, ValidationError

    try:
        values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key}=???: a value is needed") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or error.key}: {first_line(error)}") from error
    try:
        return TypeAdapter(schema).validate_python(values)
    except ValidationError as error:
        raise UserError(one_line(error, schema, values, known=known_keys(schema))) from error
