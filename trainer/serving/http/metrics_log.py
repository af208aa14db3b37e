"""Logging of a server's metrics to a tracker, for servers that no Prometheus reads."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from msattn.trainer.serving.http.metrics import Metrics
from msattn.trainer.training.tracker import Tracker

SECONDS = 10.0  # between two logs
END_SECONDS = 5.0  # for the last one; reading the metrics waits for the model's pass


@contextmanager
def logged(metrics: Metrics, tracker: Tracker | None, seconds: float = SECONDS) -> Iterator[None]:
    """Logs ``metrics`` every ``seconds`` seconds in which they change, and at the end. Does nothing without a tracker."""
    if tracker is None:
        yield
        return
    ended = threading.Event()

    def log_changes(tracker: Tracker) -> None:
        step, last, is_end = 0, {}, False
        while not is_end:
            is_end = ended.wait(seconds)
            if (figures := metrics.figures()) != last:
                tracker.log(figures, step)
                step, last = step + 1, figures

    thread = threading.Thread(target=log_changes, args=(tracker,), name="msattn-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(END_SECONDS)
