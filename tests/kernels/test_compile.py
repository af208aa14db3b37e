"""Compilation of every kernel for the supported GPUs, within their shared memory; no GPU is needed.

Triton's interpreter accepts code that its compiler rejects (short dots, ``break``, layouts that do
not fit). Each operation's launcher therefore runs in a process without the interpreter, on CPU
tensors, with a driver that compiles kernels and does not launch them.

The cases of a function hold the call of its launcher with small CPU tensors of a given dtype and
head size. Compilation is slow: each kernel compiles at one shape for a GPU, and the variants of an
operation are distributed over the GPUs. Further shapes (heads of 64, of 256 and 512 for the most
shared memory, and fp32) compile with the GPU tests. Triton caches what it compiled by source, so
that an unchanged kernel is not compiled again.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

from tests.house.modules import ROOT

SHARED_MEMORY = {80: 166_912, 90: 232_448}  # maximum bytes per block, by compute capability
HEADS = {80: (("bfloat16", 128),), 90: (("float16", 128),)}
FURTHER_HEADS = {
    80: (("bfloat16", 256), ("bfloat16", 512)),
    90: (("float32", 64), ("float32", 256), ("float16", 64), ("bfloat16", 512)),
}
PARTS = 3  # processes
Heads = dict[int, tuple[tuple[str, int], ...]]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_compiles(part: int) -> None:
    check_compiles(part, HEADS)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_further_shapes_compile(part: int) -> None:
    check_compiles(part, FURTHER_HEADS)


def check_compiles(part: int, heads: Heads) -> None:
    """Compiles some of the operations in one process, because a process takes long to start."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    from tests.kernels.cases.every import CASES

    operations = [name for name, cases in CASES.items() if cases.launch is not None][part::PARTS]
    command = [
        sys.executable,
        "-m",
        "tests.kernels.test_compile",
        "further" if heads is FURTHER_HEADS else "first",
        *operations,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    compiled = [f"{operation} sm_{sm}: kernel" for operation in operations for sm in heads]
    assert all(each in done.stdout for each in compiled)


class CompileOnly:
    """Triton driver that compiles for absent GPUs and launches nothing.

    The device number is the compute capability.
    """

    def __init__(self) -> None:
        self.operation = ""
        self.sm = 0
        self.utils = self

    def get_current_device(self) -> int:
        return self.sm

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.sm, 32)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[device]}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int):
        print(f"{self.operation} sm_{device}: kernel {name}, {shared} bytes of shared memory")
        return None, None, 0, 0, 1024

    def launcher_cls(self, source, metadata):
        return lambda *args: None


def compile_operations(heads: Heads, operations: Sequence[str]) -> None:
    """Compiles the operations for each GPU, dtype and head size."""
    import triton

    from msattn.kernels.common import primitives

    driver = CompileOnly()
    triton.runtime.driver.set_active(driver)  # type: ignore[arg-type]
    # before other modules import it
    primitives.capability = lambda device: driver.sm  # type: ignore[assignment]
    from tests.kernels.cases.every import CASES

    for driver.operation, driver.sm in itertools.product(operations, heads):
        launch = CASES[driver.operation].launch
        assert launch is not None
        for dtype, head_size in heads[driver.sm]:
            print(f"{driver.operation} sm_{driver.sm}: {dtype}, heads of {head_size}")
            launch(DTYPES[dtype], head_size, driver.sm)


if __name__ == "__main__":
    compile_operations(FURTHER_HEADS if sys.argv[1] == "further" else HEADS, sys.argv[2:])
