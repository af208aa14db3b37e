"""Attention of a few queries over a long paged cache (flash decoding).

The kernels are those of :mod:`msattn.kernels.common.dense_decode`, in their variant "partial".
"""

from torch import Tensor

from msattn.kernels.common import dense_decode
from msattn.kernels.common.checks import resolve_backend, resolve_scale, resolve_softcap
from msattn.kernels.common.paged_checks import check_paged_decode
from msattn.kernels.common.registration import USE_NO_GRAD, empty_decoding, on_pages, register_op
from msattn.kernels.common.softcap import softcap_mod
from msattn.kernels.reference import paged as reference
from msattn.kernels.types import Backend, PagedKeys, SparseAttention


def paged_flash_decode(
    q: Tensor,
    cache: PagedKeys,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    backend: Backend | None = None,
) -> SparseAttention:
    """Computes exact causal attention of a few queries over a paged cache.

    The result is that of causal ``flash_decode`` on the gathered cache.

    Parameters
    ----------
    q : Tensor ``[B, Hq, N, D]``
        Queries of the newest N tokens, at positions ``cache.kv_len - N`` to ``cache.kv_len - 1``;
        fp32, fp16 or bf16 (fp64 on the torch backend). A query sees no key after itself. Fast for 1
        to 16 queries, correct for any number.
    cache : PagedKeys
        The cache; query head h reads head ``h // (Hq // Hkv)``. Its views are not copied.
    scale : float, optional
        Factor of the scores, positive; ``D ** -0.5`` by default.
    softcap : float, optional
        Positive limit of the scores, which become ``softcap * tanh(score / softcap)`` (Gemma 2).
    backend : {"triton", "torch"}, optional
        By default Triton for CUDA tensors, the reference for CPU tensors.

    Returns
    -------
    SparseAttention
        ``out [B, Hq, N, D]``, ``lse [B, Hq, N]`` (natural logarithm, fp32); 0 and -inf for queries
        without visible keys.

    Raises
    ------
    ValueError
        If an argument is invalid. The values of ``cache.table`` and ``cache.kv_len`` are checked
        only by the reference.
    NotImplementedError
        In the backward pass, as the operation is for inference.
    """
    check_paged_decode(q, cache)
    scale, softcap = resolve_scale(scale, q.shape[3]), resolve_softcap(softcap)
    return SparseAttention(*_operator(q, *cache, scale, softcap, resolve_backend(backend, q)))


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    kv_len: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Launches the kernels of ``flash_decode`` on pages."""
    score_mod = None if softcap is None else softcap_mod(softcap)
    table = table if table.stride(1) == 1 else table.contiguous()
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [P, Hkv, page_size, D]
    return dense_decode.launch(
        q, k, v, score_mod, None, kv_len, "partial", True, scale, None, table, (k_scale, v_scale)
    )


_operator = register_op(
    "paged_flash_decode",
    launch,
    on_pages(reference.paged_flash_decode),
    empty_decoding,
    no_gradient=USE_NO_GRAD,
)
