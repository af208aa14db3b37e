"""Malformed overrides and options, and a working directory that was deleted."""

from pathlib import Path
from typing import Any

import pytest

from msattn.trainer.commands.compose import compose
from msattn.trainer.commands.jobs import Command
from tests.adversary.tries import Tries, spread

LONG = "x" * 5000
PATHS = [
    "",
    LONG,
    "a\0b",
    "a\nb",
    "\udce9",
    "~no-such-user/x",
    "nowhere",
    "/dev/zero",
    "./file/x",
    "[",
    "{a,b}",
]
ENDINGS: list[list[str]] = [
    *(
        [option, path]
        for option in ("--model", "--data", "--config-dir", "--prompt-file")
        for path in PATHS
    ),
    ["--cfg", "JOB"],
    *(["--multirun", text] for text in ("seed=1,x", "seed=range(0,inf)", "seed=glob(*)")),
    *([text] for text in ("", "\0", "\udce9", "=", "~", "--no-model", "hydra=null")),
    ["--prompt", "a", "--prompt-file", "b"],
    *(
        [f"hydra.{text}"]
        for text in ("run.dir=", "run.dir='a\0b'", "job.env_set={A:1}", "nothing=1")
    ),
    *([f"seed={text}"] for text in ("1_000", "int(", "${nowhere}", "[" * 3000, "9" * 5000)),
]


@pytest.fixture
def started(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces all jobs in an empty folder; collects the configurations that they are called
    with.
    """
    configs: list[Any] = []
    (here / "file").touch()
    monkeypatch.setattr(Command, "run", lambda self, cfg, arguments: configs.append(cfg))
    return configs


@pytest.mark.slow
def test_options(tries: Tries, started: list[Any]) -> None:
    """The job of a command that is not refused gets the configuration of the command without its
    hostile ending.
    """
    cases = [(command, ending) for ending, command in spread(ENDINGS, ("fit-kmeans", "generate"))]
    expected = {command: compose(command) for command in ("fit-kmeans", "generate")}
    for command, ending in cases:
        prompt = (
            ["--prompt", "a"] if command == "generate" and "--prompt" not in str(ending) else []
        )
        started.clear()
        tries.command(
            [command, *(word[:40] for word in ending)],
            *[command, *prompt, *ending],
            right=lambda out, command=command: started == [expected[command]],
        )


LINES = [
    "help", "help gate", "eval --help", "eval --cfg job", "doctor", "doctor tiny", "demo", "bench",
    "serve",
    "train-gate -m seed=1,2", "generate --prompt a", "push outputs/tiny/base a/b", "import-gate "
    "theirs --out gate",
]  # fmt: skip


def test_a_working_directory_that_was_deleted(
    tries: Tries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for line in LINES:
        tries.command(line, *line.split())
    for line in ("--version", "--help"):
        tries.command(line, line, right=lambda out: "msattn" in out, accepted=True)
