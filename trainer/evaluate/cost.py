"""Wall-clock seconds and peak memory of a block of code."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclass
class Cost:
    """Wall-clock ``seconds``, and ``peak_mb``: peak MiB of CUDA allocations, or of the process's resident memory on a CPU."""

    seconds: float = 0.0
    peak_mb: float = 0.0


@contextmanager
def cost(device: torch.device) -> Iterator[Cost]:
    """Measures the body, including the device work that it launches and excluding work launched before."""
    measured = Cost()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _reset_peak_resident()
    begin = time.perf_counter()
    yield measured
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    measured.seconds = time.perf_counter() - begin
    measured.peak_mb = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else _peak_resident_mb()


def _reset_peak_resident() -> None:
    if CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")  # Linux: resets the peak of resident memory (man 5 proc)


def _peak_resident_mb() -> float:
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    unit = 2**20 if sys.platform == "darwin" else 2**10  # elsewhere: the peak since the process started
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
