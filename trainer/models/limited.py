"""Calls in a child process with limits of time and memory: the first use of a tokenizer."""

import faulthandler
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import psutil

from msattn.trainer.errors import UserError, first_line

SECONDS = 20  # seconds of computing
WAIT = 120  # seconds for an answer, on a machine that is busy
BYTES = 2 * 2**30
Result = TypeVar("Result")


def limited(call: Callable[[], Result], where: str) -> Result:
    """Returns ``call()``, computed in a forked copy of this process. The result is pickled; other
    effects are lost.

    Libraries raise many kinds of errors for damaged files, or abort the process. Here each of them
    becomes a UserError, ``where`` with the reason in parentheses. So does exceeding
    :data:`SECONDS`, :data:`WAIT` or :data:`BYTES`.
    """
    forks = multiprocessing.get_context("fork")
    receiver, sender = forks.Pipe(duplex=False)
    copy = forks.Process(target=_answer, args=(call, sender), daemon=True)
    copy.start()
    result, reason = None, None
    try:
        sender.close()
        with receiver, suppress(EOFError):  # the end of the copy, without an answer
            if receiver.poll(WAIT):
                result, reason = receiver.recv()
            else:
                copy.kill()
                reason = f"no answer after {WAIT} s"
        copy.join()
    finally:  # a signal has raised an exception here: the copy would delay the end of this process
        copy.kill()
        copy.join()
    if copy.exitcode == -signal.SIGXCPU:
        reason = f"it takes more than {SECONDS} s"
    elif copy.exitcode and reason is None:
        reason = f"it ended early; it may take {BYTES / 2**30:g} GiB of memory"
    if reason is not None:
        raise UserError(f"{where} ({reason})")
    return result  # pyrefly: ignore[bad-return]


def _answer(call: Callable[[], Any], sender: Connection) -> None:
    """Sends the result of ``call``, or the reason why there is none."""
    faulthandler.disable()
    # on many cores the threads of a tokenizer reserve more memory than the limit
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries written in Rust print a backtrace
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    memory = psutil.Process().memory_info().vms + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        answer = call(), None
    except MemoryError:
        answer = None, f"it takes more than {BYTES / 2**30:g} GiB of memory"
    except BaseException as error:  # the panics of Rust too
        answer = None, first_line(error)
    sender.send(answer)
