"""The ``msattn`` command: each subcommand composes a configuration and hands it to one job.

Exit codes: 0 done, 1 a fault, 2 what a user can mend (one line on stderr), 130 interrupted, 143 terminated.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


class Shown(StrEnum):
    """What ``--cfg`` prints."""

    job = "job"
    hydra = "hydra"
    all = "all"


class Composed(TyperCommand):
    """A command whose ``--help`` ends with the groups and defaults of its configuration."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from msattn.trainer.commands.compose import describe

        super().format_help(ctx, formatter)
        typer.echo(describe(str(ctx.info_name)))


def _complete(ctx: typer.Context, incomplete: str) -> list[str]:
    from msattn.trainer.commands.compose import complete

    return complete(str(ctx.info_name), ctx.params.get("overrides") or (), incomplete)


Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Hydra overrides: group=option, key=value.", autocompletion=_complete, show_default=False),
]
ConfigDir = Annotated[Path | None, typer.Option(help="A further folder of configuration groups.", show_default=False)]
Cfg = Annotated[Shown | None, typer.Option(help="Print the composed configuration and stop.", show_default=False)]
Multirun = Annotated[bool, typer.Option("--multirun", "-m", help="Sweep over comma-separated values.")]

app = typer.Typer(
    name="msattn",
    help="Long-context language models that read only what matters: train gates and query classifiers, measure them, use them.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM end with the job's own last word, e.g. where its checkpoint lies."""
    from msattn.trainer.errors import Terminated, print_once

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    usual = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt as stop:
        print_once(f"interrupted{f': {stop}' if stop.args else ''}")
        raise typer.Exit(143 if isinstance(stop, Terminated) else 130) from stop
    finally:
        signal.signal(signal.SIGTERM, usual)


def _run(
    command: str, overrides: list[str] | None, config_dir: Path | None, cfg: Shown | None, multirun: bool, **arguments: Any
) -> None:
    from msattn.trainer.commands.compose import launch, show

    with _interruptible():
        if cfg is not None:
            show(command, overrides or [], kind=cfg.value, config_dir=config_dir)
        else:
            launch(command, overrides or [], config_dir=config_dir, multirun=multirun, **arguments)


@app.command("train-gate", cls=Composed)
def train_gate(overrides: Overrides = None, config_dir: ConfigDir = None, cfg: Cfg = None, multirun: Multirun = False) -> None:
    """Train SeerAttention gates: which key blocks each query block needs."""
    _run("train-gate", overrides, config_dir, cfg, multirun)


@app.command("fit-kmeans", cls=Composed)
def fit_kmeans(overrides: Overrides = None, config_dir: ConfigDir = None, cfg: Cfg = None, multirun: Multirun = False) -> None:
    """Cluster the keys of each key/value head into buckets."""
    _run("fit-kmeans", overrides, config_dir, cfg, multirun)


@app.command("train-qmodel", cls=Composed)
def train_qmodel(
    overrides: Overrides = None, config_dir: ConfigDir = None, cfg: Cfg = None, multirun: Multirun = False
) -> None:
    """Train query classifiers: which buckets each query needs."""
    _run("train-qmodel", overrides, config_dir, cfg, multirun)


@app.command("finetune", cls=Composed)
def finetune(overrides: Overrides = None, config_dir: ConfigDir = None, cfg: Cfg = None, multirun: Multirun = False) -> None:
    """Train a whole model on long text, through the sparse attention of its gates or densely."""
    _run("finetune", overrides, config_dir, cfg, multirun)


@app.command("eval", cls=Composed)
def evaluate(overrides: Overrides = None, config_dir: ConfigDir = None, cfg: Cfg = None, multirun: Multirun = False) -> None:
    """Measure the artifacts of a model: tables, plots, report."""
    _run("eval", overrides, config_dir, cfg, multirun)


@app.command("generate", cls=Composed)
def generate(
    overrides: Overrides = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt, as it is.", show_default=False)] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 file with the prompt.", show_default=False)] = None,
    config_dir: ConfigDir = None,
    cfg: Cfg = None,
    multirun: Multirun = False,
) -> None:
    """Try the artifacts of a model on a prompt, sparse beside dense."""
    from msattn.trainer.commands.generate import read_prompt

    text = "" if cfg else read_prompt(prompt, prompt_file)
    _run("generate", overrides, config_dir, cfg, multirun, prompt=text)


@app.command("bench", cls=Composed)
def bench(overrides: Overrides = None, config_dir: ConfigDir = None, cfg: Cfg = None, multirun: Multirun = False) -> None:
    """Time a kernel beside its peers on this machine, once it agrees with its reference."""
    _run("bench", overrides, config_dir, cfg, multirun)


@app.command("demo")
def demo(overrides: Overrides = None) -> None:
    """Run the whole line on the embedded model, on any machine, in a few minutes."""
    from msattn.trainer.commands.demo import demo as run

    with _interruptible():
        run(overrides or [])


@app.command("doctor")
def doctor() -> None:
    """Say what this machine can run, and what is missing."""
    from msattn.trainer.commands.doctor import doctor as run

    run()


def main(arguments: list[str] | None = None) -> None:
    """Run ``msattn`` on ``arguments`` (default: those of the process) and exit."""
    from msattn.trainer.errors import Fault, UserError, exit_process, print_once

    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(arguments or ["--help"], prog_name="msattn", standalone_mode=False)
    except (UserError, typer.TyperException) as error:
        message = str(error) if isinstance(error, UserError) else error.format_message()
        print_once(" ".join(message.split()))
        exit_process(2)
    except Fault as error:
        print_once(" ".join(str(error).split()))
        exit_process(1)
    exit_process(code if isinstance(code, int) else 0)
