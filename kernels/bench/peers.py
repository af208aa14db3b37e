"""Peers of the operations: dense SDPA backends, FlexAttention, eager PyTorch."""

import os
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from msattn.kernels.bench.cases import Function, Layer, Peer
from msattn.kernels.bench.rows import Shape, Work

DENSE_BACKENDS = {  # names in torch.nn.attention.SDPBackend
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
# the default is tiles of 128 queries
FLEX_TILES_64 = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4}
# in eager code: scores and probabilities, in fp32 and in the precision of the input
BYTES_PER_SCORE = 12


class PeerUnavailable(RuntimeError):
    """A peer cannot run on this machine; the message gives the reason."""


def dense(
    layers: Sequence[Layer],
    work: Work,
    *,
    causal: bool,
    setting: str = "",
    softcap: float | None = None,
) -> list[Peer]:
    """Returns a peer for each backend of ``scaled_dot_product_attention``, which cannot cap
    scores.
    """
    if softcap is not None:
        return []
    qkv = [layer[:3] for layer in layers]
    peers = []
    for name, backend in DENSE_BACKENDS.items():
        prepare = partial(_prepare_dense, backend, causal, qkv[0][0].device.type)
        peers.append(Peer(name, prepare, qkv, work, setting=setting))
    return peers


def _prepare_dense(backend: str, causal: bool, device: str) -> Function:
    if device == "cpu" and backend in (DENSE_BACKENDS["cudnn"], DENSE_BACKENDS["efficient"]):
        raise PeerUnavailable("PyTorch supports it on GPUs only")
    return partial(_dense, backend, causal)


def _dense(backend: str, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def eager(
    function: Function,
    layers: Sequence[Layer],
    work: Work,
    scores: int,
    backward: bool = False,
    setting: str = "",
) -> Peer:
    """Returns the operation in eager PyTorch as a peer.

    ``scores`` is the number of scores that are materialized; a backward pass needs twice as much
    memory for them. The peer is unavailable if memory is too small for them.
    """

    def prepare() -> Function:
        needed = scores * BYTES_PER_SCORE * (2 if backward else 1)
        free = _free_bytes(layers[0][0].device)
        if needed > free:
            raise PeerUnavailable(
                f"its scores need {needed / 1e9:,.0f} GB, {free / 1e9:,.0f} GB are free"
            )
        return function

    return Peer("eager", prepare, layers, work, setting=setting)


def _free_bytes(device: torch.device) -> int:
    """Returns the free bytes; on a GPU they include PyTorch's unused reserved memory."""
    if device.type == "cuda":
        return (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def flex(
    layers: Sequence[Layer],
    work: Work,
    block_mask: Tensor | None = None,
    *,
    coarse: bool = False,
    setting: str = "",
    sparsity: float = 0.0,
    softcap: float | None = None,
) -> Peer:
    """Returns compiled FlexAttention over all keys, or over the visible blocks of a mask, as a
    peer.

    ``block_mask`` is ``[1, Hq | Hkv | 1, T, T]``. ``coarse`` replaces it by a mask of 128-token
    blocks that reads about as many keys (:func:`coarsen`), because the backward pass of
    FlexAttention does not support blocks of 64.
    """
    q, call = layers[0][0], partial(_flex, score_mod=_flex_softcap(softcap))

    def prepare() -> Function:
        if block_mask is None:
            return call
        mask = coarsen(block_mask.tril()) if coarse else block_mask.tril()
        if mask.shape[1] > 1:
            mask = mask.repeat_interleave(q.shape[1] // mask.shape[1], 1)
        tiles = None if coarse or not q.is_cuda else FLEX_TILES_64
        return partial(
            call,
            block_mask=_flex_mask(mask, 128 if coarse else 64, q.shape[2]),
            kernel_options=tiles,
        )

    note = "in blocks of 128 tokens" if coarse else ""
    return Peer("flex", prepare, [layer[:3] for layer in layers], work, sparsity, setting, note)


def capped_setting(setting: str, softcap: float | None) -> str:
    """Returns the setting of a row with the limit of its scores, if any."""
    return setting if softcap is None else f"{setting}, softcap {softcap:g}".removeprefix(", ")


def _flex_softcap(softcap: float | None) -> Any:
    """Returns FlexAttention's ``score_mod`` that caps scores, or None."""
    return (
        None if softcap is None else lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)
    )


def _flex(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    import torch._functorch.config as functorch

    if q.requires_grad and not q.is_cuda:
        raise PeerUnavailable("PyTorch supports its backward pass on GPUs only")
    with functorch.patch(donated_buffer=False):  # the backward pass runs more than once
        return _compiled(q.shape, k.shape)(q, k, v, enable_gqa=True, **options)


@lru_cache(maxsize=1)
def _compiled(q_shape: torch.Size, k_shape: torch.Size) -> Function:
    """Compiles FlexAttention for these shapes.

    Earlier compilations are dropped: beyond its recompile limit PyTorch would refuse to compile.
    """
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def coarsen(mask: Tensor) -> Tensor:
    """Returns a mask of blocks twice as long that reads about as many keys.

    ``mask [..., T, T]`` is lower triangular. Each row keeps its fullest blocks, and the diagonal.
    """
    size = mask.shape[-1]
    odd = size % 2
    counts = (
        pad(mask.float(), (0, odd, 0, odd))
        .unflatten(-1, (-1, 2))
        .unflatten(-3, (-1, 2))
        .sum((-1, -3))
    )
    number = (counts.sum(-1, keepdim=True) / 4).round().clamp(min=1)
    diagonal = torch.eye(counts.shape[-1], dtype=torch.bool, device=mask.device)
    rank = counts.masked_fill(diagonal, torch.inf).argsort(dim=-1, descending=True).argsort(dim=-1)
    return (rank < number) & (counts > 0) | diagonal & (counts > 0)


def _flex_mask(mask: Tensor, block: int, tokens: int) -> Any:
    """Returns a lower triangular block mask as a FlexAttention ``BlockMask``.

    Diagonal blocks are partial (masked per token), the others are full.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
        return blocks.sum(-1).int(), blocks.byte().argsort(
            dim=-1, descending=True, stable=True
        ).int()

    diagonal = torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)
    return BlockMask.from_kv_blocks(
        *lists(mask & diagonal),
        *lists(mask & ~diagonal),
        BLOCK_SIZE=block,
        mask_mod=_causal,
        seq_lengths=(tokens, tokens),
    )


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def causal_pairs(shape: Shape) -> float:
    """Returns the number of causally visible scores, over all sequences and heads."""
    return shape.batch * shape.q_heads * shape.length * (shape.length + 1) / 2


def dense_work(shape: Shape, backward: bool) -> Work:
    """Returns the work of dense causal attention with as many queries as keys.

    The forward pass has 2 matrix products, the backward pass 5; inputs and results are moved once.
    """
    return attention_work(shape, causal_pairs(shape), backward)


def attention_work(shape: Shape, pairs: float, backward: bool) -> Work:
    """Returns the work of attention that reads ``pairs`` scores, over all heads."""
    tokens = shape.batch * shape.length
    rows = tokens * shape.q_heads * shape.head_size
    keys = 2 * tokens * shape.kv_heads * shape.head_size
    lse = 4 * tokens * shape.q_heads
    item = shape.dtype.itemsize
    if backward:  # reads q, out, dout, k, v; writes dq, dk, dv
        return Work(10 * shape.head_size * pairs, (4 * rows + 2 * keys) * item + lse)
    return Work(4 * shape.head_size * pairs, (2 * rows + keys) * item + lse)
