"""Time and memory of a call, on a GPU or a CPU."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import NamedTuple

import torch

Call = Callable[[], object]
HEAD_START = 2_000_000  # clock cycles that a GPU idles before a call is timed: about as long as Python takes to launch it


class Milliseconds(NamedTuple):
    """Median and quartiles of the time of a call."""

    median: float
    q1: float
    q3: float


def time_ms(call: Call, device: str, repeats: int = 20, budget_s: float = 5.0, least: int = 5) -> Milliseconds:
    """Time a call by itself, warm: CUDA events on a GPU, else the clock. ``least`` repeats or more, but few long ones."""
    call()
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    repeats = max(least, min(repeats, int(budget_s / max(time.perf_counter() - start, 1e-9))))
    times = [_time_once(call, device) for _ in range(repeats)]
    q1, median, q3 = statistics.quantiles(times, n=4)
    return Milliseconds(median, q1, q3)


def _time_once(call: Call, device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(HEAD_START)  # the launch overlaps with this, so that only the device's time counts
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def peak_memory_gb(call: Call, device: str) -> float | None:
    """Device memory that one call takes at its peak, its result included; None on a CPU, where PyTorch keeps no count."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


@contextmanager
def compile_seconds() -> Iterator[list[float]]:
    """Seconds of each compilation of a Triton kernel meanwhile, as on a machine whose cache on disk is empty."""
    taken: list[float] = []
    if find_spec("triton") is None:
        yield taken
        return
    from triton import knobs

    def note(*, times: knobs.CompileTimes, **others: object) -> None:  # Triton says more about a compilation
        taken.append(times.total / 1e6)

    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        knobs.compilation.listener = note
        yield taken


def graphed(call: Call, device: str) -> Call:
    """The call as a CUDA graph, which leaves out what Python and the launches take; the call itself on a CPU."""
    if device == "cpu":
        return call
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
