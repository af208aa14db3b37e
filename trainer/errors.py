"""Exception classes with one-line messages, and functions that report them and end the process."""

import errno
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from msattn.trainer.ranks import num_ranks

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(ValueError):
    """An error that the user can correct. The message names the argument, its value and the
    accepted values. Exit code 2.
    """


class Fault(RuntimeError):
    """A failure that the user did not cause, reported in one line. Exit code 1 on the command
    line.
    """


class CheckFailed(Fault):
    """An operation disagrees with its reference."""


class RankLost(Fault):
    """Another rank of the run ended, so the remaining ranks cannot continue."""


class OutputClosed(Fault):
    """The reader of standard output has ended, as in ``msattn help | head -1``. Exit code 1 without
    a line.
    """


class TrainingDiverged(RuntimeError):
    """A loss, gradient or weight is not finite. The message names it and the last complete
    checkpoint.
    """


class ModelWarning(UserWarning):
    """A warning about a model and its artifacts; one line on the command line."""


class Terminated(KeyboardInterrupt):
    """SIGTERM was received. It stops a run as Ctrl-C does, with exit code 143 instead of 130."""


def first_line(error: BaseException) -> str:
    """Returns the first line of the message without a final period or colon, or the exception's
    class name.
    """
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" .:") if lines else type(error).__name__


@contextmanager
def library_errors(where: str) -> Iterator[None]:
    """Raises UserError, ``where`` with the reason in parentheses, for any exception of a library
    that reads a file of the user: libraries raise many kinds.
    """
    try:
        yield
    except Exception as error:
        raise UserError(f"{where} ({first_line(error)})") from error


def write_error(
    path: Path, error: BaseException, kept: str = "", *, resumes: bool = True
) -> UserError:
    """Returns a one-line error for a failed write to ``path``; ``resumes``: ``resume=true``
    continues the run.

    ``kept`` is a clause that names the checkpoint a later run can resume from, or "".
    """
    # PyTorch's writer reports a position in the file but no reason.
    reason = (
        "the write failed"
        if isinstance(error, RuntimeError)
        else getattr(error, "strerror", None) or first_line(error)
    )
    facts = "; ".join(
        filter(None, (f"{path} cannot be written ({reason})", free_space(path), kept))
    )
    if getattr(error, "errno", None) in (None, *NO_SPACE):
        return UserError(
            f"{facts}. Free some disk space, then "
            f"{'resume=true continues the run' if resumes else 'run again'}"
        )
    return UserError(f"{facts}; resume=true continues the run" if resumes else facts)


def disk_error(error: Exception, folder: Path, *, resumes: bool) -> UserError | OutputClosed | None:
    """Returns a one-line error for an OSError of a full or failing disk or of standard output; None
    for other errors.
    """
    if not isinstance(error, OSError):
        return None
    if (found := output_error(failed=error.filename is None)) is not None:
        return found
    path = Path(error.filename) if isinstance(error.filename, str) else folder
    if error.errno in (*NO_SPACE, errno.EROFS):
        return write_error(path, error, resumes=resumes)
    if error.errno in (errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM):
        return UserError(f"{path}: {error.strerror}; {free_space(path)}")
    return None


def output_error(failed: bool = False) -> UserError | OutputClosed | None:
    """Returns an error if standard output cannot be written. After a write that ``failed``, which
    may have left nothing in the buffer, an empty line is tried.
    """
    try:
        if failed:
            sys.stdout.write("\n")
        sys.stdout.flush()
    except BrokenPipeError:
        return OutputClosed()
    except OSError as error:
        return UserError(f"standard output cannot be written ({error.strerror})")
    return None


@contextmanager
def named_output_errors() -> Iterator[None]:
    """Raises UserError or OutputClosed if standard output cannot be written."""
    try:
        yield
    except OSError as error:
        if (found := output_error(failed=error.filename is None)) is None:
            raise
        raise found from error
    if (found := output_error()) is not None:
        raise found


def check_working_directory() -> None:
    """Raises UserError if the working directory was deleted: paths mean nothing there, and
    libraries fail or abort.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(
            f"the working directory cannot be used ({error.strerror}); change to one that exists"
        ) from error


def free_space(path: Path) -> str:
    """Returns a clause that tells the free space of the disk of ``path``, which need not exist."""
    folder = next(
        (each for each in (path, *path.parents) if os.path.isdir(each)), Path(path.anchor or ".")
    )
    return f"{shutil.disk_usage(folder).free / 1e9:.1f} GB are free in {folder}"


def print_once(line: str) -> None:
    """Prints ``msattn: line`` on stderr, from only one of the processes of a ``torchrun`` that
    print the same line.
    """
    if num_ranks() == 1 or _first_to_print(line):
        with suppress(OSError):  # stderr is closed or full
            # in one call, so that lines of several processes do not interleave
            sys.stderr.write(f"msattn: {line}\n")
            sys.stderr.flush()


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Prints every :class:`ModelWarning` as a line, without the place in the code."""
    show = warnings.showwarning

    def show_line(message: Any, category: Any, *others: Any, **options: Any) -> None:
        if issubclass(category, ModelWarning):
            print_once(f"warning: {message}")
        else:
            show(message, category, *others, **options)

    with warnings.catch_warnings():
        warnings.showwarning = show_line
        yield


@contextmanager
def only_errors(logger: str) -> Iterator[None]:
    """Silences what a library's logger says below errors, inside the context."""
    of_library = logging.getLogger(logger)
    before = of_library.level
    of_library.setLevel(logging.ERROR)
    try:
        yield
    finally:
        of_library.setLevel(before)


def exit_process(code: int) -> NoReturn:
    """Ends the process with ``code``; under ``torchrun`` at once, as open connections may abort
    Python's shutdown.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the interpreter would try again and report it
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if num_ranks() > 1:
        os._exit(code)
    sys.exit(code)


def report_error(error: BaseException) -> int:
    """Prints the line of an error of this module or of a KeyboardInterrupt, and returns the exit
    code of the process.

    Notes of the exception, such as the traceback of another process, follow the line.
    """
    line, stopped = " ".join(str(error).split()), isinstance(error, KeyboardInterrupt)
    if stopped:
        line = f"interrupted: {line}" if line else "interrupted"
    if line:
        print_once("\n".join([line, *getattr(error, "__notes__", [])]))
    if stopped:
        return 143 if isinstance(error, Terminated) else 130
    return 1 if isinstance(error, Fault) else 2


def run_program(program: Callable[[], int | None]) -> NoReturn:
    """Runs ``program`` and ends the process with the exit code that it returns, where None is 0, or
    with that of its error.

    Programs of ``python -m`` thus have the exit codes of ``msattn``: 1 fault, 2 user error, 130
    interrupted, 143 terminated.
    """
    try:
        with named_output_errors():
            check_working_directory()
            code = program() or 0
    except (UserError, Fault, TrainingDiverged, KeyboardInterrupt) as error:
        code = report_error(error)
    exit_process(code)


def _first_to_print(line: str) -> bool:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # without torchrun's agent, the store may have ended with the rank that hosted it
        return True
    from torch.distributed import DistError, TCPStore

    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))
        return (
            store.add(f"msattn/printed/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{line}", 1)
            == 1
        )
    except DistError:
        return True
