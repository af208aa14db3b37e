"""Every kernel compiles to machine code for the GPUs we name, within their shared memory: no GPU needed.

The interpreter lets pass what a compiler refuses (short dots, ``break``, layouts that do not fit), so that each operation's
launcher runs here, in a process without the interpreter, on CPU tensors, with a driver that compiles and launches nothing.

A new operation adds a function to LAUNCHES; it calls the launcher with small CPU tensors of the given dtype and head size.
"""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

SHARED_MEMORY = {80: 166_912, 90: 232_448}  # bytes a block may use, by compute capability
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def _maxpool_attention(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels import maxpool_attention as op
    from msattn.kernels.testing import random_qkv, starts

    q, k, v = random_qkv(1, 4, 2, 200, 200, head_size, dtype)
    tile = _tile("maxpool_attention", dtype, head_size, sm)
    for block_size in _block_sizes(head_size):
        op.launch(q, k, v, starts([8]) if block_size == 128 else None, block_size, True, 0.1, tile)


def _block_sparse_attention(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels import block_sparse_attention as op
    from msattn.kernels.testing import random_block_mask, random_qkv, starts

    q, k, v = random_qkv(1, 4, 2, 200, 200, head_size, dtype)
    tile = _tile("block_sparse_attention", dtype, head_size, sm)
    for block_size in _block_sizes(head_size):
        blocks = -(-200 // block_size)
        mask = random_block_mask(1, 2, blocks, blocks, 0.5)
        op.launch(q, k, v, mask, starts([8]) if block_size == 128 else None, block_size, True, 0.1, tile)


def _bucket_decode(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels import bucket_decode as op
    from msattn.kernels.testing import bucket_index, random_buckets, random_qkv, starts

    q, k, v = random_qkv(2, 4, 2, 1, 200, head_size, dtype)
    offsets, order = bucket_index(random_buckets(2, 2, 200, 8), 8)
    for probes, recent, kv_start, kv_len in ((5, None, None, None), (100, starts([9, 3]), starts([8, 0]), starts([200, 7]))):
        chosen = torch.zeros(2, 2, probes, dtype=torch.int32)
        op.launch(q, k, v, offsets, order, chosen, recent, 16, 1, 0.1, kv_start, kv_len)


def _bucket_mass(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels import bucket_mass as op
    from msattn.kernels.testing import random_qkv

    for num_queries, num_keys, num_buckets, causal, min_distance in ((200, 200, 8, False, None), (1, 3000, 5, True, 3)):
        q, k, _ = random_qkv(1, 4, 2, num_queries, num_keys, head_size, dtype)
        buckets = torch.zeros(1, 2, num_keys, dtype=torch.int32)
        op.launch(q, k, buckets, None, None, num_buckets, causal, 0.1, min_distance)


def _merge_states(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels import merge_states as op

    op.launch(torch.zeros(3, 1, 2, 5, head_size, dtype=dtype), torch.zeros(3, 1, 2, 5))


def _block_sizes(head_size: int) -> tuple[int, ...]:
    return (16, 64, 128) if head_size == 128 else (64,)


def _tile(operation: str, dtype: torch.dtype, head_size: int, sm: int):
    from msattn.kernels import tuned
    from msattn.kernels.primitives import padded_head

    return tuned.pick(operation, padded_head(head_size), dtype, sm)


LAUNCHES: dict[str, Callable[[torch.dtype, int, int], None]] = {
    "block_sparse_attention": _block_sparse_attention,
    "bucket_decode": _bucket_decode,
    "bucket_mass": _bucket_mass,
    "maxpool_attention": _maxpool_attention,
    "merge_states": _merge_states,
}


@pytest.mark.slow
@pytest.mark.parametrize("sm", SHARED_MEMORY)
@pytest.mark.parametrize("operation", LAUNCHES)
def test_compiles(operation: str, sm: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, operation, str(sm)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "kernel" in done.stdout  # something was compiled


def _compile_only(sm: int) -> None:
    """Install a driver for a GPU that is not there: kernels compile for it, and launching them does nothing."""
    import triton
    from triton.backends.compiler import GPUTarget

    class Utils:
        def get_device_properties(self, device):
            return {"max_shared_mem": SHARED_MEMORY[sm]}

        def load_binary(self, name, binary, shared, device):
            print("kernel", name, f"{shared} bytes of shared memory")
            return None, None, 0, 0, 1024

    class Driver:
        utils = Utils()

        def get_current_target(self):
            return GPUTarget("cuda", sm, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def launcher_cls(self, source, metadata):
            return lambda *args: None

    triton.runtime.driver.set_active(Driver())  # type: ignore[arg-type]


if __name__ == "__main__":
    operation, sm = sys.argv[1], int(sys.argv[2])
    _compile_only(sm)
    for dtype, head_size in (("bfloat16", 128), ("float16", 80), ("float32", 64), ("bfloat16", 256)):
        print(operation, dtype, head_size, f"sm_{sm}")
        LAUNCHES[operation](DTYPES[dtype], head_size, sm)
