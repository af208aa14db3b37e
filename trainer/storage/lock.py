"""A lock for each output folder, held by the process that writes there."""

import errno
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from msattn.trainer.errors import UserError, free_space, print_once
from msattn.trainer.ranks import is_main_rank

# errors of a file system without locks
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of ``folder``, the file ``.<name>.lock`` beside it, inside the context.

    The lock is released when the process ends, however it ends. A thread may enter several times.
    Ranks of one ``torchrun`` share the lock, which rank 0 holds. Raises UserError with process id
    and host if another process or thread holds it.
    """
    path = _lock_file(folder)
    if not is_main_rank():
        holder = _read(path)
        if holder and holder.get("run") != _own()["run"] and _is_locked(path):
            raise _refusal(folder, holder)
        yield
        return
    # One lock of a path in the process, so that a thread may enter again. Without flock it must
    # fail, see _hold.
    lock = FileLock(path, timeout=0, is_singleton=True, fallback_to_soft=False)
    if lock.is_locked:
        yield
        return
    with _hold(lock, folder):
        yield


@contextmanager
def locked_in_turn(file: Path) -> Iterator[None]:
    """Holds the lock ``.<name>.lock`` beside ``file`` inside the context, and waits while another
    process or thread holds it.

    Unlike :func:`locked`, each rank takes the lock. It is released when the process ends, however
    it ends.
    """
    with _hold(FileLock(_lock_file(file), fallback_to_soft=False), file):
        yield


@contextmanager
def _hold(lock: FileLock, folder: Path) -> Iterator[None]:
    """Holds ``lock``, whose file names this process."""
    path = Path(lock.lock_file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _acquire(lock)
    except Timeout as error:
        raise _refusal(folder, _read(path)) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            reason = f"{path.name}: {error.strerror}; {free_space(path)}"
            raise UserError(f"{folder.parent} is not writable ({reason})") from error
        print_once(
            f"warning: {folder}: the file system has no locks; run one job at a time in this folder"
        )
    try:
        if lock.is_locked:
            with suppress(OSError):  # the lock holds on a full disk, too; only refusals name less
                path.write_text(json.dumps(_own()))
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                path.unlink()  # before the lock ends; whoever waits for it then locks a new file
            lock.release()


def _acquire(lock: FileLock) -> None:
    """Acquires ``lock``; tries again if its last holder removed the file meanwhile (ESTALE on
    network file systems).
    """
    try:
        lock.acquire()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        lock.acquire()


def _is_locked(path: Path) -> bool:
    try:
        with FileLock(path, timeout=0, fallback_to_soft=False):
            return False
    except OSError:  # Timeout is one
        return True


def _lock_file(folder: Path) -> Path:
    return folder.absolute().with_name(f".{folder.name}.lock")


def _own() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": " ".join(["msattn", *sys.argv[1:2]]),
        "since": datetime.now().isoformat(sep=" ", timespec="minutes"),
        "run": ":".join(
            os.environ.get(name, "")
            for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
        ),
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):  # its holder has just created or removed it
        return {}
    return content if isinstance(content, dict) else {}


def _refusal(folder: Path, holder: dict[str, Any]) -> UserError:
    who = f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'an unknown host')}"
    since = (
        f", {holder['command']} since {holder['since']}"
        if {"command", "since"} <= holder.keys()
        else ""
    )
    return UserError(
        f"{folder}: another run writes there ({who}{since}); wait for it, or choose another name="
    )
