"""Composes the configuration of a command from Hydra overrides.

Mistakes of the user are raised as a :class:`~msattn.trainer.errors.UserError` of one line.
"""

import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msattn.trainer.commands.jobs import COMMANDS, config_name
from msattn.trainer.config import (
    BASELINES,
    POLICIES,
    JobConfig,
    defaults,
    known_keys,
    nearest,
    typed,
)
from msattn.trainer.config.policies import OWN_KEYS, own_keys
from msattn.trainer.config.select import GATE_SCORES, SelectConfig, foreign_key
from msattn.trainer.config.text_files import refused
from msattn.trainer.config.values import shown
from msattn.trainer.errors import UserError, first_line

# a number with underscores that is a whole value or item; quoted text is matched without a number
UNDERSCORED = re.compile(
    r"""(['"]).*?(?<!\\)\1|[=\[{,:(] *(?P<number>[+-]?\d[\d.]*_[\d_.]*) *(?=$|[]},):])"""
)
EXISTS = "+{}: the key exists; leave out the plus sign"
QUOTING = (
    """and quote a value that holds spaces, commas or quotes twice, 'data.path="my file.txt"'"""
)


def compose(command: str, overrides: Sequence[str] = ()) -> Any:
    """Returns the typed configuration of ``command`` with ``overrides``, without running or writing
    anything.
    """
    with initialized_hydra(command) as hydra:
        return typed_config(compose_raw(hydra, command, overrides), command)


def show(
    command: str, overrides: Sequence[str], *, kind: str, config_dir: Path | None = None
) -> None:
    """Prints the composed YAML; ``kind`` is ``job``, ``hydra`` or ``all``."""
    overrides = with_search_path(overrides, config_dir)
    with initialized_hydra(command) as hydra:
        typed_config(compose_raw(hydra, command, overrides), command)
        hydra.show_cfg(config_name(command), overrides, cfg_type=kind, package=None)


def check_keys(
    command: str,
    overrides: Sequence[str],
    *,
    config_dir: Path | None = None,
    multirun: bool = False,
) -> None:
    """Raises UserError for a key or an option that ``command`` does not have, except for those that
    are swept, before the files of the user's own model are read.
    """
    stand_ins = ["model=own", "model.name=own", "model.path=own"]
    mode = "MULTIRUN" if multirun else "RUN"
    with initialized_hydra(command) as hydra:
        compose_raw(hydra, command, with_search_path([*stand_ins, *overrides], config_dir), mode)


def typed_config(composed: Any, command: str) -> JobConfig:
    return typed(without_hydra(composed), COMMANDS[command].schema)


def without_hydra(composed: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])


def compose_raw(hydra: Any, command: str, overrides: Sequence[str] = (), mode: str = "RUN") -> Any:
    """Returns the configuration of ``command`` with Hydra's own keys; ``mode`` is ``RUN`` or
    ``MULTIRUN``.
    """
    from hydra.types import RunMode

    _check_numbers(overrides)
    try:
        return hydra.compose_config(config_name(command), list(overrides), RunMode[mode])
    except (
        ValueError,
        TypeError,
    ) as error:  # not a HydraException: a group is null, or a list of numbers
        raise UserError(
            f"{first_line(error)}; a group takes one of its options, as in select=topk"
        ) from error


def _check_numbers(overrides: Sequence[str]) -> None:
    """Raises UserError for numbers that Hydra would read differently from how they are written.

    Hydra takes ``1_000`` for 1000, so that ``name=1_000`` would be called 1000, and cannot read
    thousands of digits.
    """
    for override in overrides:
        for match in UNDERSCORED.finditer(override):
            if number := match["number"]:
                raise UserError(
                    f"{shown(override)}: write {number.replace('_', '')} for a number, and "
                    f"'\"{number}\"' for text"
                )
        if re.search(r"\d{400}", override):
            raise UserError(f"{shown(override)}: expected a number of fewer than 400 digits")


def with_search_path(overrides: Sequence[str], config_dir: Path | None) -> list[str]:
    """Returns ``overrides`` that also find the configuration groups in the folder
    ``config_dir``.
    """
    if config_dir is None:
        return list(overrides)
    with refused(f"--config-dir {shown(config_dir)}"):
        if not os.path.isdir(config_dir):
            raise UserError(f"--config-dir {shown(config_dir)}: no such folder")
    return [*overrides, f"hydra.searchpath=[{quoted(f'file://{config_dir.resolve()}')}]"]


