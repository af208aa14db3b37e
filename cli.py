"""The ``msattn`` command line, where each command composes a configuration and runs one job with
it.

Exit codes: 0 success, 1 fault, 2 user error (one line on stderr), 130 interrupted, 143 terminated.
"""

import atexit
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from msattn.trainer.commands.jobs import COMMANDS, Command
from msattn.trainer.errors import (
    Fault,
    UserError,
    check_working_directory,
    exit_process,
    named_output_errors,
    report_error,
    warnings_as_lines,
)
from msattn.trainer.signals import end_at_once, end_silently, handle, handled
from msattn.trainer.version import __version__

with handled(end_at_once):
    import typer
    from typer.core import TyperCommand, TyperGroup


class ConfiguredCommand(TyperCommand):
    """A command whose ``--help`` explains the groups and keys of its configuration."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from msattn.trainer.commands.help import command_page, write

        super().format_help(ctx, formatter)
        write(formatter, command_page(str(ctx.info_name)))


class Commands(TyperGroup):
    """The commands. An unknown name is refused, and the error names the nearest command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        from msattn.trainer.config.values import nearest, shown

        if args and args[0] not in self.commands:
            raise UserError(f"{shown(args[0])}: no such command{nearest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


def _complete(ctx: typer.Context, incomplete: str) -> list[str]:
    from msattn.trainer.commands.completion import complete

    return complete(str(ctx.info_name), ctx.params.get("overrides") or (), incomplete)


def _complete_model(incomplete: str) -> list[str]:
    from msattn.trainer.commands.completion import complete_model

    return complete_model(incomplete)


def _complete_topic(ctx: typer.Context, incomplete: str) -> list[str]:
    from msattn.trainer.commands.completion import complete_topic

    return complete_topic(ctx, incomplete)


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Hydra overrides: group=option, key=value.",
        autocompletion=_complete,
        show_default=False,
    ),
]
ConfigDir = Annotated[
    Path | None,
    typer.Option(help="An additional folder of configuration groups.", show_default=False),
]
Section = Literal["job", "hydra", "all"] | None
Cfg = Annotated[
    Section, typer.Option(help="Print the composed configuration and exit.", show_default=False)
]
Multirun = Annotated[
    bool,
    typer.Option(
        "--multirun", "-m", help="Run one job for each combination of comma-separated values."
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Your own model: a folder, a GGUF file or a Hub id.",
        autocompletion=_complete_model,
        show_default=False,
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Your own text: a txt, md, jsonl or parquet file, a folder or a glob.",
        show_default=False,
    ),
]

app = typer.Typer(
    name="msattn",
    cls=Commands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"msattn {__version__}")
        raise typer.Exit


Topic = Annotated[
    str | None,
    typer.Argument(
        help="A command, a group or a key.", autocompletion=_complete_topic, show_default=False
    ),
]
Version = Annotated[
    bool,
    typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
]


@app.callback()
def options(version: Version = False) -> None:
    """Sparse attention for long-context language models: train, evaluate and use gates and query
    classifiers.
    """
    check_working_directory()


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Turns Ctrl-C and SIGTERM into exit codes and prints the job's message, e.g. the path of its
    checkpoint.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        code = report_error(stop)
        handle(end_silently)
        raise typer.Exit(code) from stop


def _run(
    command: str,
    overrides: list[str] | None,
    config_dir: Path | None,
    cfg: Section,
    multirun: bool,
    model: str | None = None,
    data: str | None = None,
    **arguments: Any,
) -> None:
    from msattn.trainer.commands.compose import check_keys, show
    from msattn.trainer.commands.launch import launch
    from msattn.trainer.commands.own import is_own, own_overrides

    with _stopped_by_signals(), warnings_as_lines():
        given = overrides or []
        if is_own(model, given):
            check_keys(command, given, config_dir=config_dir, multirun=multirun)
        given = own_overrides(model, data, given, command) + given
        if cfg is not None:
            show(command, given, kind=cfg, config_dir=config_dir)
        else:
            launch(command, given, config_dir=config_dir, multirun=multirun, **arguments)


def _generate(
    overrides: Overrides = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text of the prompt.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="UTF-8 file with the prompt.", show_default=False)
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Chat on this terminal with one KV cache; the prompt is optional."
        ),
    ] = False,
    model: Model = None,
    config_dir: ConfigDir = None,
    cfg: Cfg = None,
    multirun: Multirun = False,
) -> None:
    from msattn.trainer.commands.own import read_prompt

    if chat and multirun:
        raise UserError("--chat: only one chat runs at a time; remove --multirun")
    text = (
        "" if cfg or (chat and prompt is prompt_file is None) else read_prompt(prompt, prompt_file)
    )
    _run("generate", overrides, config_dir, cfg, multirun, model, prompt=text, chat=chat)


def _serve(
    overrides: Overrides = None,
    model: Model = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every network.")
    ] = "127.0.0.1",
    port: Annotated[
        str, typer.Option(metavar="INTEGER", help="Port to listen on; 0 takes a free one.")
    ] = "8000",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="MSATTN_API_KEY", help="API key that requests must send.", show_default=False
        ),
    ] = None,
    config_dir: ConfigDir = None,
    cfg: Cfg = None,
) -> None:
    _run("serve", overrides, config_dir, cfg, False, model, host=host, port=port, api_key=api_key)


