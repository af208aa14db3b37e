"""Attention of a few queries over a long cache (flash decoding): the operation.

    s_ij  = score_mod(scale * q_i k_j), -inf where i does not see j
    out_i = softmax_j(s_ij) v_j

The kernels are those of :mod:`msattn.kernels.common.dense_decode`.
"""

from typing import Any, get_args

import torch
from torch import Tensor

from msattn.kernels.common import dense_decode
from msattn.kernels.common.checks import (
    check_device,
    check_per_sequence,
    check_qkv,
    check_splits,
    resolve_backend,
    resolve_scale,
)
from msattn.kernels.common.registration import USE_NO_GRAD, empty_decoding, register_op
from msattn.kernels.flash_decode.score_mod import built_in
from msattn.kernels.reference import flash_decode as reference
from msattn.kernels.types import Backend, ScoreMod, SparseAttention, Variant


def flash_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    variant: Variant = "partial",
    causal: bool = False,
    score_mod: ScoreMod | None = None,
    scale: float | None = None,
    kv_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    splits: int | None = None,
    backend: Backend | None = None,
) -> SparseAttention:
    """Computes exact attention of a few queries over a long cache (flash decoding).

    The keys are divided among as many programs as the GPU runs at once.

    Parameters
    ----------
    q : Tensor ``[B, Hq, N, D]``
        Queries of the newest N tokens, at positions ``kv_len - N`` to ``kv_len - 1``; fp32, fp16 or
        bf16 (fp64 on the torch backend). Fast for 1 to 16 queries, correct for any number.
    k, v : Tensor ``[B, Hkv, M, D]``
        The cache; query head h reads head ``h // (Hq // Hkv)``. Strided views are not copied.
    variant : {"partial", "global"}
        "partial" keeps a row maximum per split and rescales when splits are merged; "global" finds
        the row maxima of all splits in a first pass over the keys. Both are exact.
    causal : bool
        If True, a query sees no key after itself, as for speculative decoding; else all queries see
        all keys.
    score_mod : ScoreMod, optional
        Modifies the scaled scores before masking. :mod:`msattn.kernels.flash_decode.score_mod` has
        softcap, alibi and sliding_window; :class:`msattn.kernels.types.ScoreMod` describes custom
        ones, which break the graph under ``torch.compile``.
    scale : float, optional
        Factor of the scores, positive; ``D ** -0.5`` by default.
    kv_start : Tensor int32 ``[B]``, optional
        Left padding: positions before each sequence.
    kv_len : Tensor int32 ``[B]``, optional
        Number of filled positions among the M, padding included; all by default.
    splits : int, optional
        Number of parts that the keys are divided into; by default chosen from shapes and GPU, so
        that a captured CUDA graph serves any length.
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
        If an argument is invalid. The values of ``kv_start`` and ``kv_len`` are checked only by the
        reference; the kernel reads only inside the cache for any values.
    NotImplementedError
        In the backward pass, as the operation is for inference.
    """
    check_qkv(q, k, v)
    check_per_sequence(q, kv_start=kv_start, kv_len=kv_len)
    check_splits(splits)
    if variant not in get_args(Variant):
        raise ValueError(f"variant={variant!r}: expected 'partial' or 'global'")
    for n, x in enumerate(score_mod.tensors if score_mod else ()):
        check_device(f"score_mod.tensors[{n}]", x, "q", q)
    if score_mod and score_mod.built_in == "alibi" and score_mod.tensors[0].shape != q.shape[1:2]:
        raise ValueError(
            f"score_mod: alibi has {len(score_mod.tensors[0])} slopes, expected {q.shape[1]}, one "
            f"per head"
        )
    scale = resolve_scale(scale, q.shape[3])
    backend = resolve_backend(backend, q)
    options = (kv_start, kv_len, variant, causal, scale, splits, backend)
    if score_mod is not None and not score_mod.built_in:
        return SparseAttention(*_run_with_custom_mod(q, k, v, score_mod, *options))  # type: ignore[call-arg]
    name, tensors, numbers = (
        (score_mod.built_in, score_mod.tensors, score_mod.numbers) if score_mod else ("", (), ())
    )
    return SparseAttention(
        *_operator(q, k, v, name, list(tensors), [float(x) for x in numbers], *options)
    )


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mod: str,
    mod_tensors: list[Tensor],
    mod_numbers: list[float],
    kv_start: Tensor | None,
    kv_len: Tensor | None,
    variant: str,
    causal: bool,
    scale: float,
    splits: int | None,
) -> tuple[Tensor, Tensor]:
    """Launches the kernels with the built-in modification of this name, or none."""
    score_mod = built_in(mod, mod_tensors, mod_numbers)
    return dense_decode.launch(q, k, v, score_mod, kv_start, kv_len, variant, causal, scale, splits)


def _reference(
    *, mod: str, mod_tensors: list[Tensor], mod_numbers: list[float], **others: Any
) -> SparseAttention:
    return reference.flash_decode(score_mod=built_in(mod, mod_tensors, mod_numbers), **others)


_operator = register_op("flash_decode", launch, _reference, empty_decoding, no_gradient=USE_NO_GRAD)


class _WithCustomMod(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, score_mod, kv_start, kv_len, variant, causal, scale, splits, backend):
        if backend == "triton":
            with torch.cuda.device_of(q):
                return dense_decode.launch(
                    q, k, v, score_mod, kv_start, kv_len, variant, causal, scale, splits
                )
        return reference.flash_decode(
            q, k, v, variant=variant, causal=causal, score_mod=score_mod, scale=scale,
            kv_start=kv_start, kv_len=kv_len, splits=splits,
        )  # fmt: skip

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(f"flash_decode has no gradient: {USE_NO_GRAD}")


def _run_with_custom_mod(*arguments) -> tuple[Tensor, Tensor]:
    """Runs the kernels without the operator, whose schema cannot hold functions, and outside
    compiled graphs.
    """
    # As a decorator, torch.compiler.disable would import the compiler, which takes seconds,
    # whenever this module is imported.
    run = (
        torch.compiler.disable(_WithCustomMod.apply)
        if torch.compiler.is_compiling()
        else _WithCustomMod.apply
    )
    return run(*arguments)  # type: ignore[return-value]
