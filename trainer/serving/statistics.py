"""Counts and means of what an attached model reads."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock, local
from typing import Any

import torch
from torch import Tensor

from msattn.trainer.methods.blocks import RowCandidates, sparsity
from msattn.trainer.models.timing import PhaseTimer

Name = str | int  # a layer's number is the name of its sparsity
VISIBLE, READ_DENSELY = "visible keys", "keys read in dense passes"  # of decoded tokens


class SparseStats(dict[str, Any]):
    """The dict of :meth:`msattn.trainer.serving.attend.Sparse.stats`, which prints in one line what
    was measured or counted.
    """

    def __repr__(self) -> str:
        shown = [f"{name} {text}" for name, value in self.items() if (text := _shown(value))]
        return ", ".join(shown) or "no pass was counted"


def _shown(value: Any) -> str:
    """Returns a value in a few digits, or the range of several values. The text is empty for None,
    for a count of 0, and if the values are equal.
    """
    if isinstance(value, dict):
        low, high = (f"{each(value.values()):.3g}" for each in (min, max))
        return "" if low == high else f"{low} to {high}"
    return f"{value:.3g}" if isinstance(value, float) else str(value or "")


class Statistics:
    """Means of named values, which several threads may add, without synchronizing with the device
    before :meth:`mean`.

    Keys that decoding reads are counted separately, because kernels count them in CUDA graphs: see
    :meth:`key_counts`. For each token a key/value head is read ``reads_per_head`` times: once, or
    once per query head if these choose separately. With a ``timer``, the time of each phase is also
    measured.
    """

    def __init__(self, timer: PhaseTimer | None = None, reads_per_head: int = 1) -> None:
        self.timer, self._reads_per_head = timer, reads_per_head
        self._counts: Counter[Name] = Counter()
        self._recorded = local()  # has counts in a thread that records its own
        # sums of values: fp64 scalars at fixed addresses
        self._totals: dict[tuple[Name, torch.device], Tensor] = {}
        self._key_counts: dict[tuple[Any, ...], Tensor] = {}
        # visible and densely read ones, as far as the host knows their number
        self._keys: Counter[Name] = Counter()
        self._lock = Lock()

    def add(self, name: Name, values: Tensor) -> None:
        """Adds the mean of a tensor to the values of ``name``."""
        with self._lock:
            self._counter[name] += 1
            total = self._total(name, values.device)
            total += values.detach().mean(dtype=torch.float64)

    def _total(self, name: Name, device: torch.device) -> Tensor:
        if (name, device) not in self._totals:
            with torch.inference_mode(False):
                self._totals[name, device] = torch.zeros((), dtype=torch.float64, device=device)
        return self._totals[name, device]

    def add_dense(self, layer: int, reason: str | None) -> None:
        """Counts a pass that read all blocks in a layer, also under the name ``reason``; None:
        there is no selection.
        """
        if reason is not None:
            self.count(layer)
            self.count(reason)

    def add_selected(self, layer: int, selected: Tensor, candidates: RowCandidates) -> None:
        """Adds the share of the blocks that a pass did not read in a layer."""
        with self._lock:
            self._counter[layer] += 1
            sparsity(selected, candidates, self._total(layer, selected.device))

    def sparsity(self) -> tuple[float | None, dict[int, float] | None]:
        """Returns the mean over layers and passes, and that of each layer by its number; None
        without such passes.
        """
        with self._lock:
            layers = sorted(name for name in self._counts if isinstance(name, int))
            totals = [(layer, self._sum(layer), self._counts[layer]) for layer in layers]
        if not totals:
            return None, None
        total = sum(value for _, value, _ in totals) / sum(count for *_, count in totals)
        return total, {layer: value / count for layer, value, count in totals}

    def count(self, name: Name, times: int = 1) -> None:
        """Counts ``name`` that many times."""
        with self._lock:
            self._counter[name] += times

    def mean(self, name: str) -> float | None:
        """Returns the mean of the values of ``name``, or None if there are none."""
        with self._lock:
            count = self._counts[name]
            return self._sum(name) / count if count else None

    def _sum(self, name: Name) -> float:
        return sum(float(total) for (own, _), total in self._totals.items() if own == name)

    @property
    def counts(self) -> Counter[Name]:
        """The number of times that each name was added or counted."""
        with self._lock:
            return self._counts.copy()

    @property
    def _counter(self) -> Counter[Name]:
        """The counter that the current thread adds to."""
        return vars(self._recorded).get("counts", self._counts)

    @contextmanager
    def recorded(self) -> Iterator[Counter[Name]]:
        """Redirects the counts of the current thread to the counter it yields, while a CUDA graph
        is captured.

        A replay updates counters on the device; :meth:`count_again` adds the others.
        """
        self._recorded.counts = counts = Counter()
        try:
            yield counts
        finally:
            del self._recorded.counts

    def count_again(self, counts: Counter[Name]) -> None:
        """Adds the counts that were :meth:`recorded`."""
        with self._lock:
            self._counts += counts

    def key_counts(self, batch: int, kv_heads: int, device: torch.device) -> Tensor:
        """Returns the counter of the keys that are read: int64 ``[B, Hkv]``, at a fixed address."""
        kind = (device, batch, kv_heads)
        with self._lock:
            if kind not in self._key_counts:
                with torch.inference_mode(False):
                    self._key_counts[kind] = torch.zeros(
                        batch, kv_heads, dtype=torch.int64, device=device
                    )
            return self._key_counts[kind]

    def add_visible(self, keys: Tensor | int, *, all_read: bool = False) -> None:
        """Adds a number of keys that were visible to decoded tokens; ``all_read`` in a dense pass.

        Numbers on a device are added in place, so that a CUDA graph may add them.
        """
        with self._lock:
            for name in (VISIBLE, READ_DENSELY) if all_read else (VISIBLE,):
                if isinstance(keys, Tensor):
                    total = self._total(name, keys.device)
                    total += keys * self._reads_per_head
                else:
                    self._keys[name] += keys * self._reads_per_head

    def share_of_keys(self) -> float | None:
        """Returns the keys that decoding read over the visible ones, or None if there are none."""
        with self._lock:
            visible, read = (self._sum(name) + self._keys[name] for name in (VISIBLE, READ_DENSELY))
            read += sum(int(counts.sum()) for counts in self._key_counts.values())
        return read / visible if visible else None

    def clear(self) -> None:
        """Forgets all counts and means."""
        with self._lock:
            self._restore(Counter(), Counter(), {})

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Ignores everything in the block, such as passes that only compile kernels and capture
        graphs.
        """
        with self._lock:
            self._synchronize()
            on_device = {id(x): x.clone() for x in self._tensors()}
            counts = self._counts.copy(), self._keys.copy()
        try:
            yield
        finally:
            with self._lock:
                self._restore(*counts, on_device)

    def _restore(
        self, counts: Counter[Name], keys: Counter[Name], on_device: dict[int, Tensor]
    ) -> None:
        """Sets all counters; those on a device in place, since graphs hold their addresses, and to
        0 if they are new.
        """
        self._counts, self._keys = counts, keys
        self._synchronize()
        for x in self._tensors():
            x.copy_(on_device.get(id(x), torch.zeros_like(x)))
        self._synchronize()

    def _synchronize(self) -> None:
        """Waits for the streams that update counters on a device."""
        for device in {x.device for x in self._tensors() if x.is_cuda}:
            torch.cuda.synchronize(device)

    def _tensors(self) -> list[Tensor]:
        return [*self._key_counts.values(), *self._totals.values()]

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Adds the time of the block to ``phase``, if there is a timer."""
        return nullcontext() if self.timer is None else self.timer.measure(phase)

    def seconds(self, phase: str) -> float | None:
        """Returns the total seconds of ``phase``; None without a timer, or if there was no such
        phase.
        """
        return None if self.timer is None else self.timer.seconds(phase)
