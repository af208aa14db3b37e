"""Errors of locks: which stand for a file system without them."""

import errno
import os
from pathlib import Path

import pytest

from msattn.trainer.errors import UserError
from msattn.trainer.storage import lock
from msattn.trainer.storage.lock import locked


def failing(monkeypatch: pytest.MonkeyPatch, code: int, times: int) -> None:
    """Lets the first calls of ``lockf`` fail."""
    errors, lockf = iter([OSError(code, os.strerror(code))] * times), lock.fcntl.lockf

    def fail(*arguments: int) -> None:
        for error in errors:
            raise error
        lockf(*arguments)

    monkeypatch.setattr(lock.fcntl, "lockf", fail)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_missing_locks_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    failing(monkeypatch, code, 1)
    with locked(tmp_path / "gate"):
        assert "the file system has no locks" in capfd.readouterr().err


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EDEADLK])
def test_other_errors_are_tried_again_and_then_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    with monkeypatch.context() as patch:
        failing(patch, code, 1)
        with locked(tmp_path / "gate"):
            assert (tmp_path / ".gate.lock").exists()
    failing(monkeypatch, code, 2)
    with pytest.raises(UserError, match=r"gate: its lock \.gate\.lock cannot be taken"), locked(tmp_path / "gate"):
        pytest.fail("the block must not run")


def test_a_stale_file_is_not_a_missing_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*arguments: object) -> bool:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(lock, "_is_open", stale)
    with pytest.raises(UserError, match="cannot be taken"), locked(tmp_path / "gate"):
        pytest.fail("the block must not run")
