"""Seconds that named parts of a run take, measured without making the device wait."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class PhaseTimer:
    """Adds up the time of each part: by CUDA events on a GPU, by the clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Count what runs within as a part of that name."""
        begin = self._now()
        yield
        self._marks.setdefault(part, []).append((begin, self._now()))

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, part: str) -> float | None:
        """Of all spans of ``part`` together, which waits for the device; None when there was none."""
        marks = self._marks.get(part)
        if marks is None:
            return None
        if self.device.type != "cuda":
            return sum(end - begin for begin, end in marks)
        torch.cuda.synchronize(self.device)
        return sum(begin.elapsed_time(end) for begin, end in marks) / 1e3
