"""A lock for each output folder, held by the process that writes there."""

import errno
import fcntl
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from msattn.trainer.errors import UserError, free_space, print_once

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # of a file system without POSIX locks
_held: dict[Path, int] = {}  # locked folders of this process and the threads that hold them
_registry = threading.Lock()
_in_turn = threading.Lock()  # POSIX locks do not exclude threads of one process


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of ``folder``, the file ``.<name>.lock`` beside it, inside the context.

    The lock ends with the process, however that ends. A thread may enter several times. Ranks of one ``torchrun`` share the
    lock, which rank 0 holds.

    Raises
    ------
    UserError : another process or thread holds it; the message names its process id and host.
    """
    path = folder.absolute().with_name(f".{folder.name}.lock")
    if os.environ.get("RANK", "0") != "0":
        _check_run(folder, path)
        yield
        return
    with _registry:
        holder = _held.get(path)
        if holder not in (None, threading.get_ident()):
            raise _refusal(folder, _own())
        if holder is None:
            _held[path] = threading.get_ident()
    if holder is not None:
        yield
        return
    try:
        with _file_lock(folder, path):
            yield
    finally:
        with _registry:
            del _held[path]


@contextmanager
def locked_in_turn(file: Path) -> Iterator[None]:
    """Holds the lock ``.<name>.lock`` beside ``file`` inside the context, and waits while another process or thread holds it.

    Unlike :func:`locked`, each rank takes it. A process that ends, however it does, passes the lock on.

    Raises
    ------
    UserError : the folder is not writable.
    """
    with _in_turn, _file_lock(file, file.absolute().with_name(f".{file.name}.lock"), wait=True):
        yield


@contextmanager
def _file_lock(folder: Path, path: Path, *, wait: bool = False) -> Iterator[None]:
    descriptor = _open_locked(folder, path, wait=wait)
    try:
        if descriptor is not None:
            with suppress(OSError):  # the lock holds on a full disk, too; only refusals name less
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(_own()).encode(), 0)
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):
                path.unlink()  # before the lock ends, see _open_locked
            os.close(descriptor)


def _open_locked(folder: Path, path: Path, *, wait: bool) -> int | None:
    """Returns the descriptor of the locked file, or None where the file system has no locks; other errors are tried once more.

    A POSIX lock, unlike that of ``flock``, is not inherited by data workers, which may outlive a killed process.
    """
    failed = False
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            reason = f"{error.strerror}; {free_space(path)}"
            raise UserError(f"outputs={folder.parent}: the folder is not writable ({reason})") from error
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_open(path, descriptor):
                return descriptor
            os.close(descriptor)  # the last holder removed the file after it was opened here
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _refusal(folder, _read(path)) from error
            if error.errno in NO_LOCKS:
                print_once(f"warning: {folder}: the file system has no locks; run one job at a time in this folder")
                return None
            if failed:
                raise UserError(f"{folder}: its lock {path.name} cannot be taken ({error.strerror}); run again") from error
            failed = True  # another holder removed the file meanwhile (ESTALE of network file systems)


def _is_open(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _check_run(folder: Path, path: Path) -> None:
    """Raises UserError on another rank than 0 if the lock is held by another run."""
    holder = _read(path)
    if holder and holder.get("run") != _own()["run"] and _is_locked(path):
        raise _refusal(folder, holder)


def _is_locked(path: Path) -> bool:
    try:
        with path.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _own() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": " ".join(["msattn", *sys.argv[1:2]]),
        "since": datetime.now().isoformat(sep=" ", timespec="minutes"),
        "run": ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")),
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):  # its holder has just created or removed it
        return {}
    return content if isinstance(content, dict) else {}


def _refusal(folder: Path, holder: dict[str, Any]) -> UserError:
    who = f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'an unknown host')}"
    since = f", {holder['command']} since {holder['since']}" if {"command", "since"} <= holder.keys() else ""
    return UserError(f"{folder}: another run writes there ({who}{since}); wait for it, or choose another name=")
