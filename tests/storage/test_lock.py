"""Locks of folders: across forks and kills, and on file systems whose locks fail."""

import errno
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from filelock import UnixFileLock

from msattn.trainer.errors import UserError
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
