"""Configuration of ``msattn bench``."""

import re
from dataclasses import dataclass, field

from msattn.trainer.config.values import DTYPES, check, choices, require, within

PEERS = ("flash", "cudnn", "efficient", "math", "flex", "eager", "block_sparse", "product")


@dataclass(frozen=True)
class BenchConfig:
    """Measurements of one operation. None stands for a size that depends on the device: see ``conf/bench/default.yaml``.

    Attributes
    ----------
    lengths : numbers of keys.
    heads : query heads and key/value heads.
    head_size : a multiple of 8 up to 256.
    dtype : ``auto`` (bfloat16 on CUDA, float32 on CPU), ``float32``, ``float16`` or ``bfloat16``.
    batch : number of sequences.
    sparsities : shares of the visible keys that are not read, for operations that select, each in [0, 1).
    direction : ``forward``, or ``backward`` alone.
    queries : numbers of queries, 1 to 16, for ``flash_decode``.
    kernels : queries x keys of a convolution, as in ``6x11``, each 1 to 32, for ``conv_attention`` and ``conv_decode``.
    softcap : limit of soft-capped scores, for operations that can cap them; peers that cannot are skipped.
    peers : competing implementations to time; those that the operation or the machine lacks are skipped.
    sweep : time the kernel's candidate tiles instead of peers.
    tune : time the candidate tiles and keep those that are clearly faster, for this user and GPU; they replace shipped tiles.
    """

    lengths: list[int] | None = field(default=None, metadata=within("[1, 1e9]"))
    heads: list[int] | None = field(default=None, metadata=within("[1, 65536]"))
    head_size: int = 128
    dtype: str = field(default="auto", metadata=choices(DTYPES))
    batch: int = field(default=1, metadata=within("[1, 1e6]"))
    sparsities: list[float] = field(default_factory=lambda: [0.9, 0.8, 0.5], metadata=within("[0, 1)"))
    direction: str = field(default="forward", metadata=choices(("forward", "backward")))
    queries: list[int] = field(default_factory=lambda: [1, 4, 16], metadata=within("[1, 16]"))
    kernels: list[str] = field(default_factory=lambda: ["6x11"])
    softcap: float | None = field(default=None, metadata=within("[1e-3, 1e6]"))
    peers: list[str] = field(
        default_factory=lambda: ["flash", "cudnn", "flex", "eager", "block_sparse", "product"], metadata=choices(PEERS)
    )
    sweep: bool = False
    tune: bool = False

    def __post_init__(self) -> None:
        check(self, "bench.")
        for key in ("lengths", "sparsities", "queries", "kernels"):
            require(getattr(self, key) != [], f"bench.{key}", getattr(self, key), "one or more")
        for kernel in self.kernels:
            taps = re.fullmatch("([0-9]{1,2})x([0-9]{1,2})", kernel)
            ok = taps is not None and all(1 <= int(tap) <= 32 for tap in taps.groups())
            require(ok, "bench.kernels", self.kernels, "each as in 6x11, of 1 to 32 queries and keys")
        heads = self.heads or [1, 1]
        ok = len(heads) == 2 and heads[0] % heads[1] == 0
        require(ok, "bench.heads", self.heads, "query heads and key/value heads, the first a multiple of the second")
        ok = 0 < self.head_size <= 256 and self.head_size % 8 == 0
        require(ok, "bench.head_size", self.head_size, "a multiple of 8 up to 256")
