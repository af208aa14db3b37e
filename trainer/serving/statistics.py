"""Counts and means of what an attached model reads."""

from collections import Counter
from threading import Lock

import torch
from torch import Tensor


class Statistics:
    """Means of named values, which several threads may add, without a synchronization with the device before :meth:`mean`."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._sums: dict[str, Tensor | float] = {}
        self._lock = Lock()

    def add(self, name: str, value: Tensor | float = 1.0) -> None:
        """Adds a number, or the mean of a tensor, to the values of ``name``."""
        mean = value.detach().mean(dtype=torch.float64) if isinstance(value, Tensor) else value
        with self._lock:
            self._counts[name] += 1
            total = self._sums.get(name, 0.0)
            if isinstance(total, Tensor) and isinstance(mean, Tensor):
                mean = mean.to(total.device)
            self._sums[name] = total + mean

    def count(self, name: str) -> int:
        """Returns the number of values of ``name``."""
        return self._counts[name]

    def mean(self, name: str) -> float | None:
        """Returns the mean of the values of ``name``, or None if there are none."""
        with self._lock:
            count, total = self._counts[name], self._sums.get(name, 0.0)
        return float(total) / count if count else None
