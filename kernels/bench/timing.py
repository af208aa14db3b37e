"""Time, peak memory and compile time of a call, and peak rates, of a GPU or a CPU."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

from msattn.kernels.bench.rows import PeakRates

Call = Callable[[], object]
# GPU clock cycles to idle before a timed call: about as long as Python takes to launch it
SLEEP_CYCLES = 2_000_000


class Milliseconds(NamedTuple):
    """Median and quartiles of the time of a call, in ms."""

    median: float
    q1: float
    q3: float


def time_ms(
    call: Call, device: str, repeats: int = 20, budget_s: float = 5.0, min_repeats: int = 5
) -> Milliseconds:
    """Times a call after a warm-up, by CUDA events on a GPU, by wall clock on a CPU.

    Slow calls are repeated less often, to stay within ``budget_s``, but at least ``min_repeats``
    times.
    """
    call()
    _synchronize(device)
    start = time.perf_counter()
    call()
    _synchronize(device)
    repeats = max(min_repeats, min(repeats, int(budget_s / max(time.perf_counter() - start, 1e-9))))
    times = [_time_once(call, device) for _ in range(repeats)]
    q1, median, q3 = statistics.quantiles(times, n=4)
    return Milliseconds(median, q1, q3)


def _time_once(call: Call, device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # the CPU launches the call during the sleep, so that only GPU time is measured
    torch.cuda._sleep(SLEEP_CYCLES)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def peak_memory_gb(call: Call, device: str) -> float | None:
    """Returns the peak device memory (GB) that one call allocates; None on a CPU.

    The result of the call is included.
    """
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
    """Disables Triton's disk cache and collects the seconds of each compilation."""
    seconds: list[float] = []
    if find_spec("triton") is None:
        yield seconds
        return
    from triton import knobs

    # Triton passes further keyword arguments
    def listen(*, times: knobs.CompileTimes, **others: object) -> None:
        seconds.append(times.total / 1e6)

    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        knobs.compilation.listener = listen
        yield seconds


def graphed(call: Call, device: str) -> Call:
    """Captures the call in a CUDA graph and returns its replay; on a CPU, the call."""
    if device == "cpu":
        return call
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@cache
def ceilings(device: str, dtype: torch.dtype) -> PeakRates:
    """Measures this machine's peak TFLOP/s of a matrix product in ``dtype``, and peak TB/s.

    This takes some seconds; the result is cached. The memory ceiling is the larger bandwidth of a
    copy (which reads and writes) and a sum (which only reads).
    """
    side, size = (1024, 2**26) if device == "cpu" else (8192, 2**31)
    a, b = torch.randn(2, side, side, dtype=dtype, device=device)
    product = time_ms(lambda: a @ b, device, budget_s=1.0)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    copied = time_ms(lambda: target.copy_(source), device, budget_s=1.0)
    read = time_ms(source.sum, device, budget_s=1.0)
    return PeakRates(
        2 * side**3 / product.median / 1e9, max(2 * size / copied.median, size / read.median) / 1e9
    )
