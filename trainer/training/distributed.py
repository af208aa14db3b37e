"""Ranks of a run under ``torchrun``: process state, work sharding, stopping after a common step,
failing together.
"""

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
from torch.distributed import PrefixStore, TCPStore

from msattn.trainer.errors import Fault, RankLost, Terminated, TrainingDiverged, print_once
from msattn.trainer.ranks import is_main_rank, num_ranks

if TYPE_CHECKING:
    from msattn.trainer.data.chunking import Chunks

POLL_INTERVAL = 1.0  # seconds between checks of the other ranks' processes
# Seconds to wait for a rank to exit after its connection broke, and for this rank to end by itself
# after another was lost.
GRACE_PERIOD = 5.0
LOST_RANK_MESSAGE = (
    "another rank of this run ended, so this one stops; resume=true continues "
    "from the last checkpoint"
)
# one rank may have hours more work than another; torchrun ends all ranks when one fails
TIMEOUT = timedelta(days=7)
TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_entries = count()  # numbers the uses of fail_together, because they share torchrun's store


class StopConsensus:
    """Agreement of all ranks on the step after which training stops, although a signal may reach
    only one of them.

    Has its own gloo process group, so that no rank waits for its GPU.
    """

    def __init__(self, world_size: int) -> None:
        self._group = _control_group() if world_size > 1 else None
        self._pending: tuple[Any, torch.Tensor] | None = None

    @property
    def single_rank(self) -> bool:
        """True if the run has one rank."""
        return self._group is None

    def exchange(self, signal_number: int) -> int:
        """Starts an asynchronous maximum over all ranks and returns the result of the previous
        call, so that no rank waits.
        """
        if self._group is None:
            return signal_number
        previous = self._take_result()
        value = torch.tensor(signal_number)
        self._pending = (
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group, async_op=True),
            value,
        )
        return previous

    def finish(self, signal_number: int) -> int:
        """Returns the maximum of this call and the previous one over all ranks. Blocks until every
        rank has called it.
        """
        return max(self.exchange(signal_number), self._take_result())

    def _take_result(self) -> int:
        if self._pending is None:
            return 0
        work, value = self._pending
        work.wait()
        self._pending = None
        return int(value)


@cache
def _control_group() -> Any:
    # kept for the life of the process: destroying it can abort the interpreter
    return dist.new_group(backend="gloo")


@contextmanager
def fail_together() -> Iterator[None]:
    """Ends all ranks of a ``torchrun`` if one of them dies inside the context. Enter it on every
    rank.

    A rank counts as lost when its process ends without leaving the block normally or through Ctrl-C
    or SIGTERM, which reach all ranks. Raises RankLost if a connection broke, or torchrun sent
    SIGTERM, because another rank was lost. A rank that hangs, as in a collective on GPUs, prints
    the message from a thread and exits with code 1.
    """
    if num_ranks() == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        yield
        return
    ranks = _LocalRanks()
    done = threading.Event()
    threading.Thread(target=_exit_when_rank_lost, args=(ranks, done), daemon=True).start()
    try:
        yield
    except (RuntimeError, Terminated) as error:
        # A connection may break shortly before the end of its process is visible.
        grace_period = 0.0 if isinstance(error, Terminated) else GRACE_PERIOD
        # torchrun's SIGTERM would interrupt the error message
        previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not isinstance(error, Fault | TrainingDiverged) and ranks.any_lost(grace_period):
            # the thread keeps running, in case the shutdown hangs
            raise RankLost(LOST_RANK_MESSAGE) from error
        signal.signal(signal.SIGTERM, previous)
        done.set()
        if isinstance(error, Terminated):
            ranks.mark_exit()
        raise
    except BaseException as error:
        done.set()
        if isinstance(error, KeyboardInterrupt):
            ranks.mark_exit()
        raise
    done.set()
    ranks.mark_exit()


def _exit_when_rank_lost(ranks: "_LocalRanks", done: threading.Event) -> None:
    while not done.wait(POLL_INTERVAL):
        if ranks.any_lost() and not done.wait(GRACE_PERIOD):
            print_once(LOST_RANK_MESSAGE)
            os._exit(1)


class _LocalRanks:
    """The other ranks on this machine, registered in torchrun's store. Ranks of other machines end
    with their torchrun.
    """

    def __init__(self) -> None:
        self._rank = int(os.environ["RANK"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = PrefixStore(
            f"msattn/fail_together/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{next(_entries)}",
            TCPStore(address, port, is_master=False, timeout=timedelta(minutes=10)),
        )
        own = psutil.Process()
        self._store.set(
            f"process {self._rank}", json.dumps([socket.gethostname(), own.pid, own.create_time()])
        )
        ranks = [rank for rank in range(num_ranks()) if rank != self._rank]
        processes = {
            rank: _find_process(*json.loads(self._store.get(f"process {rank}"))) for rank in ranks
        }
        self._processes = {
            rank: process for rank, process in processes.items() if process is not None
        }

    def any_lost(self, grace_period: float = 0.0) -> bool:
        """Returns True if a rank has ended without :meth:`mark_exit`, or ends so within
        ``grace_period`` seconds.
        """
        pause = threading.Event()
        for _ in range(1 + int(grace_period / 0.1)):
            ended = [rank for rank, process in self._processes.items() if _has_ended(process)]
            if any(not self._exit_marked(rank) for rank in ended):
                return True
            pause.wait(min(grace_period, 0.1))
        return False

    def mark_exit(self) -> None:
        """Records that this rank ends as intended."""
        # torchrun has ended, and with it all ranks that could read the mark
        with suppress(dist.DistError):
            self._store.set(f"exited {self._rank}", "")

    def _exit_marked(self, rank: int) -> bool:
        try:
            return self._store.check([f"exited {rank}"])
        except dist.DistError:
            return False


def _find_process(host: str, pid: int, created: float) -> psutil.Process | None:
    """Returns the process if it is visible here: on this machine and in the same PID namespace."""
    try:
        process = psutil.Process(pid)
        return (
            process
            if host == socket.gethostname() and abs(process.create_time() - created) < 10
            else None
        )
    except psutil.NoSuchProcess:
        return None


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def init_process_state(device: torch.device) -> PartialState:
    """Returns accelerate's state of this rank and, under ``torchrun``, initializes the process
    group.

    The backend is NCCL if ``device`` is a GPU, else gloo. Without ``torchrun`` the state has one
    process.
    """
    return PartialState(cpu=device.type == "cpu", timeout=TIMEOUT)


@contextmanager
def isolated_rank(device: torch.device) -> Iterator[None]:
    """Lets this rank train on its own inside the block, with its own layers, checkpoints and
    metrics.

    transformers and accelerate detect other ranks by torchrun's environment variables and by
    accelerate's state, so both are removed for the block. The standard output of ranks other than 0
    is dropped, as it would interleave with that of rank 0.
    """
    first = is_main_rank()
    # warns of a process group that the Trainer does not use
    logger = logging.getLogger("transformers.training_args")
    level = logger.level
    hidden = {name: os.environ.pop(name) for name in TORCHRUN_VARIABLES if name in os.environ}
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
            init_process_state(device)


def rank_shard(
    chunks: "Chunks", limit: int, *, each_rank: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Yields this rank's share of the first ``limit`` chunks: every ``world_size``-th item,
    starting with its rank.

    With ``each_rank`` no rank is without a chunk: if there are more ranks, they take further
    chunks, or the first ones again.
    """
    state, count = PartialState(), min(limit, len(chunks))
    end = max(count, state.num_processes) if each_rank else count
    return (chunks[i % len(chunks)] for i in range(state.process_index, end, state.num_processes))
