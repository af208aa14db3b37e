"""What is measured and what comes out: a shape, the work it takes, and one row a measurement."""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

SMALL = 333  # tokens at which an operation is checked: several blocks, the last one partial


@dataclass(frozen=True)
class Shape:
    """Size of a problem: ``length`` keys, and as many queries unless an operation says otherwise."""

    length: int
    batch: int = 1
    q_heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    seed: int = 0

    def small(self) -> "Shape":
        """A problem of the same kind that its reference solves at once: short, with two query groups at most."""
        kv_heads = min(2, self.kv_heads)
        group = self.q_heads // self.kv_heads
        return dataclasses.replace(self, length=SMALL, batch=min(2, self.batch), q_heads=group * kv_heads, kv_heads=kv_heads)

    def draw(self, heads: int, tokens: int, layers: int = 1, *, cached: bool = False) -> list[Tensor]:
        """Normal ``[B, heads, tokens, D]`` for each layer, as transposed views, which is how projections give them.

        Keys and values (``cached``) are not the queries' numbers, even where they are as many.
        """
        generator = torch.Generator(self.device).manual_seed(2 * (self.seed + heads + tokens) + cached)
        size = layers, self.batch, tokens, heads, self.head_size
        drawn = torch.randn(size, generator=generator, dtype=self.dtype, device=self.device)
        return list(drawn.transpose(2, 3))

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of one layer: ``q [B, Hq, N, D]`` and ``k, v [B, Hkv, N, D]``."""
        (q,), (k, v) = self.draw(self.q_heads, self.length), self.draw(self.kv_heads, self.length, 2, cached=True)
        return q, k, v

    def cache(self, layers: int, num_queries: int = 1) -> list[tuple[Tensor, Tensor, Tensor]]:
        """A few queries and a cache for each layer; the cache lies head by head, as transformers' does."""
        q = self.draw(self.q_heads, num_queries, layers)
        kv = [x.contiguous() for x in self.draw(self.kv_heads, self.length, 2 * layers, cached=True)]
        return list(zip(q, kv[:layers], kv[layers:], strict=True))


class Work(NamedTuple):
    """What one run takes at least: floating point operations of the definition over what is read, and bytes moved once."""

    flops: float
    bytes: float


class Rate(NamedTuple):
    """What a machine does a second, measured: 10**12 floating point operations, 10**12 bytes."""

    tflops: float
    tb_s: float


@dataclass(frozen=True)
class BenchRow:
    """One measurement, or why there is none (``ms`` is None and ``note`` says it).

    Attributes
    ----------
    op, direction : what was run; ``backward`` is the backward pass alone.
    variant : ``msattn``, a tile of a sweep, or a peer.
    setting : what tells it from others of its variant, e.g. ``90 % sparse``.
    batch, length, queries, q_heads, kv_heads, head_size, dtype : size of the problem; ``length`` counts keys.
    sparsity : share of the visible keys that is not read, as realised.
    ms, q1, q3 : median and quartiles of the time of one run.
    error : largest error of a row against fp64 at this size, over a row's size; None where it is not checked.
    memory_gb : device memory that one run takes at its peak beyond its inputs, results included; None on a CPU.
    tflops, tb_s : the operation's :class:`Work` over the time.
    share : the larger of the shares of this machine's measured ceilings; ``bound`` says of which.
    compile_s : seconds that the slowest of its kernels took to compile, in a sweep; None where none had to be compiled.
    times : how many times faster than each peer of the same run.
    note : how a peer differs, or why it is absent.
    device, torch, triton : where and with what.
    """

    op: str
    direction: str
    variant: str
    setting: str
    batch: int
    length: int
    queries: int
    q_heads: int
    kv_heads: int
    head_size: int
    dtype: str
    sparsity: float
    ms: float | None = None
    q1: float | None = None
    q3: float | None = None
    error: float | None = None
    memory_gb: float | None = None
    tflops: float | None = None
    tb_s: float | None = None
    share: float | None = None
    bound: str = ""
    compile_s: float | None = None
    times: dict[str, float] = dataclasses.field(default_factory=dict)
    note: str = ""
    device: str = ""
    torch: str = ""
    triton: str = ""

    def record(self) -> dict[str, Any]:
        """Flat, for a table: each of ``times`` a column of its own."""
        record = dataclasses.asdict(self)
        return record | {f"times_{peer}": ratio for peer, ratio in record.pop("times").items()}


def rated(work: Work, ms: float, ceiling: Rate) -> dict[str, Any]:
    """``tflops``, ``tb_s``, ``share`` and ``bound`` of a :class:`BenchRow`."""
    tflops, tb_s = work.flops / ms / 1e9, work.bytes / ms / 1e9
    compute, memory = tflops / ceiling.tflops, tb_s / ceiling.tb_s
    return {
        "tflops": tflops,
        "tb_s": tb_s,
        "share": max(compute, memory),
        "bound": "compute" if compute >= memory else "memory",
    }
