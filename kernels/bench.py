"""Kernels beside their peers on this machine: a small timing core, one row a measurement, and a sweep over tiles.

A measurement is only taken after the kernel agreed with its reference on a slice of the same kind of input. Times are
medians with quartiles; each comes with the ratio to the peers of the same run, because a machine's clock drifts more than
kernels differ.

    python -m msattn.kernels.bench --op block_sparse_attention --lengths 8192 32768 131072 --out rows.csv
    python -m msattn.kernels.bench --op maxpool_attention --lengths 32768 --sweep
"""

import argparse
import csv
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msattn.kernels import reference, tuned
from msattn.kernels.testing import bucket_index, random_block_mask, random_qkv

DENSE = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}  # the peers, as PyTorch calls them
LAYERS = 8  # caches that decoding takes in turn, so that none is still in the L2 cache when its turn comes
PROBES, RECENT = 32, 2047  # SAAP's


class Milliseconds(NamedTuple):
    """Median and quartiles of the time of a call."""

    median: float
    q1: float
    q3: float


@dataclasses.dataclass(frozen=True)
class Shape:
    """Size of a benchmark: one sequence, causal, as many queries as keys."""

    length: int
    q_heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    def qkv(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Random inputs, laid out as a model's projections give them."""
        return random_qkv(
            1, self.q_heads, self.kv_heads, self.length, self.length, self.head_size, self.dtype, self.device, seed
        )


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement. ``memory_gb``: device memory the call takes beyond its inputs, results included."""

    op: str
    variant: str
    length: int
    sparsity: float
    ms: float
    q1: float
    q3: float
    memory_gb: float
    times_flash: float
    times_cudnn: float
    device: str
    torch: str
    triton: str


def time_ms(fn: Callable[[], object], repeats: int = 20, budget_s: float = 5.0) -> Milliseconds:
    """Time ``fn`` by itself, warm: CUDA events on a GPU, else the clock. 5 repeats or more, but few long ones."""
    fn()
    start = time.perf_counter()
    fn()
    _wait()
    repeats = max(5, min(repeats, int(budget_s / max(time.perf_counter() - start, 1e-9))))
    times = [_time_once(fn) for _ in range(repeats)]
    q1, median, q3 = statistics.quantiles(times, n=4)
    return Milliseconds(median, q1, q3)


def _time_once(fn: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        fn()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(200_000)  # the launch overlaps with this, so that only the device's time counts
    begin.record()
    fn()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory_gb(fn: Callable[[], object]) -> float:
    """Device memory that one call takes at its peak, its result included; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


class Candidate(NamedTuple):
    """Something to time: what it is called, the share of visible keys it leaves out, and the call."""

    variant: str
    sparsity: float
    call: Callable[[], object]
    steps: int = 1  # how often the call performs the operation


def prefill_peers(shape: Shape) -> Iterator[Candidate]:
    """Dense causal attention by PyTorch: FlashAttention-2 and cuDNN, where the machine has them."""
    if shape.device == "cuda":
        q, k, v = shape.qkv()
        for name in DENSE:
            yield Candidate(name, 0.0, partial(_dense, name, [(q, k, v)], True))


def decoding_peers(shape: Shape) -> Iterator[Candidate]:
    """One query against the whole cache of several layers, by the same two, as a graph."""
    if shape.device == "cuda":
        q, k, v = decoding(shape)
        layers = [(q, k.clone(), v.clone()) for _ in range(LAYERS)]
        for name in DENSE:
            yield Candidate(name, 0.0, _graph(partial(_dense, name, layers, False)), LAYERS)


def _dense(name: str, layers: list[tuple[Tensor, Tensor, Tensor]], causal: bool) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, DENSE[name])):
        for q, k, v in layers:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def decoding(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """A query and a cache, which lies head by head as transformers' does; drawn on the device, for it may be long."""
    options = {"dtype": shape.dtype, "device": shape.device}
    k, v = torch.randn(2, 1, shape.kv_heads, shape.length, shape.head_size, **options)
    return torch.randn(1, shape.q_heads, 1, shape.head_size, **options), k, v


def _graph(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph, which leaves out what Python and the launches take; the call itself on a CPU."""
    if not torch.cuda.is_available():
        return call
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def maxpool_attention(shape: Shape, tile: tuned.Tile | None) -> Iterator[Candidate]:
    """The dense forward pass with its block map."""
    from msattn.kernels import maxpool_attention as op

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        if tile is None:
            return op.maxpool_attention(q, k, v)
        return op.launch(q, k, v, None, 64, True, shape.head_size**-0.5, tile)

    check = dataclasses.replace(shape, length=500).qkv(seed=1)
    _agree(run(*check), reference.maxpool_attention(*check))
    yield Candidate(_name(tile), 0.0, partial(run, *shape.qkv()))


def block_sparse_attention(shape: Shape, tile: tuned.Tile | None) -> Iterator[Candidate]:
    """Random masks of each query head with the diagonal, at 90, 80 and 50 % sparsity; and one mask a query group at 90 %."""
    from msattn.kernels import block_sparse_attention as op

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        if tile is None:
            return op.block_sparse_attention(q, k, v, mask)
        return op.launch(q, k, v, mask, None, 64, True, shape.head_size**-0.5, tile)

    check = dataclasses.replace(shape, length=500).qkv(seed=1)
    mask = random_block_mask(1, shape.q_heads, 8, 8, 0.5, shape.device)
    _agree(run(*check, mask), reference.block_sparse_attention(*check, mask))
    q, k, v = shape.qkv()
    blocks = -(-shape.length // 64)
    for sparsity, heads in ((0.9, shape.q_heads), (0.8, shape.q_heads), (0.5, shape.q_heads), (0.9, shape.kv_heads)):
        shared = "" if heads == shape.q_heads else ", mask of a group"
        mask = random_block_mask(1, heads, blocks, blocks, 1 - sparsity, shape.device)
        yield Candidate(_name(tile) + shared, sparsity, partial(run, q, k, v, mask))


def bucket_decode(shape: Shape, tile: tuned.Tile | None) -> Iterator[Candidate]:
    """A decoding step of SAAP (1024 buckets, 32 probes, 1 + 2047 keys read exactly), as a graph over several layers."""
    from msattn.kernels import bucket_decode as op

    def run(layers: list[tuple[Any, ...]]) -> Any:
        for q, k, v, index, probes, recent in layers:
            if tile is None:
                out = op.bucket_decode(q, k, v, index, probes, recent=recent)
            else:
                out = op.launch(
                    q, k, v, index.offsets, index.order, probes, None, recent, 1, shape.head_size**-0.5, None, None, tile
                )
        return out

    def inputs(shape: Shape, layers: int, num_buckets: int, recent: int) -> list[tuple[Any, ...]]:
        q, *cache = decoding(shape)
        heads = 1, shape.kv_heads
        buckets = torch.randint(num_buckets, (*heads, shape.length), dtype=torch.int32, device=shape.device)
        index = bucket_index(buckets, num_buckets)
        chosen = torch.rand(layers, *heads, num_buckets, device=shape.device).argsort(-1)[..., :PROBES].int()
        return [(q, *(x.clone() for x in cache), index, probes, recent) for probes in chosen]

    check = inputs(dataclasses.replace(shape, length=3000), 1, 100, 50)
    q, k, v, index, probes, recent = check[0]
    _agree(run(check), reference.bucket_decode(q, k, v, index, probes, recent=recent))
    read = RECENT + 1 + PROBES / 1024 * max(0, shape.length - RECENT - 1)
    layers = inputs(shape, LAYERS, 1024, RECENT)
    yield Candidate(_name(tile), 1 - min(1, read / shape.length), _graph(partial(run, layers)), LAYERS)


def bucket_mass(shape: Shape, tile: tuned.Tile | None) -> Iterator[Candidate]:
    """1000 queries against 1024 buckets of keys; beside it the matrix product Q K^T alone, its result kept nowhere."""
    from msattn.kernels import bucket_mass as op

    def run(q: Tensor, k: Tensor, buckets: Tensor, num_buckets: int) -> tuple[Tensor, ...]:
        if tile is None:
            return op.bucket_mass(q, k, buckets, num_buckets=num_buckets)
        return op.launch(q, k, buckets, None, None, num_buckets, False, shape.head_size**-0.5, None, tile)

    def inputs(shape: Shape, num_buckets: int) -> tuple[Any, ...]:
        q, k, _ = random_qkv(1, shape.q_heads, shape.kv_heads, 1000, shape.length, shape.head_size, shape.dtype, shape.device)
        size = 1, shape.kv_heads, shape.length
        return q, k, torch.randint(num_buckets, size, dtype=torch.int32, device=shape.device), num_buckets

    def product(q: Tensor, k: Tensor) -> None:
        q = q.reshape(shape.kv_heads, -1, shape.head_size)
        for keys in k[0].split(8192, dim=1):
            q @ keys.transpose(1, 2)

    check = inputs(dataclasses.replace(shape, length=500), 20)
    mass, lse, _ = reference.bucket_mass(*check[:3], num_buckets=20)
    _agree(run(*check)[:2], (mass, lse))
    q, k, *rest = inputs(shape, 1024)
    yield Candidate("one QK^T", 0.0, partial(product, q.contiguous(), k.contiguous()))
    yield Candidate(_name(tile), 0.0, partial(run, q, k, *rest))


OPERATIONS: dict[str, Callable[[Shape, tuned.Tile | None], Iterator[Candidate]]] = {
    "maxpool_attention": maxpool_attention,
    "block_sparse_attention": block_sparse_attention,
    "bucket_decode": bucket_decode,
    "bucket_mass": bucket_mass,
}
PEERS: dict[str, Callable[[Shape], Iterator[Candidate]]] = {
    "bucket_decode": decoding_peers,
    "bucket_mass": lambda shape: iter(()),  # its peer is a matrix product, among its candidates
}
SWEEPS: dict[str, list[tuned.Tile]] = {  # tiles to try for 16-bit heads of 128
    "maxpool_attention": [
        tuned.Tile(128, 128, 8, 3),
        tuned.Tile(128, 128, 8, 2),
        tuned.Tile(128, 64, 8, 3),
        tuned.Tile(128, 64, 8, 4),
        tuned.Tile(128, 64, 8, 5),
        tuned.Tile(128, 64, 4, 2, 2),
        tuned.Tile(64, 128, 4, 2, 1),
        tuned.Tile(64, 64, 4, 3, 2),
        tuned.Tile(64, 64, 4, 2, 2),
    ],
    "block_sparse_attention": [
        tuned.Tile(64, 64, 4, 2),
        tuned.Tile(64, 64, 4, 3),
        tuned.Tile(64, 64, 4, 4),
        tuned.Tile(64, 64, 8, 3),
        tuned.Tile(64, 32, 4, 3),
        tuned.Tile(64, 32, 4, 5),
        tuned.Tile(64, 32, 4, 6),
    ],
    "bucket_decode": [
        tuned.Tile(16, 64, 4, 5, 1),
        tuned.Tile(16, 64, 4, 5, 2),
        tuned.Tile(16, 64, 4, 5, 3),
        tuned.Tile(16, 64, 4, 7, 2),
        tuned.Tile(16, 32, 4, 5, 2),
        tuned.Tile(16, 32, 4, 7, 4),
        tuned.Tile(16, 32, 2, 7, 4),
        tuned.Tile(16, 64, 8, 5, 2),
        tuned.Tile(16, 128, 4, 3, 2),
        tuned.Tile(16, 128, 8, 5, 1),
    ],
    "bucket_mass": [
        tuned.Tile(128, 64, 8, 3, 2),
        tuned.Tile(128, 64, 8, 5, 2),
        tuned.Tile(128, 64, 8, 7, 1),
        tuned.Tile(128, 64, 4, 5, 2),
        tuned.Tile(128, 32, 8, 5, 2),
        tuned.Tile(128, 128, 8, 5, 1),
        tuned.Tile(64, 64, 4, 5, 3),
        tuned.Tile(64, 128, 4, 5, 2),
    ],
}


def measure(operation: str, shape: Shape, tiles: list[tuned.Tile | None]) -> Iterator[Row]:
    """Rows of one operation at one length: the peers first, then the kernel with each tile (None: the shipped one)."""
    import triton

    where = {
        "device": torch.cuda.get_device_name() if shape.device == "cuda" else shape.device,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    dense: dict[str, float] = {}

    def timed(candidate: Candidate) -> Milliseconds:
        return Milliseconds(*(ms / candidate.steps for ms in time_ms(candidate.call)))

    def row(candidate: Candidate) -> Row:
        took = timed(candidate)
        quartiles = {"ms": took.median, "q1": took.q1, "q3": took.q3}
        ratios = {f"times_{name}": round(dense.get(name, float("nan")) / took.median, 3) for name in ("flash", "cudnn")}
        return Row(
            op=operation, variant=candidate.variant, length=shape.length, sparsity=candidate.sparsity, **quartiles,
            memory_gb=peak_memory_gb(candidate.call), **ratios, **where,
        )  # fmt: skip

    for candidate in PEERS.get(operation, prefill_peers)(shape):
        dense[candidate.variant] = timed(candidate).median
        yield row(candidate)
    for tile in tiles:
        try:
            for candidate in OPERATIONS[operation](shape, tile):
                yield row(candidate)
        except Exception as error:
            if tile is None:
                raise
            print(f"{tile}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)  # a sweep tries what may not fit


def _name(tile: tuned.Tile | None) -> str:
    return "msattn" if tile is None else "tile " + "-".join(map(str, tile))


def _agree(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """Refuse to time what is wrong: within four roundings of the largest value."""
    for x, y in zip(got, want, strict=True):
        seen = y.isfinite()
        error = (x[seen].double() - y[seen].double()).abs().max().item()
        limit = 4 * torch.finfo(x.dtype).eps * max(1.0, y[seen].abs().max().item()) + 1e-5
        if not (torch.equal(seen, x.isfinite()) and error <= limit):
            raise AssertionError(f"the kernel disagrees with its reference: {error:.2e} > {limit:.2e}; nothing was timed")


def main(arguments: list[str] | None = None) -> None:
    """Print rows as they come, as CSV; write them to a file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=sorted(OPERATIONS), nargs="+", default=sorted(OPERATIONS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="query heads, key/value heads")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sweep", action="store_true", help="try tiles instead of the shipped one")
    parser.add_argument("--out", help="CSV file")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    writer = csv.writer(sys.stdout)
    writer.writerow([field.name for field in dataclasses.fields(Row)])
    for operation in options.op:
        tiles: list[tuned.Tile | None] = [*SWEEPS[operation]] if options.sweep else [None]
        for length in options.lengths:
            q_heads, kv_heads = options.heads
            dtype = getattr(torch, options.dtype)
            shape = Shape(length, q_heads, kv_heads, options.head_size, dtype, options.device)
            for row in measure(operation, shape, tiles):
                rows.append(row)
                writer.writerow(dataclasses.astuple(row))
                sys.stdout.flush()
    if options.out:
        with open(options.out, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([field.name for field in dataclasses.fields(Row)])
            writer.writerows(dataclasses.astuple(row) for row in rows)


if __name__ == "__main__":
    main()