def quoted(text: str) -> str:
    """Returns ``text`` as a quoted string of Hydra's override grammar."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.single).with_quotes()


@contextmanager
def initialized_hydra(command: str) -> Iterator[Any]:
    """Yields Hydra, initialized with ``conf/``; raises its errors as a UserError of one line."""
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    # For run names: ${joined:${gate.q_pool}} joins a list.
    OmegaConf.register_new_resolver("joined", lambda items: "-".join(map(str, items)), replace=True)
    # For lengths: ${up_to:${data.seq_len},4096,16384} has the others that are shorter than the
    # first one, and then this one.
    OmegaConf.register_new_resolver(
        "up_to", lambda end, *sizes: [*(n for n in sizes if n < end), end], replace=True
    )
    # For distances: ${within:1024,${data.seq_len}} is the first number, or a quarter of the length
    # if that is less.
    OmegaConf.register_new_resolver("within", _within, replace=True)
    _store_schema(command)
    _store_selections(command)
    with initialize_config_module("msattn.conf", job_name=command, version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            yield hydra
        except RecursionError as error:
            raise UserError("an override nests lists or mappings too deeply") from error
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(
                _explain(error, functools.partial(_accepted, hydra, command))
            ) from error


def _within(distance: int, length: Any) -> int:
    # otherwise the schema refuses the length
    return min(distance, length // 4) if isinstance(length, int) else distance


@functools.cache
def _store_schema(command: str) -> None:
    """Stores the defaults of a command's schema in Hydra; ``conf/`` holds what differs from
    them.
    """
    from hydra.core.config_store import ConfigStore

    node = defaults(COMMANDS[command].schema)
    ConfigStore.instance().store(
        name=f"{config_name(command)}_schema", node=node, provider="msattn"
    )


def _store_selections(command: str) -> None:
    """Stores the options of ``select`` in Hydra. Policies have the first scores of a gate that the
    command does not refuse.
    """
    from hydra.core.config_store import ConfigStore

    store = functools.partial(ConfigStore.instance().store, provider="msattn")
    excluded = getattr(COMMANDS[command].schema, "refused", {})
    of_policies = next(
        scores for scores in (SelectConfig().scores, *GATE_SCORES) if scores not in excluded
    )
    for policy in POLICIES:
        store(group="select", name=policy, node=SelectConfig(policy, scores=of_policies).as_dict())
    for scores in BASELINES:
        store(group="select", name=scores, node=SelectConfig(scores=scores).as_dict())


def _accepted(hydra: Any, command: str) -> list[str]:
    chosen = compose_raw(hydra, command).hydra.runtime.choices
    return [group for group in chosen if not group.startswith("hydra")] + known_keys(
        COMMANDS[command].schema
    )


def _explain(error: Exception, accepted_keys: Callable[[], list[str]]) -> str:
    """Returns one line for an error of Hydra, with the nearest of the accepted groups and keys."""
    from hydra.errors import MissingConfigException, OverrideParseException

    message = str(error)
    if (
        isinstance(error, MissingConfigException)
        and error.missing_cfg_file
        and "/" in error.missing_cfg_file
    ):
        group, choice = error.missing_cfg_file.rsplit("/", 1)
        options = list(error.options or [])
        return f"{group}={choice}: expected {', '.join(options)}{nearest(choice, options)}"
    if isinstance(error, OverrideParseException):
        return f"{shown(error.override)}: not understood; write key=value, {QUOTING}"
    if ambiguous := re.match(r"Ambiguous value for argument '(.+)'", message):
        return (
            f"{ambiguous[1]}: a comma is a sweep: add --multirun, write a list as key=[a,b], "
            f"{QUOTING}"
        )
    if repeated := re.match(r"Multiple values for (.+?)\. ", message):
        return EXISTS.format(repeated[1])
    if unfit := re.match(
        r"Could not (?:override|append to config|delete|append)[^']*'(.+?)'", message
    ):
        group, _, key = unfit[1].rpartition(".")
        accepted = accepted_keys()
        # a key of another policy than the one composed
        if group == "select" and unfit[1] in accepted:
            policy = getattr(getattr(error.__cause__, "parent_node", None), "policy", None)
            if policy in POLICIES and key in OWN_KEYS.keys() - own_keys(policy):
                return foreign_key(policy, key)
        if unfit[1] in accepted and message.startswith("Could not append"):
            return EXISTS.format(unfit[1])
        if unfit[1] in accepted:  # ~key=value, with another value than it has
            return " ".join(message.split())
        return f"unknown key {unfit[1]}{nearest(unfit[1], accepted)}"
    return " ".join(message.split())
