"""Result types shared by every operation of :mod:`msattn.kernels`.

Shapes follow one notation: ``B`` batch, ``Hq`` query heads, ``Hkv`` key/value heads, ``N`` queries, ``M`` keys, ``D`` head
size, ``Tr``/``Tc`` row/column blocks, ``C`` buckets, ``L`` probes. Every ``lse`` is the natural logarithm of the sum of
exponentials of the scaled scores, in fp32 (fp64 for fp64 input); a row that sees nothing has ``out = 0``, ``lse = -inf``.
"""

from typing import Literal, NamedTuple

from torch import Tensor

Backend = Literal["triton", "torch"]


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


class BucketIndex(NamedTuple):
    """Which keys each bucket holds: the keys of bucket c are ``order[..., offsets[..., c] : offsets[..., c + 1]]``.

    ``offsets`` int32 ``[B, Hkv, C + 1]``; ``order`` int32 ``[B, Hkv, n]``, absolute cache positions.
    """

    offsets: Tensor
    order: Tensor
