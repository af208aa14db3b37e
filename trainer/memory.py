"""Free memory of the machine or of its container, the peak of this process, and the release of
memory.
"""

import gc
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
STATUS = Path("/proc/self/status")


def free_memory() -> int:
    """Returns the bytes of memory that new data can take, on the machine and within the limits of
    its control groups.
    """
    import psutil

    return max(0, min((psutil.virtual_memory().available, *_left_in_groups())))


def release_memory() -> None:
    """Collects garbage, such as the reference cycles of a Trainer or of CUDA graphs, and empties
    the CUDA cache.
    """
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def peak_memory(device: Any) -> int:
    """Returns the peak bytes of tensors on a GPU, or of the process's resident memory on a CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    for line in lines:
        # in KiB; may be reset, unlike the peak since the process started
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def _left_in_groups() -> Iterator[int]:
    """Yields the bytes left in each control group of this process that has a limit, of version 1 or
    2 (cgroups(7)).
    """
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except (OSError, ValueError):  # not on Linux
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield from _left(GROUPS, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = GROUPS / "memory"
            yield from _left(
                root, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _left(root: Path, path: str, limit: str, usage: str, cached: str) -> Iterator[int]:
    """Yields the bytes left in the group at ``path`` and in those above it. Files in the cache
    count as free.
    """
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        if folder.is_relative_to(root):
            try:
                most, used = (int((folder / name).read_text()) for name in (limit, usage))
                statistics = dict(
                    line.split() for line in (folder / "memory.stat").read_text().splitlines()
                )
                yield most - used + int(statistics.get(cached, 0))
            except (OSError, ValueError):  # no limit ("max"), or a group outside the container
                continue
