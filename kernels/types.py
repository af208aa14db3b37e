"""Result types shared by every operation of :mod:`msattn.kernels`.

Shapes follow one notation: ``B`` batch, ``Hq`` query heads, ``Hkv`` key/value heads, ``N`` queries, ``M`` keys, ``D`` head
size, ``Tr``/``Tc`` row/column blocks, ``C`` buckets, ``L`` probes. Every ``lse`` is the natural logarithm of the sum of
exponentials of the scaled scores, in fp32 (fp64 for fp64 input); a row that sees nothing has ``out = 0``, ``lse = -inf``.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor

Backend = Literal["triton", "torch"]
Variant = Literal["partial", "global"]  # of flash_decode


class SparseAttention(NamedTuple):
    """Attention over a part of the keys: ``out [B, Hq, N, D]`` (dtype of q), ``lse [B, Hq, N]``."""

    out: Tensor
    lse: Tensor


class MaxPoolAttention(NamedTuple):
    """Dense attention and its block map: ``out [B, Hq, N, D]``, ``lse [B, Hq, N]``, ``pooled [B, Hq, Tr, Tc]`` fp32."""

    out: Tensor
    lse: Tensor
    pooled: Tensor


class BucketMass(NamedTuple):
    """Attention mass by bucket: ``mass [B, Hq, n_q, C]`` fp32, ``lse [B, Hq, n_q]``, ``top_key [B, Hq, n_q]`` int32.

    ``top_key`` is the index of the key with the highest score, -1 where nothing is seen.
    """

    mass: Tensor
    lse: Tensor
    top_key: Tensor


class NearestCentroid(NamedTuple):
    """The centroid nearest to each key: ``buckets [B, H, M]`` int32, its number; ``products [B, H, M]`` fp32, their product."""

    buckets: Tensor
    products: Tensor


class BucketSums(NamedTuple):
    """The keys of each bucket added up: ``sums [B, H, C, D]`` fp32, ``counts [B, H, C]`` int32."""

    sums: Tensor
    counts: Tensor


class BucketIndex(NamedTuple):
    """Which keys each bucket holds: the keys of bucket c are ``order[..., offsets[..., c] : offsets[..., c + 1]]``.

    ``offsets`` int32 ``[B, Hkv, C + 1]``; ``order`` int32 ``[B, Hkv, n]``, absolute cache positions.
    """

    offsets: Tensor
    order: Tensor


class ScoreMod(NamedTuple):
    """What becomes of a scaled score before it is masked: ``score = mod(score, b, h, i, j, *tensors, *numbers)``.

    ``b`` is the sequence, ``h`` the query head, ``i`` and ``j`` the positions of query and key in the cache, its padding
    counted. What is masked afterwards is passed too, with a position that exists: ``0 <= j < M``, ``0 <= i``, and ``i < M``
    wherever there are no more queries than keys, so that loads by position need no mask. -inf hides a key.

    ``kernel`` is a ``triton.jit`` function; a group's heads and their queries are packed into the rows of a tile, so that it
    takes and gives ``score`` fp32 ``[rows, keys]``, with ``b`` a scalar, ``h`` and ``i`` int32 ``[rows, 1]``, ``j`` int32
    ``[1, keys]``, and pointers for the tensors. ``reference`` is its PyTorch twin: ``score [Hq, N, m]``, ``b`` an int, ``h [Hq,
    1, 1]``, ``i [N, 1]``, ``j [m]``.

    ``window``: keys ``j <= i - window`` become -inf whatever their score, and need not be read. ``built_in`` names those of
    :mod:`msattn.kernels.flash_decode.score_mod`; it is not for others.
    """

    kernel: Any
    reference: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    numbers: tuple[float, ...] = ()
    window: int | None = None
    built_in: str = ""
