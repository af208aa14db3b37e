"""Runs scripts in separate processes: forked from a server with warm imports, or launched as a user
would.
"""

import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import psutil
import torch

from tests.running import wait_until

ROOT = Path(__file__).parents[1]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
GPUS = 4 if torch.cuda.device_count() >= 4 else 2  # ranks of tests on several GPUs
TIMEOUT = 300  # seconds for jobs that take ten on an idle machine, so that only a hang fails

sys.path.append(str(ROOT))  # inherited by forked processes, which import tests from it
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        "pytest",
        "msattn.trainer.finetune.run",
        "msattn.trainer.methods.classifier.fit_kmeans",
        "msattn.trainer.methods.classifier.train",
        "hydra._internal.hydra",
        "transformers.models.llama.modeling_llama",
    ]
)
# Launched processes keep bytecode of all they import even if the tests run without: compiling takes
# most of their start.
BYTECODE = {"PYTHONPYCACHEPREFIX": str(ROOT / ".pytest_cache/bytecode")}


def prepare() -> None:
    """Starts the server that forks jobs, unless it runs; its imports, many seconds, go on beside
    the test.
    """
    with patch.dict(os.environ, BYTECODE):
        forkserver.ensure_running()


class Job:
    """Runs ``script`` with ``arguments``; stdout and stderr go to files in ``folder``.

    The processes (ranks, if there are several) are forked from a server that has done the slow
    imports. GPUs are hidden: libraries that find some assign one to each rank, even for jobs on the
    CPU.
    """

    def __init__(self, script: str, folder: Path, *arguments: object, processes: int = 1) -> None:
        self.out, self.err = folder / "job.out", folder / "job.err"
        file = folder / "job.py"
        file.write_text(script)
        for written in (self.out, self.err):
            written.write_text("")
        self._start([str(file), *map(str, arguments)], processes)

    def _start(self, call: list[str], processes: int) -> None:
        shared = {
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": _free_port(),
        }
        several = [
            shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)
        ]
        each = [NO_GPU | own for own in (several if processes > 1 else [{}])]
        prepare()
        self._ranks = [
            _forks.Process(target=_run, args=(call, own, str(self.out), str(self.err)))
            for own in each
        ]
        for rank in self._ranks:
            rank.start()

    def poll(self) -> int | None:
        """Returns the exit code, that of a failed process if there is one; None while a process
        runs.
        """
        codes = [rank.exitcode for rank in self._ranks]
        return None if None in codes else next((code for code in codes if code), 0)

    def send_signal(self, number: int) -> None:
        """Sends the signal ``number`` to each process."""
        for rank in self._ranks:
            if rank.pid:
                os.kill(rank.pid, number)

    def kill(self) -> None:
        """Kills all processes and their children."""
        self._kill([rank.pid for rank in self._ranks if rank.exitcode is None and rank.pid])

    def _kill(self, pids: list[int]) -> None:
        family: list[psutil.Process] = []
        for pid in pids:
            with suppress(psutil.NoSuchProcess):  # it may have ended by itself
                family += [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        wait_until(lambda: self.poll() is not None)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Waits until ``condition()`` is true; fails if the job ends before."""
        self._wait_until(lambda: condition() or self.poll() is not None)
        assert self.poll() is None or condition(), (
            f"the job ended too early: {self.err.read_text()}"
        )

    def wait(self) -> int:
        """Waits until the job has ended and returns its exit code."""
        self._wait_until(lambda: self.poll() is not None)
        return self.poll() or 0

    def _wait_until(self, condition: Callable[[], object]) -> None:
        if not wait_until(condition, TIMEOUT):
            self.kill()
            raise AssertionError(f"the job runs after {TIMEOUT} seconds: {self.err.read_text()}")

    def output(self) -> str:
        """Waits until the job has ended, checks its exit code and returns its stdout."""
        assert self.wait() == 0, self.err.read_text()
        return self.out.read_text()


class LaunchedJob(Job):
    """Starts the script with ``python``, or ``torchrun`` for several processes; signals and exit
    code are the launcher's.
    """

    hidden: ClassVar[dict[str, str]] = NO_GPU

    def _start(self, call: list[str], processes: int) -> None:
        # where msattn is not installed, they hold it
        paths = [
            str(ROOT),
            str(ROOT / "docs/experiments"),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
        torchrun = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
            if processes > 1
            else []
        )
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = psutil.Popen(
                [sys.executable, *torchrun, *call],
                env={
                    **os.environ,
                    **self.hidden,
                    "PYTHONPATH": os.pathsep.join(paths),
                    "OMP_NUM_THREADS": "1",
                }
                | BYTECODE
                | {"PYTHONDONTWRITEBYTECODE": ""},
                stdout=out,
                stderr=err,
            )

    def poll(self) -> int | None:
        return self.process.poll()

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self._kill([self.process.pid])


class LaunchedGpuJob(LaunchedJob):
    """A launched job that sees the machine's GPUs."""

    hidden: ClassVar[dict[str, str]] = {}


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def _run(call: list[str], environment: dict[str, str], out: str, err: str) -> None:
    """Runs ``python *call`` in this process."""
    os.environ.update(environment)
    for number, path in ((1, out), (2, err)):
        with open(path, "a") as file:
            os.dup2(file.fileno(), number)
    sys.argv = call
    runpy.run_path(call[0], run_name="__main__")
