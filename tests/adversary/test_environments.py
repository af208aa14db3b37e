"""Commands in the environments of containers and services: output without a buffer, a working directory that is gone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adversary.tries import REFUSED, Tries, output_fault

LINES = [
    "help", "help gate", "eval --help", "eval --cfg job", "doctor", "doctor tiny", "demo", "bench", "serve",
    "train-gate -m seed=1,2", "generate --prompt a", "push outputs/tiny/base a/b", "import-gate theirs --out gate",
]  # fmt: skip


def test_a_working_directory_that_was_deleted(tries: Tries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for line in LINES:
        tries.command(line, *line.split())
    for line in ("--version", "--help"):
        tries.command(line, line, right=lambda out: "msattn" in out, accepted=True)


def test_pages_on_a_full_output_without_a_buffer(tries: Tries) -> None:
    """Pages that are shorter and longer than a buffer."""
    for line, unbuffered in (("help", "1"), ("eval --cfg job", "1"), ("eval --cfg job", "")):
        with open("/dev/full", "w") as full:
            command = [sys.executable, "-m", "msattn", *line.split()]
            environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
        fault = output_fault(done.returncode, "", done.stderr, None, {REFUSED})
        tries.record(f"{line}, PYTHONUNBUFFERED={unbuffered}", fault)
