"""Processes of a run under ``torchrun``: joining, sharing work, stopping after the same step, and exiting together."""

import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from datetime import timedelta
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from msattn.trainer.errors import Fault, RankLost, Terminated, TrainingDiverged, print_once

if TYPE_CHECKING:
    from msattn.trainer.data.chunking import Chunks

LOOK_EVERY = 1.0  # seconds between looks at the other processes
NOTICE = 5.0  # seconds in which a broken connection shows that its other end is gone, or this process ends by itself
LOST_RANK_MESSAGE = "another process of this run ended, so this one cannot go on; resume=true continues from what was saved"
TIMEOUT = timedelta(days=7)  # one process may have hours more work than another; torchrun ends all when one is lost
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_calls = count()


class StopConsensus:
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
def fail_together() -> Iterator[None]:
    """While the processes of a ``torchrun`` need each other, the loss of one ends all: to be entered by each of them.

    A process that hangs, as in a collective on GPUs, says so from a thread and exits with 1. Lost is who ended in another way
    than by leaving this block, or by Ctrl-C or SIGTERM, which go to all.

    Raises
    ------
    RankLost : a connection broke, or torchrun bids to stop, since another process was lost.
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
            raise RankLost(LOST_RANK_MESSAGE) from error  # and the thread goes on, should the end itself hang
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
            print_once(LOST_RANK_MESSAGE)
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


def join(device: torch.device) -> PartialState:
    """This process among those of its ``torchrun``, or on its own: ``num_processes``, ``process_index``, ``wait_for_everyone``.

    They meet over NCCL where ``device`` is a GPU, else over gloo.
    """
    return PartialState(cpu=device.type == "cpu", timeout=TIMEOUT)


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Within it, this process trains by itself whatever the others do: its own layers, checkpoints and figures.

    transformers and accelerate learn of the others from torchrun's variables and from accelerate's state: both are put
    aside. What other processes than the first print is dropped, as it would mix with the first one's lines.
    """
    first = os.environ.get("RANK", "0") == "0"
    logger = logging.getLogger("transformers.training_args")  # warns of a process group that the Trainer is not to use
    level = logger.level
    hidden = {name: os.environ.pop(name) for name in VARIABLES if name in os.environ}
    AcceleratorState._reset_state(reset_partial_state=True)
    with ExitStack() as stack:
        if not first:
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
            os.environ.update(hidden)
            AcceleratorState._reset_state(reset_partial_state=True)
            join(device)


def rank_shard(chunks: "Chunks", most: int) -> Iterator[dict[str, Tensor]]:
    """This process's items among the first ``most`` chunks; without ``torchrun`` all of them."""
    state = PartialState()
    return (chunks[i] for i in range(state.process_index, min(most, len(chunks)), state.num_processes))
