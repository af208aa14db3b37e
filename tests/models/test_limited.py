"""Calls in a copy of the process, which ends with it."""

import signal
import time

import psutil
import pytest

from msattn.trainer.errors import Terminated, UserError
from msattn.trainer.models.limited import limited


def test_sigterm_ends_the_copy_at_once() -> None:
    def terminate(*_: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGALRM, terminate)  # as SIGTERM's handler, without an outer one of pytest
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    others = psutil.Process().children()  # such as workers of torch.compile, which other tests left
    start = time.monotonic()
    try:
        with pytest.raises(Terminated):
            limited(lambda: time.sleep(30), "model")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < 5
    assert set(psutil.Process().children()) <= set(others)


def test_answers_and_errors_come_back() -> None:
    assert limited(lambda: [1, 2], "model") == [1, 2]
    with pytest.raises(UserError, match=r"model \(invalid literal.*\)"):
        limited(lambda: int("x"), "model")
