"""Block-sparse attention of packed queries over a paged cache, for chunked prefill."""

import torch
from torch import Tensor

from msattn.kernels import reference
from msattn.kernels.common.checks import resolve_backend, resolve_scale, resolve_softcap, statistics_dtype
from msattn.kernels.common.paged_checks import check_paged_block_sparse_attention
from msattn.kernels.types import Backend, PagedKeys, SparseAttention


def paged_block_sparse_attention(
    q: Tensor,
    cache: PagedKeys,
    cu_queries: Tensor,
    block_mask: Tensor | None,
    *,
    max_queries: int,
    block_size: int = 64,
    scale: float | None = None,
    softcap: float | None = None,
    backend: Backend | None = None,
) -> SparseAttention:
    """Computes causal attention of packed queries over the selected blocks of a paged cache.

    Sequences of different lengths share a call, as chunks of prompts do in continuous batching. Query i of sequence b has
    position ``cache.kv_len[b] - n + i``, where n is its number of queries in the call. Blocks of queries are counted from the
    first of them, blocks of keys from position 0. A block may span several pages, and a page several blocks.

    Parameters
    ----------
    q : Tensor ``[T, Hq, D]``
        Queries of all sequences, one sequence after the other; fp32, fp16 or bf16 (fp64 on the torch backend).
    cache : PagedKeys
        Keys and values, the queries' own included. Query head h reads head ``h // (Hq // Hkv)``. Not copied.
    cu_queries : Tensor int32 ``[B + 1]``
        Sequence b has the queries ``cu_queries[b] : cu_queries[b + 1]``, possibly none, at most as many as keys.
    block_mask : Tensor bool ``[B, Hq | Hkv | 1, ceil(max_queries / block), ceil(pages * page_size / block)]``, optional
        True selects the block; what is past the end of a sequence or above the diagonal is not read. None selects all blocks.
    max_queries : int
        Upper bound of the number of queries of a sequence.
    block_size : int
        Tokens in a block: 16, 32, 64 or 128.
    scale : float, optional
        Positive factor of the scores; ``D ** -0.5`` by default.
    softcap : float, optional
        Positive limit of the scores, which become ``softcap * tanh(score / softcap)`` before masking (Gemma 2).
    backend : {"triton", "torch"}, optional
        Triton for CUDA tensors and the reference for CPU tensors by default.

    Returns
    -------
    SparseAttention
        ``out [T, Hq, D]``, ``lse [T, Hq]`` (natural logarithm, fp32); 0 and -inf for rows that read no key and for rows
        after the last sequence.

    Raises
    ------
    ValueError
        If an argument is invalid. The values of tensors (offsets, lengths, pages) are checked by the reference alone.
    NotImplementedError
        In the backward pass, as the operation is for inference.
    """
    check_paged_block_sparse_attention(q, cache, cu_queries, block_mask, max_queries, block_size)
    scale, softcap = resolve_scale(scale, q.shape[2]), resolve_softcap(softcap)
    backend = resolve_backend(backend, q)
    arguments = (q, *cache, cu_queries, block_mask, max_queries, block_size, scale, softcap, backend)
    return SparseAttention(*_operator(*arguments))


@torch.library.custom_op("msattn::paged_block_sparse_attention", mutates_args=())
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    kv_len: Tensor,
    cu_queries: Tensor,
    block_mask: Tensor | None,
    max_queries: int,
    block_size: int,
    scale: float,
    softcap: float | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    if backend == "triton":
        raise NotImplementedError("the Triton kernel of paged_block_sparse_attention is not written yet: use backend='torch'")
    return reference.paged_block_sparse_attention(
        q, PagedKeys(k, v, table, kv_len), cu_queries, block_mask,
        max_queries=max_queries, block_size=block_size, scale=scale, softcap=softcap,
    )  # fmt: skip


@_operator.register_fake
def _(q, *others):
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=statistics_dtype(q))


def _backward(ctx, dout, dlse):
    raise NotImplementedError(
        "paged_block_sparse_attention is for inference and has no gradient: detach its inputs, or use torch.no_grad()"
    )


_operator.register_autograd(_backward)
