"""Errors that the command line says in one line, without a traceback, and how a process says it and ends."""

import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import NoReturn


class UserError(ValueError):
    """What a user can mend: the message names the argument, its value and what is accepted. Exit code 2."""


class Fault(RuntimeError):
    """What went wrong through no mistake of the user: one clear line, exit code 1 on the command line."""


class CheckFailed(Fault):
    """An operation disagrees with its reference."""


class RankLost(Fault):
    """Another process of the run ended, and those that are left cannot go on."""


class TrainingDiverged(RuntimeError):
    """A loss, gradient or weight that is not finite; the message names it and the last good checkpoint."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which stops as Ctrl-C does. Exit code 143, where that has 130."""


def write_error(path: Path, error: Exception, kept: str = "") -> UserError:
    """One line for ``error``, met in writing ``path``: its reason, the room there is, and what is ``kept`` to go on from."""
    # PyTorch's writer has a position to tell, and no reason.
    reason = "the disk refuses" if isinstance(error, RuntimeError) else getattr(error, "strerror", None) or str(error)
    free = shutil.disk_usage(path.parent).free
    there = f"{free / 1e9:.1f} GB are free in {path.parent}"
    return UserError(f"{path} cannot be written ({reason}), {there}{kept}: make room, then resume=true continues")


def print_once(line: str) -> None:
    """Print ``msattn: line`` on stderr; of the processes that ``torchrun`` started, the first one that has it to say does."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or _first_to_say(line):
        sys.stderr.write(f"msattn: {line}\n")  # at once, so that lines of several processes stay apart
        sys.stderr.flush()


def exit_process(code: int) -> NoReturn:
    """End the process; one of several at once, for threads of their connections may abort the interpreter as it winds down."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _first_to_say(line: str) -> bool:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True  # started by hand: the store may have gone with the process that kept it
    from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))
        return store.add(f"msattn/said/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{line}", 1) == 1
    except DistError:
        return True
