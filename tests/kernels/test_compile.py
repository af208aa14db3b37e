"""Compilation of every kernel for the supported GPUs, within their shared memory; no GPU is needed.

Triton's interpreter accepts code that its compiler rejects (short dots, ``break``, layouts that do
not fit). Each operation's launcher therefore runs in a process without the interpreter, on CPU
tensors, with a driver that compiles kernels and does not launch them.

A new operation, or a module of kernels beside them, adds a function that calls the launcher with
small CPU tensors of the given dtype and head size. Compilation is slow: each kernel compiles at one
shape for a GPU, and the variants of an operation are distributed over the GPUs. Further shapes
(heads of 64, of 256 and 512 for the most shared memory, and fp32) compile with the GPU tests.
Triton caches what it compiled by source, so that an unchanged kernel is not compiled again.
"""

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch

from msattn.kernels.common.block_bits import pack_blocks
from msattn.kernels.common.fp8 import FP8
from msattn.kernels.common.paged_checks import FP8_CAPABILITY
from msattn.kernels.operations import OPERATIONS
from msattn.kernels.testing import random_block_mask, random_pages, random_qkv, starts
from msattn.kernels.types import PagedKeys
from tests.house.modules import ROOT
from tests.kernels.problems import random_buckets

SHARED_MEMORY = {80: 166_912, 90: 232_448}  # maximum bytes per block, by compute capability
HEADS = {80: (("bfloat16", 128),), 90: (("float16", 128),)}
FURTHER_HEADS = {
    80: (("bfloat16", 256), ("bfloat16", 512)),
    90: (("float32", 64), ("float32", 256), ("float16", 64), ("bfloat16", 512)),
}
CAPS = (None, 30.0)
PARTS = 3  # processes
Variant = TypeVar("Variant")
Heads = dict[int, tuple[tuple[str, int], ...]]
SIZES = (64, 128, 256, 512)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def _flash_decode(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels.common import dense_decode as op
    from msattn.kernels.flash_decode import score_mod

    plain, biased = (
        ("partial", None, 1, False, 2),
        ("global", score_mod.alibi(torch.ones(4)), 64, False, 40),
    )
    capped, windowed = (
        ("partial", score_mod.softcap(30.0), 16, True, 1),
        ("global", score_mod.sliding_window(7), 32, True, 1),
    )
    for variant, mod, num_queries, causal, splits in _choose(
        [(plain, biased), (capped, windowed)], head_size, sm
    ):
        q, k, v = random_qkv(2, 4, 2, num_queries, 5200, head_size, dtype)
        op.launch(
            q,
            k,
            v,
            mod,
            starts([8, 0]) if causal else None,
            starts([200, 7]),
            variant,
            causal,
            0.1,
            splits,
        )


def _maxpool_attention(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels import maxpool_attention as op

    q, k, v = random_qkv(1, 4, 2, 200, 200, head_size, dtype)
    block_size = _block_size(head_size)
    kv_start = starts([8]) if block_size == 128 else None
    mass = _choose(["mass", "mean_mass"], head_size, sm)
    of_keys = (block_size, 16)  # equal, and fewer keys than queries
    for key_block_size, softcap, sinks, pool in zip(
        of_keys, CAPS, (None, torch.zeros(4, dtype=dtype)), ("max", mass), strict=True
    ):
        op.launch(q, k, v, sinks, kv_start, block_size, key_block_size, True, 0.1, softcap, pool)


def _block_sparse_attention(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels.block_sparse_attention import backward, forward

    block_size = _block_size(head_size)  # then with other blocks of keys, several in a tile
    key_blocks = (block_size,), (32 if block_size == 16 else 16,)
    _with_block_map(forward, backward, torch.bool, dtype, head_size, sm, key_blocks)


def _multiscale_attention(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels.multiscale_attention import backward, forward

    _with_block_map(forward, backward, torch.uint8, dtype, head_size, sm, ((), ()))


def _with_block_map(
    forward,
    backward,
    of_map: torch.dtype,
    dtype: torch.dtype,
    head_size: int,
    sm: int,
    key_blocks: Sequence[tuple[int, ...]],
) -> None:
    q, k, v = random_qkv(1, 4, 2, 200, 200, head_size, dtype)
    lse, block_size = torch.zeros(1, 4, 200), _block_size(head_size)
    for softcap, key_block in zip(CAPS, key_blocks, strict=True):
        row_blocks, col_blocks = (
            -(-200 // size) for size in (block_size, *(key_block or (block_size,)))
        )
        blocks = torch.ones(1, 2, row_blocks, col_blocks, dtype=of_map)
        if of_map == torch.bool and softcap is not None:
            blocks = pack_blocks(blocks)
        options = (
            starts([8]) if block_size == 128 else None,
            block_size,
            *key_block,
            block_size != 16,
            0.1,
        )
        forward.launch(q, k, v, blocks, *options, softcap)
        if _compiles_backward(head_size, sm):
            backward.launch(q, lse, q, k, v, blocks, q, lse, *options, softcap)


def _paged_block_sparse_attention(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels.paged import block_sparse_attention as op

    q, k, v = random_qkv(1, 4, 2, 200, 200, head_size, dtype)
    block_size, page_size = _block_size(head_size), _choose([256, 64, 16], head_size, sm)
    cache, _ = random_pages(k, v, starts([200]), page_size)
    row_blocks, col_blocks = -(-200 // block_size), -(-cache.table.shape[1] * page_size // 16)
    mask, rows = (
        random_block_mask(1, 2, row_blocks, col_blocks, 0.5),
        torch.tensor([0, 200], dtype=torch.int32),
    )
    variants = zip((None, mask), (block_size, 16), CAPS, strict=True)
    caches = _with_fp8(cache, sm)
    for (block_mask, key_block_size, softcap), each in itertools.product(variants, caches):
        op.launch(
            q[0].transpose(0, 1),
            *each,
            rows,
            block_mask,
            200,
            block_size,
            key_block_size,
            0.1,
            softcap,
        )


def _bucket_decode(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels import bucket_decode as op
    from msattn.kernels.common.bucket_index import build_bucket_index

    q, k, v = random_qkv(2, 4, 2, 1, 200, head_size, dtype)
    offsets, order = build_bucket_index(random_buckets(2, 2, 200, 8), 8)
    counts = torch.zeros(2, 2, dtype=torch.int64)
    few, many = (
        (5, None, None, None, None),
        (100, starts([9, 3]), starts([8, 0]), starts([200, 7]), counts),
    )
    probes, recent, kv_start, kv_len, counts = _choose([few, many], head_size, sm)
    chosen = torch.zeros(2, 2, probes, dtype=torch.int32)
    for softcap in CAPS:
        op.launch(
            q,
            k,
            v,
            offsets,
            order,
            chosen,
            recent,
            16,
            1,
            0.1,
            softcap,
            kv_start,
            kv_len,
            False,
            counts,
        )


def _bucket_mass(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels.bucket_mass import forward as op

    prompt, token = (200, 200, 8, False, None), (1, 3000, 5, True, 3)
    num_queries, num_keys, num_buckets, causal, min_distance = _choose(
        [prompt, token], head_size, sm
    )
    q, k, _ = random_qkv(1, 4, 2, num_queries, num_keys, head_size, dtype)
    buckets = torch.zeros(1, 2, num_keys, dtype=torch.int32)
    for softcap in CAPS:
        op.launch(q, k, buckets, None, None, num_buckets, causal, 0.1, softcap, min_distance)


def _merge_states(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels import merge_states as op

    op.launch(torch.zeros(3, 1, 2, 5, head_size, dtype=dtype), torch.zeros(3, 1, 2, 5))


def _nearest_centroid(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels import nearest_centroid as op

    k, buckets = (
        torch.zeros(1, 2, 200, head_size, dtype=dtype),
        torch.zeros(1, 2, 200, dtype=torch.int32),
    )
    num_buckets = _choose([256, 10], head_size, sm)
    op.launch(k, torch.zeros(2, num_buckets, head_size))
    op.launch_sums(k, buckets, num_buckets)


def _pool_blocks(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels.common import block_pooling as op

    x = torch.zeros(2, 200, 3, head_size, dtype=dtype).transpose(1, 2)
    one, two, three = (
        ("avg", 64, None, x),
        ("max,min", 16, None, None),
        ("min,avg,max", 128, torch.tensor([8, 0]), x),
    )
    op.launch(x, *_choose([two, three, one], head_size, sm))


def _best_blocks(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels import best_blocks as op

    for cols in (7, 2048, 65536):
        scores, visible = torch.zeros(2, 3, 2, cols), torch.ones(1, 1, 2, cols, dtype=torch.bool)
        op.launch_softmax(scores, visible)
        op.launch_best(
            scores,
            torch.ones(2, 1, 2, 1, dtype=torch.int32),
            visible,
            visible,
            math.inf,
            0.0,
            0.0,
            0.0,
        )


def _gate_scores(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels.common import block_counts, block_masses, gate_rows

    gate, *_ = _gate(dtype, head_size, sm)
    gate_rows.launch(gate)
    q, key_block, kv_start = gate.q, gate.key_block_size, gate.kv_start
    block_masses.launch(
        q[:, :, -64:], q[:, :2], kv_start, key_block, 0.1, _choose(CAPS, head_size, sm)
    )
    total, blocks = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.int64)
    for selected in (torch.bool, torch.int32):
        block_counts.launch(total, torch.zeros(2, 4, 13, 13, dtype=selected), blocks, 8)


def _gate_blocks(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels.common import gate_rows

    gate, rows, cols = _gate(dtype, head_size, sm)
    numbers = torch.zeros(1, 1, rows, 1, dtype=torch.int32)
    choice = gate_rows.Choice(numbers, numbers, 1, 1.0, -1.0, -0.5, 2.0)
    given = torch.zeros(2, len(gate.query_weight), 2, cols), torch.ones(2, 2, dtype=torch.bool)
    exact = gate._replace(last_queries=False, columns=given[0][:, :, 0].contiguous())
    for each in (gate, exact._replace(last_rows=given[0], whole=given[1])):
        gate_rows.launch(each, choice)
    # the longest row that a program holds
    longest = gate._replace(
        pooled_k=gate.pooled_k[:, :, :1].expand(-1, -1, 65536, -1),
        num_keys=65536 * gate.key_block_size,
        kv_start=None,
        last_queries=False,
    )
    gate_rows.launch(longest, choice)


def _gate(dtype: torch.dtype, head_size: int, sm: int):
    """Returns the arguments of a gate, and its numbers of row blocks and column blocks."""
    from msattn.kernels.common.gate_rows import Gate

    q = torch.zeros(2, 4, 200, head_size, dtype=dtype)
    usual, other = (4, head_size, None, 64, 16), (2, 24, starts([8, 0]), 128, 128)
    heads, hidden, kv_start, block, key_block = _choose([usual, other], head_size, sm)
    means = (q, 0.5) if heads == 4 or head_size == 256 else (None, 0.0)
    weights = (
        torch.zeros(heads, hidden, 4 // heads * head_size),
        torch.zeros(heads, hidden, 2 * head_size),
    )
    pooled_k = torch.zeros(2, 2, -(-200 // key_block), (2 + (means[0] is not None)) * head_size)
    gate = Gate(
        q, pooled_k, *weights, torch.zeros(hidden // 2), "avg", 200, block, key_block, kv_start,
        *means, head_size != 16, None, None, None,
    )  # fmt: skip
    return gate, *gate.map_shape[2:]


def _probe_buckets(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels import probe_buckets as op

    classifiers, num_buckets = _choose([(2, 1024), (4, 10)], head_size, sm)
    weight_in = torch.zeros(classifiers, head_size, 100, dtype=dtype)
    weight_out = torch.zeros(classifiers, 100, num_buckets, dtype=dtype)
    bias_in, bias_out = (
        torch.zeros(classifiers, 1, size, dtype=dtype) for size in (100, num_buckets)
    )
    given = (
        torch.zeros(2, 4, 1, head_size, dtype=dtype),
        weight_in,
        bias_in,
        weight_out,
        bias_out,
        2,
        5,
    )
    op.launch(*given, None, None)
    op.launch(*given, torch.zeros(2, 2, num_buckets, dtype=torch.int32), 1.5)


def _conv_attention(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels.multi_token.conv_attention import operation as op

    fewer = (3, 3), torch.tensor([8], dtype=torch.int32), "query"
    usual, one = ((6, 11), None, "query"), ((1, 3), None, "key")
    for taps, kv_start, mask in {128: (usual,), 256: (fewer,)}.get(head_size, (fewer, one)):
        _with_gradient(
            op, torch.ones(4, *taps), dtype, head_size, sm, kv_start, kv_start is None, mask
        )


def _paged_cache(dtype: torch.dtype, head_size: int, page_size: int):
    """Returns queries of two sequences, and the views of one layer in a buffer of two."""
    k, v = torch.zeros(2, 40, 2, page_size, 2, head_size, dtype=dtype)[:, :, 0]
    table, kv_len = torch.zeros(2, 20, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    return torch.zeros(2, 4, 1, head_size, dtype=dtype), PagedKeys(k, v, table, kv_len)


def _with_fp8(cache: PagedKeys, sm: int) -> list[PagedKeys]:
    """Returns a cache, and the same one in FP8 if the GPU can read it."""
    if sm < FP8_CAPABILITY:
        return [cache]
    scales = {"k_scale": torch.ones(2), "v_scale": torch.ones(1)}
    return [cache, cache._replace(k=cache.k.to(FP8), v=cache.v.to(FP8), **scales)]


def _paged_bucket_decode(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels.paged import bucket_decode as op

    counts = torch.zeros(2, 2, dtype=torch.int64)
    variants = (256, starts([5, 9]), 30.0, None), (16, None, None, counts)
    page_size, recent_of, softcap, counts = _choose(variants, head_size, sm)
    q, cache = _paged_cache(dtype, head_size, page_size)
    buckets, probes = (
        torch.zeros(40, page_size, 2, dtype=torch.int16),
        torch.zeros(2, 2, 5, dtype=torch.int32),
    )
    for each in _with_fp8(cache, sm):
        op.launch(q, *each, buckets, probes, recent_of, 9, 1, 0.1, softcap, counts)


def _paged_bucket_sizes(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels.paged import bucket_sizes as op

    num_buckets, page_size = _choose([(1024, 16), (100, 64), (2**15, 256)], head_size, sm)
    ids, table = (
        torch.zeros(40, page_size, 2, dtype=torch.int16),
        torch.zeros(2, 20, dtype=torch.int32),
    )
    kv_len = table[:, 0].contiguous()
    counted, sizes = (
        _choose([None, kv_len, kv_len], head_size, sm),
        torch.zeros(2, 2, num_buckets, dtype=torch.int32),
    )
    op.launch(ids, table, kv_len, counted, sizes)


def _paged_flash_decode(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels.paged import flash_decode as op

    page_size, softcap = _choose([(16, 30.0), (256, None)], head_size, sm)
    q, cache = _paged_cache(dtype, head_size, page_size)
    for each in _with_fp8(cache, sm):
        op.launch(q.expand(-1, -1, 3, -1), *each, 0.1, softcap)


def _conv_decode(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels.multi_token import conv_decode as op

    usual, least, widest = (1, (6, 11), "query"), (2, (1, 1), "query"), (4, (3, 32), "key")
    kv_heads, taps, mask = {64: least, 128: usual}.get(head_size, widest)
    q, k, v = random_qkv(2, 4, kv_heads, taps[0], 200, head_size, dtype)
    op.launch(q, k, v, torch.ones(4, *taps), starts([8, 0]), starts([200, 7]), 0.1, mask, None)


def _head_mix_attention(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels.multi_token.head_mix_attention import operation as op

    kv_start = torch.tensor([8], dtype=torch.int32) if head_size == 256 else None
    _with_gradient(op, torch.ones(4, 4), dtype, head_size, sm, kv_start, head_size != 64)


def _with_gradient(
    op,
    weight: torch.Tensor,
    dtype: torch.dtype,
    head_size: int,
    sm: int,
    kv_start,
    causal: bool,
    *options,
) -> None:
    inputs = [*random_qkv(1, 4, 2, 200, 200, head_size, dtype), weight.to(dtype)]
    out, lse = op.launch(*inputs, kv_start, causal, 0.1, *options)
    if _compiles_backward(head_size, sm):
        op.launch_backward(
            torch.zeros_like(out), *inputs, out, lse, kv_start, causal, 0.1, *options
        )


def _decoder_layer(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels import decoder_layer as op

    cols, eps = _choose([4096, 16384, 100], head_size, sm), 1e-6
    # one row, several rows of a program, many rows
    for shape in ((1, 1, cols), (2, 3, head_size), (2**20 // cols + 1, cols)):
        x = torch.zeros(shape, dtype=dtype)
        op.launch_rms_norm(x, x.new_zeros(shape[-1]), eps)
        op.launch_gated_silu(x, x)
    halves = torch.zeros(3, 2 * cols, dtype=dtype).chunk(2, dim=-1)
    op.launch_gated_silu(*halves)
    for tokens, position in ((1, torch.zeros(1, dtype=torch.int64)), (100, 0)):
        q, k, v = random_qkv(2, 4, 2, tokens, tokens, head_size, dtype)
        cache, cos = (
            torch.zeros(2, 2, 200, head_size, dtype=dtype),
            torch.zeros(1, tokens, head_size, dtype=dtype),
        )
        op.launch_rotate_and_append(q, k, v, cos, cos, cache, cache, position)


def _unrotate(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels import unrotate as op

    share, interleaved = _choose([(1, False), (2, True)], head_size, sm)
    for tokens, size in ((1, head_size), (100, head_size), (100, head_size * 3 // 4)):
        cos = torch.zeros(1, tokens, size // share, dtype=dtype)
        op.launch(torch.zeros(2, 4, tokens, size, dtype=dtype), cos, cos, interleaved)


def _write_pages(dtype: torch.dtype, head_size: int, sm: int) -> None:
    from msattn.kernels.paged import write as op

    cache, buckets = (
        torch.zeros(9, 16, 2, head_size, dtype=dtype),
        torch.zeros(9, 16, 2, dtype=torch.int16),
    )
    for tokens in (1, 100):
        new, slots = (
            torch.zeros(2, tokens, head_size, dtype=dtype),
            torch.zeros(tokens, dtype=torch.int64),
        )
        op.launch(new, new, cache, cache, slots, slots, slots.int().expand(2, tokens), buckets)
        op.launch(new, new, cache, cache, slots, slots, None, None)
        if sm >= FP8_CAPABILITY:
            scale, held = torch.ones(2), cache.to(FP8)
            op.launch(new, new, held, held, slots, slots, None, None, scale, scale[0])
            op.launch_rounding(new, scale)


def _choose(variants: Sequence[Variant], head_size: int, sm: int) -> Variant:
    """Returns one variant, so that head sizes and GPUs cover them in rotation."""
    return variants[(SIZES.index(head_size) + (sm == 80)) % len(variants)]


def _compiles_backward(head_size: int, sm: int) -> bool:
    """Returns False on sm_80 for the first shape: its backward passes compile with the further
    shapes.
    """
    return sm == 90 or head_size != 128


def _block_size(head_size: int) -> int:
    """Returns a block size below, equal to or above the rows of a tile, by head size."""
    return {64: 16, 256: 128}.get(head_size, 64)


LAUNCHES: dict[str, Callable[[torch.dtype, int, int], None]] = {
    name: globals()[f"_{name}"]
    for name in (*OPERATIONS, "decoder_layer", "unrotate", "write_pages")
}


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
    operations = list(LAUNCHES)[part::PARTS]
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
    primitives.capability = lambda device: driver.sm  # before other modules import it
    for driver.operation, driver.sm in itertools.product(operations, heads):
        for dtype, head_size in heads[driver.sm]:
            print(f"{driver.operation} sm_{driver.sm}: {dtype}, heads of {head_size}")
            LAUNCHES[driver.operation](DTYPES[dtype], head_size, driver.sm)


if __name__ == "__main__":
    compile_operations(FURTHER_HEADS if sys.argv[1] == "further" else HEADS, sys.argv[2:])
