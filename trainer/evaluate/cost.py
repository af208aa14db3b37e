"""What a piece of work cost: wall-clock seconds and peak memory."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclass
class Cost:
    """``seconds`` of wall-clock time; ``peak_mb``: peak of CUDA's allocations, or of the process' resident memory, MiB."""

    seconds: float = 0.0
    peak_mb: float = 0.0


@contextmanager
def cost(device: torch.device) -> Iterator[Cost]:
    """Measure the block; what was queued on the device before it does not count, what it queues does."""
    measured = Cost()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _reset_peak()
    begin = time.perf_counter()
    yield measured
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    measured.seconds = time.perf_counter() - begin
    measured.peak_mb = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else _peak()


def _reset_peak() -> None:
    if _RESET.exists():
        _RESET.write_text("5")  # Linux: forget the high-water mark of resident memory (man 5 proc)


def _peak() -> float:
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    unit = 2**20 if sys.platform == "darwin" else 2**10  # elsewhere: the peak of the whole process, as the system keeps it
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
