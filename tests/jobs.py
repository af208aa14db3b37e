"""Scripts run as processes of their own: forked where everything is imported already, or started as a user does."""

import multiprocessing
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import psutil

ROOT = Path(__file__).parents[1]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
TIMEOUT = 300  # seconds for what takes ten on a machine at rest: only what hangs may fail for its time

sys.path.append(str(ROOT))  # forked processes take it over, and find tests there
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["pytest", "msattn.trainer.finetune.run", "msattn.trainer.saap.train_qmodel"])


class Job:
    """``script`` with ``arguments``, started in ``folder``; its output and its errors go to files there.

    Its processes, with ranks if there are several, come from one that has imported what takes seconds. They see no GPU: a
    library that counts some gives each rank one of them, also of a job that is to run on the CPU.
    """

    def __init__(self, script: str, folder: Path, *arguments: object, processes: int = 1) -> None:
        self.out, self.err = folder / "job.out", folder / "job.err"
        file = folder / "job.py"
        file.write_text(script)
        for written in (self.out, self.err):
            written.write_text("")
        self._start([str(file), *map(str, arguments)], processes)

    def _start(self, call: list[str], processes: int) -> None:
        shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": _free_port()}
        several = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
        each = [NO_GPU | own for own in (several if processes > 1 else [{}])]
        self._ranks = [_forks.Process(target=_run, args=(call, own, str(self.out), str(self.err))) for own in each]
        for rank in self._ranks:
            rank.start()

    def poll(self) -> int | None:
        """The exit code, of a process that failed if one did; None while one runs."""
        codes = [rank.exitcode for rank in self._ranks]
        return None if None in codes else next((code for code in codes if code), 0)

    def send_signal(self, number: int) -> None:
        """To each of its processes."""
        for rank in self._ranks:
            if rank.pid:
                os.kill(rank.pid, number)

    def kill(self) -> None:
        """All its processes, at once."""
        self._kill([rank.pid for rank in self._ranks if rank.exitcode is None and rank.pid])

    def _kill(self, pids: list[int]) -> None:
        family: list[psutil.Process] = []
        for pid in pids:
            with suppress(psutil.NoSuchProcess):  # it may end by itself meanwhile
                family += [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        while self.poll() is None:
            time.sleep(0.005)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Until ``condition`` holds, which the job brings about."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert self.poll() is None, f"ended before its time: {self.err.read_text()}"
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"nothing after {TIMEOUT} seconds: {self.err.read_text()}")
            time.sleep(0.005)

    def wait(self) -> int:
        """The exit code, once it has ended by itself."""
        deadline = time.monotonic() + TIMEOUT
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"still there after {TIMEOUT} seconds: {self.err.read_text()}")
            time.sleep(0.005)
        return code

    def output(self) -> str:
        """What it printed."""
        assert self.wait() == 0, self.err.read_text()
        return self.out.read_text()


class LaunchedJob(Job):
    """A job that Python runs, or ``torchrun`` if it takes several processes: what is known of it is the launcher's."""

    hidden: ClassVar[dict[str, str]] = NO_GPU

    def _start(self, call: list[str], processes: int) -> None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = psutil.Popen(
                [sys.executable, *torchrun, *call],
                env={**os.environ, **self.hidden, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
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
    """The same, with the machine's GPUs."""

    hidden: ClassVar[dict[str, str]] = {}


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def _run(call: list[str], environment: dict[str, str], out: str, err: str) -> None:
    """What ``python *call`` does."""
    os.environ.update(environment)
    for number, path in ((1, out), (2, err)):
        with open(path, "a") as file:
            os.dup2(file.fileno(), number)
    sys.argv = call
    runpy.run_path(call[0], run_name="__main__")
