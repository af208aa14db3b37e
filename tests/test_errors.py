"""Exit codes and lines of the programs in docs/experiments, and of a full disk."""

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msattn.trainer.commands.jobs import Command
from msattn.trainer.errors import (
    Fault,
    OutputClosed,
    Terminated,
    TrainingDiverged,
    UserError,
    run_program,
)
from tests.house.modules import ROOT
from tests.running import exit_code, exit_code_of


def ended(program: Callable[[], int | None]) -> int:
    return exit_code_of(lambda: run_program(program))


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("--text=x:\n no such file"), 2, "msattn: --text=x: no such file\n"),
        (TrainingDiverged("the loss is not finite"), 2, "msattn: the loss is not finite\n"),
        (Fault("a data worker was lost"), 1, "msattn: a data worker was lost\n"),
        (OutputClosed(), 1, ""),
        (KeyboardInterrupt(), 130, "msattn: interrupted\n"),
        (KeyboardInterrupt("3 rows are kept"), 130, "msattn: interrupted: 3 rows are kept\n"),
        (Terminated(), 143, "msattn: interrupted\n"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def program() -> None:
        raise error

    assert ended(program) == code
    assert capsys.readouterr().err == line


def test_notes_follow_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    fault = Fault("KeyError: 'x'")
    fault.add_note("Traceback:\n  in f")

    def program() -> None:
        raise fault

    assert ended(program) == 1
    assert capsys.readouterr().err == "msattn: KeyError: 'x'\nTraceback:\n  in f\n"


def test_a_program_returns_its_exit_code() -> None:
    assert ended(lambda: None) == 0
    assert ended(lambda: 1) == 1
    with pytest.raises(ZeroDivisionError):  # a defect keeps its traceback
        run_program(lambda: 1 // 0)


def test_a_closed_output_ends_a_program_without_a_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert ended(lambda: print("lost")) == 1
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("program", "arguments", "line"),
    [
        (
            "overlap",
            ["/nowhere", "--heldout", "/nowhere"],
            "msattn: --heldout=/nowhere: no such file",
        ),
        ("gate_cost", ["gate.loss=mze"], "msattn: gate.loss=mze: "),
        (
            "embedded_model",
            [
                "--device",
                "tpu",
                *(f"--{option}=/nowhere" for option in ("text", "test", "haystack", "out")),
            ],
            "msattn: --device=tpu: ",
        ),
        (
            "realised_sparsity",
            ["eval.ruler.lenghts=[1]"],
            "msattn: unknown key eval.ruler.lenghts",
        ),
        (
            "tensor_parallel",
            ["model.path=/nowhere", "device=cpu"],
            "msattn: model.path=/nowhere: ",
        ),
        ("vllm_speed", ["model", "--msattn", "{"], "msattn: --msattn {: no JSON"),
    ],
)
def test_each_program_reports_a_mistake_in_one_line(
    program: str,
    arguments: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    path = str(ROOT / f"docs/experiments/{program}.py")
    assert exit_code_of(lambda: runpy.run_path(path, run_name="__main__")) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(line)


@pytest.mark.parametrize("sweep", [[], ["-m", "name=a,b"]])
def test_a_full_disk_is_named_by_the_given_outputs(
    sweep: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Hydra writes the configuration of a run; errors of a write do not name the file."""

    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hydra.core.utils._save_config", fail)
    assert exit_code("train-mta", "tracker=none", f"outputs={tmp_path}", *sweep) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"msattn: {tmp_path} cannot be written (No space left on device); " in line
    assert f" GB are free in {tmp_path}. " in line


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (Fault("a worker ended"), 1, "msattn: job 0: a worker ended\nTraceback:\n  in f\n"),
        (UserError("probes=9"), 2, "msattn: job 0: probes=9\nTraceback:\n  in f\n"),
        (OutputClosed(), 1, ""),
    ],
)
def test_an_error_in_a_sweep_names_its_job(
    error: Exception,
    code: int,
    lines: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    error.add_note("Traceback:\n  in f")
    monkeypatch.setattr(Command, "run", fail)
    job = "train-mta", "tracker=none", f"outputs={tmp_path}"
    assert exit_code(*job, "-m", "name=a,b") == code
    assert capsys.readouterr().err == lines
