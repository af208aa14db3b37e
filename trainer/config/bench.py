"""Configuration of ``msattn bench``."""

import re
from typing import Annotated

from annotated_types import Interval, MinLen

from msattn.trainer.config.schema import (
    DTYPE,
    Count,
    DType,
    Flag,
    Int,
    Number,
    OneOf,
    Sparsity,
    Text,
    Tokens,
    key,
    schema,
)
from msattn.trainer.config.values import require

PEERS = ("flash", "cudnn", "efficient", "math", "flex", "eager", "block_sparse", "product")
Heads = Annotated[Int, Interval(ge=1, le=65536)]
Queries = Annotated[Int, Interval(ge=1, le=16)]
Softcap = Annotated[Number, Interval(ge=1e-3, le=1e6)]
Peer = Annotated[Text, OneOf(PEERS)]
Direction = Annotated[Text, OneOf(("forward", "backward"))]


@schema("bench.")
class BenchConfig:
    """Measurements of one operation. None stands for a size that depends on the device."""

    lengths: Annotated[list[Tokens], MinLen(1)] | None = key(
        "numbers of keys; null: 8192, 32768, 131072 on a GPU, 512, 1024 on a CPU", default=None
    )
    heads: list[Heads] | None = key(
        "numbers of query heads and key/value heads; null: 32, 8 on a GPU, 8, 2 on a CPU",
        default=None,
    )
    head_size: Int = key("channels per head, a multiple of 8 up to 512", default=128)
    dtype: DType = key(DTYPE, default="auto")
    batch: Count = key("number of sequences", default=1)
    sparsities: Annotated[list[Sparsity], MinLen(1)] = key(
        "shares of the visible keys that are not read, for sparse operations",
        default=[0.9, 0.8, 0.5],
    )
    direction: Direction = key("forward, or backward (the backward pass alone)", default="forward")
    queries: Annotated[list[Queries], MinLen(1)] = key(
        "numbers of queries, for flash_decode", default=[1, 4, 16]
    )
    kernels: Annotated[list[Text], MinLen(1)] = key(
        "convolution kernels (queries x keys), each 1 to 32, for conv_attention and conv_decode",
        default=["6x11"],
    )
    softcap: Softcap | None = key(
        "soft cap of scores (Gemma 2: 50), for attention and decoding; peers that cannot cap "
        "scores are skipped",
        default=None,
    )
    fp8: Flag = key(
        "caches in pages hold FP8 numbers, for paged attention; peers stay in bench.dtype",
        default=False,
    )
    peers: list[Peer] = key(
        "competing implementations; also efficient, math. Those that do not exist for an "
        "operation are skipped",
        default=["flash", "cudnn", "flex", "eager", "block_sparse", "product"],
    )
    sweep: Flag = key("time the kernel's candidate tiles instead of peers", default=False)
    tune: Flag = key(
        "time the kernel's candidate tiles and save the clearly faster ones for this user and GPU",
        default=False,
    )

    def __post_init__(self) -> None:
        for kernel in self.kernels:
            taps = re.fullmatch("([0-9]{1,2})x([0-9]{1,2})", kernel)
            ok = taps is not None and all(1 <= int(tap) <= 32 for tap in taps.groups())
            require(
                ok,
                "bench.kernels",
                self.kernels,
                "expected items such as 6x11, of 1 to 32 queries and keys",
            )
        heads = self.heads or [1, 1]
        ok = len(heads) == 2 and heads[0] % heads[1] == 0
        accepted = (
            "expected numbers of query heads and key/value heads, the first a multiple of "
            "the second"
        )
        require(ok, "bench.heads", self.heads, accepted)
        ok = 0 < self.head_size <= 512 and self.head_size % 8 == 0
        require(ok, "bench.head_size", self.head_size, "expected a multiple of 8 up to 512")
