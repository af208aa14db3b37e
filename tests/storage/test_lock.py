"""Locks of folders: across forks and kills, and on file systems whose locks fail."""

import errno
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from filelock import UnixFileLock

from msattn.trainer.errors import UserError
from msattn.trainer.storage import lock
from msattn.trainer.storage.lock import locked


def failing(monkeypatch: pytest.MonkeyPatch, code: int, times: int) -> None:
    """Lets the first ``times`` attempts to lock a file fail."""
    errors, acquire = iter([OSError(code, os.strerror(code))] * times), UnixFileLock._acquire

    def fail(self: UnixFileLock) -> None:
        for error in errors:
            raise error
        acquire(self)

    monkeypatch.setattr(UnixFileLock, "_acquire", fail)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_missing_locks_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    failing(monkeypatch, code, 1)
    with locked(tmp_path / "gate"):
        assert "the file system has no locks" in capfd.readouterr().err


def test_a_stale_file_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        failing(patch, errno.ESTALE, 1)
        with locked(tmp_path / "gate"):
            assert (tmp_path / ".gate.lock").exists()
    failing(monkeypatch, errno.ESTALE, 2)
    with (
        pytest.raises(UserError, match=r"not writable \(\.gate\.lock: Stale file handle"),
        locked(tmp_path / "gate"),
    ):
        pytest.fail("the block must not run")


def test_a_data_worker_does_not_keep_the_lock_of_a_killed_process(tmp_path: Path) -> None:
    """Versions of filelock before 4 leave it with each forked process."""
    reader, writer = os.pipe()
    if not (holder := os.fork()):
        with locked(tmp_path / "gate"):
            if worker := os.fork():
                os.write(writer, str(worker).encode())
            time.sleep(60)
            os._exit(0)
    worker = int(os.read(reader, 20))
    try:
        refused = pytest.raises(
            UserError, match=rf"another run writes there \(process {holder} on .*; wait for it"
        )
        with refused, locked(tmp_path / "gate"):
            pytest.fail("the block must not run")
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        with locked(tmp_path / "gate"), locked(tmp_path / "gate"):
            os.kill(worker, 0)  # it lives
    finally:
        for process in (holder, worker):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    assert not (tmp_path / ".gate.lock").exists()


def test_another_thread_is_refused(tmp_path: Path) -> None:
    def enter() -> None:
        with locked(tmp_path / "gate"):
            pass

    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path / "gate"), pytest.raises(UserError, match=f"process {os.getpid()} "):
            pool.submit(enter).result()
        pool.submit(enter).result()


def test_ranks_of_one_run_share_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locked(tmp_path / "gate"):
        monkeypatch.setenv("RANK", "1")
        with locked(tmp_path / "gate"):
            pass
    holder = lock._own() | {"run": "another"}
    (tmp_path / ".gate.lock").write_text(json.dumps(holder))
    with locked(tmp_path / "gate"):  # a file without a lock is of a process that ended
        pass
    monkeypatch.setattr(lock, "_is_locked", lambda path: True)
    with pytest.raises(UserError, match="another run writes there"), locked(tmp_path / "gate"):
        pass
