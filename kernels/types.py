"""Types that are shared by the operations of :mod:`msattn.kernels`.

Shapes follow one notation: ``B`` batch, ``Hq`` query heads, ``Hkv`` key/value heads, ``N`` queries,
``M`` keys, ``D`` head size, ``Tr``/``Tc`` row/column blocks, ``C`` buckets, ``L`` probes. Every
``lse`` is the natural logarithm of the sum of exponentials of the scaled scores, in fp32 (fp64 for
fp64 input); a row that sees nothing has ``out = 0``, ``lse = -inf``.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor

Backend = Literal["triton", "torch"]
Variant = Literal["partial", "global"]  # for flash_decode
Pool = Literal["max", "mass", "mean_mass"]  # for maxpool_attention
ConvMask = Literal["query", "key"]  # for conv_attention


class SparseAttention(NamedTuple):
    """Result of sparse attention, and of operations that return the LSE with their output.

    ``out [B, Hq, N, D]`` has the dtype of q; ``lse`` is ``[B, Hq, N]``.
    """

    out: Tensor
    lse: Tensor


class MaxPoolAttention(NamedTuple):
    """Result of dense attention and its block map.

    ``out [B, Hq, N, D]`` has the dtype of q; ``lse`` is ``[B, Hq, N]``, ``pooled`` fp32
    ``[B, Hq, Tr, Tc]``.
    """

    out: Tensor
    lse: Tensor
    pooled: Tensor


class BucketMass(NamedTuple):
    """Attention mass of each bucket.

    ``mass`` is fp32 ``[B, Hq, n_q, C]``, ``lse`` ``[B, Hq, n_q]``. ``top_key``, int32
    ``[B, Hq, n_q]``, is the index of the key with the highest score, or -1 for a query that sees no
    key.
    """

    mass: Tensor
    lse: Tensor
    top_key: Tensor


class NearestCentroid(NamedTuple):
    """Nearest centroid of each key, or the nearest ones.

    ``buckets``, int32 ``[B, H, M]``, is the index of the centroid, and ``products``, fp32
    ``[B, H, M]``, its dot product with the key. Several have another dimension: ``[B, H, M, L]``.
    """

    buckets: Tensor
    products: Tensor


class BucketSums(NamedTuple):
    """Sum and number of the keys in each bucket.

    ``sums`` is fp32 ``[B, H, C, D]``, ``counts`` int32 ``[B, H, C]``.
    """

    sums: Tensor
    counts: Tensor


class BucketIndex(NamedTuple):
    """Keys of each bucket, in compressed (CSR) form.

    Bucket c holds the keys ``order[..., offsets[..., c] : offsets[..., c + 1]]``.
    ``offsets [B, Hkv, C + 1]`` and ``order [B, Hkv, n]`` are int32; ``order`` holds absolute cache
    positions.
    """

    offsets: Tensor
    order: Tensor


class PagedKeys(NamedTuple):
    """Paged cache of keys and values.

    ``k, v [P, page_size, Hkv, D]`` may have any strides but a contiguous last dimension, such as
    views of one buffer of all layers. Logical page p of sequence b is page ``table[b, p]`` of the
    cache: ``table`` is int32 ``[B, pages]``, and its entries past the end of a sequence are not
    read. ``kv_len``, int32 ``[B]``, is the number of filled positions, the queries' own keys
    included. A slot is a position of the physical cache, ``page * page_size + offset``.

    Both k and v may be ``torch.float8_e4m3fn`` instead of the dtype of the queries, on GPUs from
    compute capability 8.9. Their numbers are then ``k * k_scale`` and ``v * v_scale``: positive
    fp32 tensors with one element, or with one for each key/value head. None is 1.
    """

    k: Tensor
    v: Tensor
    table: Tensor
    kv_len: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class ScoreMod(NamedTuple):
    """Modifies scaled scores before masking.

    It computes ``score = mod(score, b, h, i, j, *tensors, *numbers)``: ``b`` is the sequence, ``h``
    the query head, ``i`` and ``j`` the positions of query and key in the cache, padding included.
    Scores that are masked later are passed too, with valid positions (``0 <= j < M``, ``0 <= i``,
    and ``i < M`` unless there are more queries than keys), so that loads by position need no mask.
    A score of -inf hides the key.

    Attributes
    ----------
    kernel
        ``triton.jit`` function of a tile, whose rows are the packed heads and queries of a group.
        It maps ``score`` fp32 ``[rows, keys]`` to the same shape; ``b`` is a scalar, ``h`` and
        ``i`` are int32 ``[rows, 1]``, ``j`` is int32 ``[1, keys]``, and each tensor is passed as a
        pointer.
    reference
        The same function in PyTorch: ``score [Hq, N, m]``, ``b`` an int, ``h [Hq, 1, 1]``,
        ``i [N, 1]``, ``j [m]``.
    tensors, numbers
        Further arguments of both functions.
    window
        Keys ``j <= i - window`` may be skipped by the kernel. The functions must return -inf for
        them.
    built_in
        Name of a modification of :mod:`msattn.kernels.flash_decode.score_mod`. Must be empty for
        custom ones.
    """

    kernel: Any
    reference: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    numbers: tuple[float, ...] = ()
    window: int | None = None
    built_in: str = ""
