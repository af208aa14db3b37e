"""The processes of a run under ``torchrun``: all stop after the same step, and none waits for one that is lost."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from msattn.trainer.errors import Fault, ProcessLost, Terminated, TrainingDiverged, say

LOOK_EVERY = 1.0  # seconds between looks at the other processes
NOTICE = 5.0  # seconds in which a broken connection shows that its other end is gone, or this process ends by itself
LAST_WORD = "another process of this run ended, so this one cannot go on; resume=true goes on from what was saved"
_calls = count()


class Vote:
    """When the processes of a training run stop: all after the same step.

    They speak through a process group of their own on the CPU, so that nobody waits for a GPU.

    Parameters
    ----------
    processes : int
        Of the run; with 1 there is nobody to ask.
    """

    def __init__(self, processes: int) -> None:
        self._group = _control_group() if processes > 1 else None
        self._cast: tuple[Any, torch.Tensor] | None = None

    @property
    def alone(self) -> bool:
        """Whether this process is the whole run."""
        return self._group is None

    def agree(self, number: int) -> int:
        """The largest number that any process gave a call ago: nobody waits for one that is a little behind."""
        if self._group is None:
            return number
        before = self._result()
        vote = torch.tensor(number)
        self._cast = (dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._group, async_op=True), vote)
        return before

    def settle(self, number: int) -> int:
        """The largest number that any process gives now, or gave last; all wait for each other."""
        return max(self.agree(number), self._result())

    def _result(self) -> int:
        if self._cast is None:
            return 0
        work, vote = self._cast
        work.wait()
        self._cast = None
        return int(vote)


@cache
def _control_group() -> Any:
    return dist.new_group(backend="gloo")  # kept: destroying it can abort the process


@contextmanager
def together() -> Iterator[None]:
    """While the processes of a ``torchrun`` need each other, the loss of one ends all: to be entered by each of them.

    A process that hangs, as in a collective on GPUs, says so from a thread and exits with 1. Lost is who ended in another way
    than by leaving this block, or by Ctrl-C or SIGTERM, which go to all.

    Raises
    ------
    ProcessLost : a connection broke, or torchrun bids to stop, since another process was lost.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        yield
        return
    others = _Others()
    done = threading.Event()
    threading.Thread(target=_watch, args=(others, done), daemon=True).start()
    try:
        yield
    except (RuntimeError, Terminated) as error:
        patience = 0.0 if isinstance(error, Terminated) else NOTICE  # a connection may break a little before its end is seen
        usual = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's to those that are left would cut the last word short
        if not isinstance(error, Fault | TrainingDiverged) and others.lost(patience):
            raise ProcessLost(LAST_WORD) from error  # and the thread goes on, should the end itself hang
        signal.signal(signal.SIGTERM, usual)
        done.set()
        if isinstance(error, Terminated):
            others.leave()
        raise
    except BaseException as error:
        done.set()
        if isinstance(error, KeyboardInterrupt):
            others.leave()
        raise
    done.set()
    others.leave()


def _watch(others: "_Others", done: threading.Event) -> None:
    while not done.wait(LOOK_EVERY):
        if others.lost() and not done.wait(NOTICE):
            say(LAST_WORD)
            os._exit(1)


class _Others:
    """The other processes on this machine, as torchrun's store knows them; those of other machines end with their torchrun."""

    def __init__(self) -> None:
        self._rank = int(os.environ["RANK"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = PrefixStore(
            f"msattn/together/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{next(_calls)}",
            TCPStore(address, port, is_master=False, timeout=timedelta(minutes=10)),
        )
        me = psutil.Process()
        self._store.set(f"process {self._rank}", json.dumps([socket.gethostname(), me.pid, me.create_time()]))
        ranks = [rank for rank in range(int(os.environ["WORLD_SIZE"])) if rank != self._rank]
        named = {rank: _process(*json.loads(self._store.get(f"process {rank}"))) for rank in ranks}
        self._processes = {rank: process for rank, process in named.items() if process is not None}

    def lost(self, patience: float = 0.0) -> bool:
        """Whether one of them has ended without leaving first, or does so within ``patience`` seconds."""
        pause = threading.Event()
        for _ in range(1 + int(patience / 0.1)):
            ended = [rank for rank, process in self._processes.items() if _ended(process)]
            if any(not self._left(rank) for rank in ended):
                return True
            pause.wait(min(patience, 0.1))
        return False

    def leave(self) -> None:
        """Tell the others that the end of this process is in order."""
        with suppress(dist.DistError):  # torchrun is gone, and with it who would ask
            self._store.set(f"left {self._rank}", "")

    def _left(self, rank: int) -> bool:
        try:
            return self._store.check([f"left {rank}"])
        except dist.DistError:
            return False


def _process(host: str, pid: int, created: float) -> psutil.Process | None:
    """That process, if it runs where this one can see it: on this machine, among the same process numbers."""
    try:
        process = psutil.Process(pid)
        return process if host == socket.gethostname() and abs(process.create_time() - created) < 10 else None
    except psutil.NoSuchProcess:
        return None


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
