"""Free memory within the limits of a container, from files as the kernel writes them."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from msattn.trainer import memory


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of control groups on a machine with 10,000 free bytes."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    monkeypatch.setattr(memory, "GROUPS", tmp_path)
    monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "cgroup")
    return tmp_path


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_the_smallest_limit_of_the_groups_counts(groups: Path) -> None:
    assert memory.free_memory() == 10_000  # no control groups
    (groups / "cgroup").write_text("0::/pod/job\n")
    write(
        groups / "pod/job", memory__max="max", memory__current=300, memory__stat="inactive_file 0"
    )
    assert memory.free_memory() == 10_000
    write(
        groups / "pod",
        memory__max=5000,
        memory__current=4000,
        memory__stat="anon 3800\ninactive_file 200",
    )
    assert memory.free_memory() == 5000 - 4000 + 200
    write(groups / "pod/job", memory__max=1000, memory__current=1100)
    assert memory.free_memory() == 0


def test_version_1_and_paths_outside_the_container(groups: Path) -> None:
    (groups / "cgroup").write_text("4:cpu,memory:/docker/abc\n1:name=systemd:/\n")
    limits = {
        "memory__limit_in_bytes": 2000,
        "memory__usage_in_bytes": 500,
        "memory__stat": "total_inactive_file 100",
    }
    write(groups / "memory", **limits)
    assert memory.free_memory() == 1600
    write(groups / "memory", memory__limit_in_bytes=2**63 - 4096)  # no limit
    assert memory.free_memory() == 10_000
