"""Timing of the phases of a run without device synchronization, and of the tokens of ``generate``."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer


class TokenClock(BaseStreamer):
    """Records when ``generate`` hands over the prompt and each new token, for batches too.

    Attributes
    ----------
    times : seconds of the host's clock, of the prompt first.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Records the time; the first call is for the prompt."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Does nothing."""


class PhaseTimer:
    """Accumulates the time of each phase, with CUDA events on a GPU and the host clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._intervals: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Adds the time of the block to ``phase``."""
        begin = self._now()
        yield
        self._intervals.setdefault(phase, []).append((begin, self._now()))

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, phase: str) -> float | None:
        """Returns the total seconds of ``phase``, or None if it never ran. Synchronizes with the device."""
        intervals = self._intervals.get(phase)
        if intervals is None:
            return None
        if self.device.type != "cuda":
            return sum(end - begin for begin, end in intervals)
        torch.cuda.synchronize(self.device)
        return sum(begin.elapsed_time(end) for begin, end in intervals) / 1e3