def _job(command: Command) -> Callable[..., None]:
    """Returns the function of a command whose only options are those that several commands have."""

    def reading_text(
        overrides: Overrides = None,
        model: Model = None,
        data: Data = None,
        config_dir: ConfigDir = None,
        cfg: Cfg = None,
        multirun: Multirun = False,
    ) -> None:
        _run(command.name, overrides, config_dir, cfg, multirun, model, data)

    def job(
        overrides: Overrides = None,
        config_dir: ConfigDir = None,
        cfg: Cfg = None,
        multirun: Multirun = False,
    ) -> None:
        _run(command.name, overrides, config_dir, cfg, multirun)

    return reading_text if command.reads_text else job


for _command in COMMANDS.values():
    _function = {"generate": _generate, "serve": _serve}.get(_command.name) or _job(_command)
    app.command(_command.name, cls=ConfiguredCommand, help=_command.help)(_function)


@app.command("demo")
def demo(overrides: Overrides = None) -> None:
    """Train and evaluate on the embedded model, in minutes. Runs on any machine, without a
    download.
    """
    from msattn.trainer.commands.demo import demo as run

    with _stopped_by_signals():
        run(overrides or [])


@app.command("push")
def push(
    folder: Annotated[
        str,
        typer.Argument(help="The folder of an artifact, or of a run such as outputs/llama3/base."),
    ],
    repository: Annotated[str, typer.Argument(help="The repository on the Hub, as owner/name.")],
    private: Annotated[
        bool, typer.Option("--private", help="Create a private repository.")
    ] = False,
) -> None:
    """Upload artifacts to the Hugging Face Hub. Makes one commit with model cards; uses the token
    of hf auth login.
    """
    from msattn.trainer.commands.artifacts import push as run

    with _stopped_by_signals():
        run(folder, repository, private=private)


@app.command("configure")
def configure(
    model: Annotated[
        str,
        typer.Argument(
            help="The folder of a model.", autocompletion=_complete_model, show_default=False
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="Options of attach: gate=PATH, select=NAME, sparsity=0.8, qmodel=PATH."
        ),
    ] = None,
) -> None:
    """Write msattn settings into a model's config.json. For attn_implementation="msattn" in
    transformers, and for vLLM.
    """
    from msattn.trainer.commands.artifacts import configure as run

    with _stopped_by_signals():
        run(model, settings or [])


@app.command("import-gate")
def import_gate(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder or Hub id such as SeerAttention/SeerAttention-Llama-3.1-8B-AttnGates."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder of the new artifact.", show_default=False)],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an artifact in that folder.")
    ] = False,
    finished_at: Annotated[
        Literal["first", "last"] | None,
        typer.Option(
            help="Position for RoPE of a decode gate's block that new tokens complete; default: "
            "last, as the authors."
        ),
    ] = None,
) -> None:
    """Import gates released by SeerAttention's authors as an artifact. For prefill or decoding;
    runs none of their code.
    """
    from msattn.trainer.commands.artifacts import import_gate as run

    with _stopped_by_signals():
        run(source, out, overwrite=overwrite, finished_at=finished_at)


@app.command("doctor")
def doctor(
    argument: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="The same as --model.",
            autocompletion=_complete_model,
            show_default=False,
        ),
    ] = None,
    model: Model = None,
) -> None:
    """Check what this machine can run, or which layers of a model can be sparse. Prints how to
    install what is missing.
    """
    from msattn.trainer.commands.doctor import doctor as run
    from msattn.trainer.commands.doctor_model import doctor_model

    if None not in (argument, model):
        raise UserError(f"--model {model} and {argument}: give one of the two")
    chosen = model if argument is None else argument
    with _stopped_by_signals():
        if chosen is None:
            run()
        else:
            doctor_model(chosen)


@app.command("help")
def explain(ctx: typer.Context, topic: Topic = None) -> None:
    """Explain a command, a group such as gate, or a key such as gate.heads."""
    from msattn.trainer.commands.help import show

    show(ctx, topic)


def main(arguments: list[str] | None = None) -> None:
    """Runs ``msattn`` with ``arguments`` (default: the process's own) and exits."""
    if arguments is None:  # the process has no other purpose, so signals stay handled until it ends
        # the last callback; later no function would be called
        atexit.register(handle, signal.SIG_IGN)
        handle(end_at_once)
        _open_streams()
        _main(sys.argv[1:])
    with handled(end_at_once):
        _main(arguments or [])


def _open_streams() -> None:
    """Opens standard streams that were closed, e.g. with ``>&-``, so that no file of the job gets
    their descriptor.
    """
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # to the end of the process


def _main(arguments: list[str]) -> NoReturn:
    try:
        with named_output_errors():
            code = app(arguments or ["--help"], prog_name="msattn", standalone_mode=False)
    except typer.TyperException as error:
        code = report_error(UserError(error.format_message()))
    except (UserError, Fault) as error:
        code = report_error(error)
    handle(end_silently)
    exit_process(code if isinstance(code, int) else 0)
