"""Atomic replacement of result files and folders."""

import csv
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from msattn.trainer.errors import UserError, write_error

Row = TypeVar("Row")


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yields a path to write to, which replaces ``path`` when the block ends.

    Readers see the old file or the new one, never a partial one. If the body fails, ``path`` is
    unchanged. The caller holds the lock of ``path`` (:func:`msattn.trainer.storage.lock.locked`).
    """
    new = _sibling(path, "new")  # overwritten if a killed process left one
    try:
        yield new
        sync_file(new)
        os.replace(new, path)
        sync_folder(path.parent)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replaces a whole CSV file, since later rows may have additional columns. The columns are the
    keys of all rows.
    """
    try:
        with replace_file(path) as new, new.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise write_error(path, error, resumes=False) from error


def written_rows(
    rows: Iterable[Row], path: Path, record: Callable[[Row], Mapping[str, Any]]
) -> Iterator[Row]:
    """Yields ``rows`` as they are measured and writes all rows so far to ``path``, which
    KeyboardInterrupt names.
    """
    written: list[Mapping[str, Any]] = []
    try:
        for row in rows:
            written.append(record(row))
            write_table(path, written)
            yield row
    except KeyboardInterrupt as stop:
        raise type(stop)(*([f"{len(written)} rows are in {path}"] if written else [])) from stop


@contextmanager
def replace_folder(
    folder: Path, *, keep: Callable[[Path], Path] | None = None, resumes: bool = True
) -> Iterator[Path]:
    """Yields a temporary sibling folder, which is synced to disk and replaces ``folder`` when the
    block ends.

    After a kill or an error ``folder`` is the old folder or the complete new one; the next run
    removes leftovers next to it. The caller holds the lock of ``folder``
    (:func:`msattn.trainer.storage.lock.locked`). ``keep`` returns the path to which the old folder
    is renamed; None deletes it. ``resumes`` means that ``resume=true`` continues the run, for the
    error message.
    """
    check_no_link(folder)
    new = _sibling(folder, "new")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        clean_up(folder, keep=keep)
        new.mkdir()
        yield new
        sync_tree(new)
        if folder.exists():
            _replace(folder, new, _sibling(folder, "old"))
        else:
            new.rename(folder)
        sync_folder(folder.parent)
        clean_up(folder, keep=keep)
    except BaseException as error:
        # Built before the removal, so that the message reports the free space that the write found.
        failure = (
            write_error(folder, error, resumes=resumes)
            if isinstance(error, OSError | SafetensorError)
            else None
        )
        with suppress(OSError):  # the disk may fail again; the next run cleans up
            clean_up(folder, keep=keep)
        if failure is not None:
            raise failure from error
        raise


def clean_up(folder: Path, *, keep: Callable[[Path], Path] | None = None) -> None:
    """Removes leftovers of a killed process next to ``folder``: an unfinished folder, and the old
    one (see ``keep``).
    """
    check_no_link(folder)
    new, old = _sibling(folder, "new"), _sibling(folder, "old")
    _remove(new)
    if os.path.lexists(old):
        if not os.path.isdir(old):  # not of a writer, which would leave a folder
            _remove(old)
        elif not folder.exists():  # killed between two renames
            old.rename(folder)
        elif keep is not None:
            old.rename(keep(old))
        else:
            old.rename(new)  # first, so that a partly removed folder is never taken for the old one
            _remove(new)


def check_no_link(folder: Path) -> None:
    """Raises UserError if ``folder`` is a symbolic link, since a rename would replace the link
    and not its target.
    """
    if os.path.islink(folder):
        raise UserError(
            f"{folder}: a symbolic link, which is not overwritten; remove it, or link the folder "
            f"above it"
        )


def _remove(path: Path) -> None:
    """Deletes a folder as far as possible; a link or a file is unlinked."""
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def current_folder(folder: Path) -> Path:
    """Returns ``folder``, or the old folder next to it between the two renames of a replacement."""
    old = _sibling(folder, "old")
    return old if os.path.isdir(old) and not os.path.exists(folder) else folder


def _sibling(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}.{suffix}")


def _replace(folder: Path, new: Path, old: Path) -> None:
    """Renames ``folder`` to ``old`` and then ``new`` to ``folder``."""
    folder.rename(old)  # readers use `old` until the next line, see current_folder
    try:
        new.rename(folder)
    except OSError:
        old.rename(folder)
        raise


def sync_tree(folder: Path) -> None:
    """Waits until all files and folders below ``folder`` are on the disk."""
    for path in folder.rglob("*"):
        sync_folder(path) if path.is_dir() else sync_file(path)
    sync_folder(folder)


def sync_file(path: Path) -> None:
    """Waits until the content of a file is on the disk; some full disks report an error only
    then.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Waits until the names of the files in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
