"""The pages of ``--help`` and ``msattn help``, composed from the groups of ``conf/`` and the keys
of the schemas.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

from msattn.trainer.commands.jobs import COMMANDS
from msattn.trainer.commands.keys import (
    CommandKeys,
    Group,
    Key,
    as_override,
    first_sentence,
    group_options,
    keys_of,
)
from msattn.trainer.config import AnswerConfig, known_keys, nearest
from msattn.trainer.errors import UserError

# Hidden for commands that answer prompts: these read no text, write no artifacts, and have no
# experiments.
UNUSED = ("data", "experiment", "overwrite", "resume")
Section = tuple[str, list[tuple[str, str]]]  # a heading; terms and their explanations

OVERRIDES: Section = (
    "Settings, after the command",
    [
        ("group=option", "selects a file of conf/, e.g. model=llama3 or select=quest"),
        ("key=value", "changes one setting, e.g. train.steps=100"),
        ("key=[a,b]", "sets a list, without spaces, e.g. gate.q_pool=[avg,max]"),
        ("-m key=a,b", "sweeps: one job for each value"),
    ],
)
MORE: Section = (
    "More",
    [
        ("msattn COMMAND --help", "options, groups and keys of a command"),
        ("msattn help gate", "options and keys of a group"),
        ("msattn help gate.heads", "one key"),
    ],
)


def show(context: Any, topic: str | None) -> None:
    """Prints the help page of ``topic``; ``context`` is that of the command line."""
    import typer

    program = context.parent.command
    commands = {name: program.get_command(context, name) for name in program.list_commands(context)}
    if topic in commands and topic not in group_options():
        typer.echo(
            commands[topic].get_help(
                typer.Context(commands[topic], info_name=topic, parent=context.parent)
            )
        )
        return
    formatter = context.make_formatter()
    if topic is None:
        purposes = [
            (name, command.get_short_help_str(limit=200)) for name, command in commands.items()
        ]
        groups = [(name, ", ".join(options)) for name, options in group_options().items()]
        write(
            formatter,
            [("Commands", purposes), OVERRIDES, ("Groups and their options", groups), MORE],
        )
    else:
        write(formatter, topic_page(topic, commands))
    typer.echo(formatter.getvalue().strip("\n"))


def write(formatter: Any, sections: Iterable[Section]) -> None:
    """Writes sections with the command line's help formatter, which wraps them to the width of the
    terminal.
    """
    for heading, rows in sections:
        with formatter.section(heading):
            formatter.write_dl(rows)


def command_page(command: str) -> list[Section]:
    """Returns the groups and keys of ``command``, the main ones first."""
    known, first = keys_of(command), COMMANDS[command].first.split()
    rows = [
        (f"{name}={group.chosen}", f"{', '.join(group.options)}: see below")
        if (group := known.groups.get(name))
        else _key_row(known.keys[name])
        for name in first
    ]
    groups = [
        _options(group)
        for name, group in known.groups.items()
        if len(group.options) > 1 and _uses(command, name)
    ]
    others = [
        _key_row(key)
        for name, key in known.keys.items()
        if name not in first and _uses(command, name)
    ]
    return [
        (f"Main keys, {_defaults(known)}", rows),
        *groups,
        (f"Other keys, {_defaults(known)}", others),
    ]


def topic_page(topic: str, commands: Iterable[str]) -> list[Section]:
    """Returns the page of a group, a section such as ``eval.needle``, or a key; ``commands`` has
    the names of all commands.
    """
    name = topic.replace("/", ".")
    accepted = {command: known_keys(COMMANDS[command].schema) for command in COMMANDS}
    using = [command for command, keys in accepted.items() if name in keys and _uses(command, name)]
    if topic in group_options() and not using:  # experiment, a group that only sets keys of others
        using = [
            command
            for command in COMMANDS
            if topic in keys_of(command).groups and _uses(command, topic)
        ]
    if not using:
        topics = [*commands, *group_options(), *chain.from_iterable(accepted.values())]
        raise UserError(
            f"help {topic}: no command, group or key has this name{nearest(topic, topics)}"
        )
    of_select = name.startswith("select")
    if of_select:  # finetune, which comes first, has other defaults than the commands that serve
        using.sort(key=lambda command: COMMANDS[command].trains)
    known = keys_of(using[0], every_policy=of_select)
    pages = [
        (f"msattn {command} --help", "all groups and keys of the command") for command in using
    ]
    see: Section = (
        "Commands with this key" if name in known.keys else "Commands with these keys",
        pages,
    )
    if name in known.keys:
        return [_whole_key(known.keys[name], using[0]), see]
    keys = {key.name: key for key in known.keys.values() if key.name.startswith(f"{name}.")}
    for command in using[1:]:  # e.g. train.fsdp, which only finetune has
        below = [key for key in accepted[command] if key.startswith(f"{name}.") and key not in keys]
        if any(
            not any(other.startswith(f"{key}.") for other in accepted[command]) for key in below
        ):
            of_command = keys_of(command).keys
            keys |= {
                key: replace(of_command[key], only=f"msattn {command}")
                for key in below
                if key in of_command
            }
    if topic == "select":
        refusing = {
            option: [command for command in using if option in COMMANDS[command].schema.refused]
            for option in group_options()[topic]
        }
        known.groups[topic] = replace(
            known.groups[topic],
            options={
                option: first_sentence(topic, option)
                + (f" Not in {', '.join(commands)}." if commands else "")
                for option, commands in refusing.items()
                if len(commands) < len(using)  # a_shape is for eval.baselines alone
            },
        )
    options = (
        [_options(known.groups[topic], f" in msattn {using[0]}")] if topic in known.groups else []
    )
    heading = f"Keys, {_defaults(known)} in msattn {using[0]}"
    rows: list[Section] = [(heading, [_key_row(key) for key in keys.values()])] if keys else []
    return [*options, *rows, see]


def _uses(command: str, name: str) -> bool:
    """Returns True if the job of ``command``, which accepts the group or key ``name``, uses it."""
    return not (
        issubclass(COMMANDS[command].schema, AnswerConfig) and name.partition(".")[0] in UNUSED
    )


def _defaults(known: CommandKeys) -> str:
    """Returns the end of a heading, with the model that the defaults are for."""
    return (
        f"with defaults for model={known.groups['model'].chosen}"
        if "model" in known.groups
        else "with defaults"
    )


def _key_row(key: Key) -> tuple[str, str]:
    return key.override, key.explanation


def _whole_key(key: Key, command: str) -> Section:
    rows = [
        ("explanation", key.comment),
        ("default", f"{as_override(key.value)} in msattn {command}"),
    ]
    rows += [("choices", ", ".join(key.choices))] if key.choices else []
    rows += [("with", key.only)] if key.only else []
    return key.name, rows


def _options(group: Group, where: str = "") -> Section:
    default = f", by default {group.chosen}{where}" if group.chosen else ""
    return f"{group.name}=OPTION{default}", list(group.options.items())
