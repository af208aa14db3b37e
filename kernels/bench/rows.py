"""Size of a benchmark problem, the work it takes, and the row of a measurement."""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 64  # tokens of a block in all problems
SMALL = 16  # keys of a small block
CHECK_LENGTH = 333  # tokens of the check before timing: several blocks, the last one partial


@dataclass(frozen=True)
class Shape:
    """Size of a problem; ``length`` is the number of keys, and of queries in prefill."""

    length: int
    batch: int = 1
    q_heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    seed: int = 0

    def small(self) -> "Shape":
        """Returns a small problem of the same kind, for which the reference is fast."""
        kv_heads = min(2, self.kv_heads)
        group = self.q_heads // self.kv_heads
        return dataclasses.replace(
            self,
            length=CHECK_LENGTH,
            batch=min(2, self.batch),
            q_heads=group * kv_heads,
            kv_heads=kv_heads,
        )

    @property
    def blocks(self) -> int:
        """Number of blocks of ``BLOCK`` keys."""
        return -(-self.length // BLOCK)

    def generator(self) -> torch.Generator:
        """Returns a generator of random numbers on the device, of the same seed at every call."""
        return torch.Generator(self.device).manual_seed(self.seed)

    def draw(
        self, heads: int, tokens: int, layers: int = 1, *, cached: bool = False
    ) -> list[Tensor]:
        """Draws normal ``[B, heads, tokens, D]`` for each layer.

        The tensors are transposed views, as those of a model's projections. ``cached`` selects a
        different random seed for keys and values, so that they differ from queries of the same
        shape.
        """
        generator = torch.Generator(self.device).manual_seed(
            2 * (self.seed + heads + tokens) + cached
        )
        size = layers, self.batch, tokens, heads, self.head_size
        drawn = torch.randn(size, generator=generator, dtype=self.dtype, device=self.device)
        return list(drawn.transpose(2, 3))

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Draws the inputs of one layer: ``q [B, Hq, N, D]`` and ``k, v [B, Hkv, N, D]``."""
        (q,), (k, v) = (
            self.draw(self.q_heads, self.length),
            self.draw(self.kv_heads, self.length, 2, cached=True),
        )
        return q, k, v

    def cache(self, layers: int, num_queries: int = 1) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Draws queries and a cache for each layer, contiguous as in transformers."""
        q = self.draw(self.q_heads, num_queries, layers)
        kv = [
            x.contiguous() for x in self.draw(self.kv_heads, self.length, 2 * layers, cached=True)
        ]
        return list(zip(q, kv[:layers], kv[layers:], strict=True))


class Work(NamedTuple):
    """Minimum work of one run: FLOPs on the scores that are read, bytes moved once."""

    flops: float
    bytes: float


class PeakRates(NamedTuple):
    """Measured peak TFLOP/s and TB/s of a machine."""

    tflops: float
    tb_s: float


@dataclass(frozen=True)
class BenchRow:
    """One measurement; without a time, ``ms`` is None and ``note`` has the reason."""

    op: str
    direction: str  # forward, or backward: the backward pass alone
    variant: str  # msattn, shipped or a tile of a sweep, or the name of a peer
    setting: str  # distinguishes rows of the same variant, e.g. "90% sparse"
    batch: int
    length: int  # number of keys
    queries: int
    q_heads: int
    kv_heads: int
    head_size: int
    dtype: str
    sparsity: float  # realized share of the visible keys that is not read
    ms: float | None = None  # median of the time of one run; the next two are its quartiles
    q1: float | None = None
    q3: float | None = None
    # largest of an output row against fp64 at this size, relative to its norm; None: not checked
    error: float | None = None
    # peak device memory of one run beyond its inputs, results included; None on a CPU
    memory_gb: float | None = None
    tflops: float | None = None  # the Work of the operation divided by the time, as tb_s
    tb_s: float | None = None
    # of this machine's measured ceiling, compute or memory, whichever share is larger
    share: float | None = None
    bound: str = ""  # the name of that ceiling
    # of the slowest of its kernels, in a sweep; None if nothing was compiled
    compile_s: float | None = None
    # speedup over each peer of the same run
    times: dict[str, float] = dataclasses.field(default_factory=dict)
    # difference between a peer and the operation, or the reason why there is no time
    note: str = ""
    device: str = ""  # the GPU or CPU
    torch: str = ""
    triton: str = ""

    def record(self) -> dict[str, Any]:
        """Returns a flat dict for a table, with a column ``times_<peer>`` for each peer."""
        record = dataclasses.asdict(self)
        return record | {f"times_{peer}": ratio for peer, ratio in record.pop("times").items()}


def throughput(work: Work, ms: float, ceiling: PeakRates) -> dict[str, Any]:
    """Returns ``tflops``, ``tb_s``, ``share`` and ``bound`` of a :class:`BenchRow`."""
    tflops, tb_s = work.flops / ms / 1e9, work.bytes / ms / 1e9
    compute, memory = tflops / ceiling.tflops, tb_s / ceiling.tb_s
    return {
        "tflops": tflops,
        "tb_s": tb_s,
        "share": max(compute, memory),
        "bound": "compute" if compute >= memory else "memory",
    }
