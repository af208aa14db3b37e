"""Calls in a copy of the process, which ends with it."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from msattn.trainer.errors import Terminated, UserError
from msattn.trainer.models.limited import limited


def test_sigterm_ends_the_copy_at_once() -> None:
    def terminate(*_: object) -> None:
        raise Terminated

    # as SIGTERM's handler, without an outer one of pytest
    before = signal.signal(signal.SIGALRM, terminate)
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


MANY_THREADS = """
from msattn import EMBEDDED as MODEL
from msattn.trainer.models.limited import limited
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file(f"{MODEL}/tokenizer.json")
print(limited(lambda: len(tokenizer.encode_batch(["text"] * 50)), "model"))
"""


def test_a_tokenizer_of_many_threads_fits_the_limit() -> None:
    """Each thread reserves memory, so that on machines with many cores the limit was exceeded."""
    environment = os.environ | {"RAYON_NUM_THREADS": "2000", "TOKENIZERS_PARALLELISM": "true"}
    done = subprocess.run(
        [sys.executable, "-c", MANY_THREADS],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.stdout.strip() == "50", done.stderr
