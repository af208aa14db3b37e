"""Decoding over a dense window and probed buckets of a paged cache, by a scan of bucket ids."""

import torch
from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.common.checks import resolve_backend, resolve_scale, resolve_softcap, statistics_dtype
from msattn.kernels.common.paged_checks import check_paged_bucket_decode
from msattn.kernels.types import Backend, PagedKeys, SparseAttention


def paged_bucket_decode(
    q: Tensor,
    cache: PagedKeys,
    buckets: Tensor | int,
    probes: Tensor,
    *,
    recent: int | Tensor,
    sink: int = 1,
    scale: float | None = None,
    softcap: float | None = None,
    counts: Tensor | None = None,
    backend: Backend | None = None,
) -> SparseAttention:
    """Computes a decoding step over the dense window and probed buckets of a paged cache.

    The result is that of ``bucket_decode`` on the gathered cache. Every key counts once, even if its bucket is probed twice or
    it is in the dense window.

    Parameters
    ----------
    q : Tensor ``[B, Hq, 1, D]``
        Query of the newest token, at position ``cache.kv_len - 1``; fp32, fp16 or bf16 (fp64 on the torch backend).
    cache : PagedKeys
        The cache, keys after RoPE; query head h reads head ``h // (Hq // Hkv)``. Its views are not copied.
    buckets : Tensor int16 ``[P, page_size, Hkv]`` or int
        Bucket of each slot, -1 for none. An int S makes every S positions of a sequence a bucket: bucket c holds the positions
        ``c * S`` to ``(c + 1) * S - 1``, as for a decode gate.
    probes : Tensor int32 ``[B, Hkv, L]``
        Buckets to read, shared by a query group. -1, or a number that is no bucket, reads nothing; L may be 0.
    recent : int or Tensor int32 ``[B]``
        Number of newest keys that are always read; a tensor if sequences differ, or if it changes between replays of a CUDA
        graph.
    sink : int
        Number of first keys that are always read.
    scale : float, optional
        Factor of the scores, positive; ``D ** -0.5`` by default.
    softcap : float, optional
        Positive limit of the scores, which become ``softcap * tanh(score / softcap)`` (Gemma 2).
    counts : Tensor int64 ``[B, Hkv]``, optional
        The number of keys read for each key/value head is added to it, in place. Contiguous.
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    SparseAttention
        ``out [B, Hq, 1, D]``, ``lse [B, Hq, 1]`` (natural logarithm, fp32); 0 and -inf for a sequence without keys.

    Raises
    ------
    ValueError
        If an argument is invalid. The values of ``cache.table`` and ``cache.kv_len`` are checked by the reference alone.
    NotImplementedError
        In the backward pass, as the operation is for inference; with ``counts`` it is PyTorch's RuntimeError.
    """
    check_paged_bucket_decode(q, cache, buckets, probes, recent, sink, counts)
    scale, softcap = resolve_scale(scale, q.shape[3]), resolve_softcap(softcap)
    backend = resolve_backend(backend, q)
    recent_of, recent = (recent, 0) if isinstance(recent, Tensor) else (None, recent)
    bucket_of, block_size = (buckets, 0) if isinstance(buckets, Tensor) else (None, buckets)
    arguments = (q, *cache, bucket_of, block_size, probes, recent_of, recent, sink, scale, softcap, backend)
    return SparseAttention(*(_operator(*arguments) if counts is None else _counting_operator(*arguments, counts)))


def _compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    kv_len: Tensor,
    bucket_of: Tensor | None,
    block_size: int,
    probes: Tensor,
    recent_of: Tensor | None,
    recent: int,
    sink: int,
    scale: float,
    softcap: float | None,
    backend: str,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if backend == "triton":
        raise NotImplementedError
    return reference.paged_bucket_decode(
        q, PagedKeys(k, v, table, kv_len), block_size if bucket_of is None else bucket_of, probes,
        recent=recent if recent_of is None else recent_of, sink=sink, scale=scale, softcap=softcap, counts=counts,
    )  # fmt: skip


# PyTorch registers a backward pass only for operators that mutate nothing, hence two operators.
_operator = torch.library.custom_op("msattn::paged_bucket_decode", _compute, mutates_args=())
_counting_operator = torch.library.custom_op("msattn::paged_bucket_decode_counts", _compute, mutates_args=("counts",))


@_operator.register_fake
@_counting_operator.register_fake
def _(q, *others):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=statistics_dtype(q))


def _backward(ctx, dout, dlse):
    raise NotImplementedError(
        "paged_bucket_decode is for inference and has no gradient: detach its inputs, or use torch.no_grad()"
    )


_operator.register_autograd(_backward)
