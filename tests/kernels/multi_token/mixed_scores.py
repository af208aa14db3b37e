"""Definitions of conv_attention, conv_decode and head_mix_attention, and the check of the first and
the last.
"""

import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from msattn.kernels.multi_token.conv_attention import conv_attention
from msattn.kernels.multi_token.conv_attention import operation as convolution
from msattn.kernels.multi_token.head_mix_attention import head_mix_attention, scores
from msattn.kernels.multi_token.head_mix_attention import operation as head_mix
from msattn.kernels.testing import assert_within_budget, starts
from msattn.kernels.types import Backend, ConvMask
from tests.kernels import shared
from tests.kernels.problems import (
    Case,
    Rounding,
    assert_sum_within_budget,
    gradient_rounding,
    largest_term,
)

RESULTS = ("out", "dq", "dk", "dv", "dweight")
Size = tuple[int, int]


class Mixing(NamedTuple):
    """An operation that mixes scores before softmax.

    Attributes
    ----------
    definition : the output, computed eagerly with all scores in memory.
    module : module of the custom operators.
    mixed_dims : dimensions of the weight over which a score is mixed.
    pairs : pairs of query and key that a gradient of the weight accumulates in sequence, by the
        number of heads.
    masks : values of ``mask``, None without this argument.
    """

    attend: Callable[..., Tensor]
    definition: Callable[..., Tensor]
    random_weight: Callable[[int, Size, torch.dtype, str], Tensor]
    module: ModuleType
    mixed_dims: tuple[int, ...]
    pairs: Callable[[int], int]
    masks: tuple[ConvMask | None, ...]


def roundings(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, dout: Tensor, mixed: float, pairs: int
) -> dict[str, Rounding]:
    """Returns the expected rounding errors of output and gradients.

    They are those of plain attention, times ``mixed``, the sum of the absolute weights of a score.
    A gradient of the weight accumulates ``pairs`` pairs of query and key in sequence.
    """
    scale, one = q.shape[3] ** -0.5, weight.new_ones(1)
    plain = dict(zip(("dq", "dk", "dv"), gradient_rounding(q, k, v, dout, scale), strict=True))
    largest_dscore, largest_score = largest_term(dout, v, one, 1.0), largest_term(q, k, one, scale)
    return {
        **{
            name: Rounding(mixed * rounding.term, rounding.count)
            for name, rounding in plain.items()
        },
        "out": Rounding(mixed * v.abs().max().item(), 1),
        "dweight": Rounding(largest_dscore * largest_score, pairs),
    }


def check(
    operation: str,
    case: Case,
    backend: Backend,
    device: str,
    size: Size = (2, 3),
    mask: ConvMask | None = None,
    weight_dtype: torch.dtype | None = None,
) -> None:
    """Checks that output and gradients agree with the definition in fp64; of a convolution,
    ``size`` are queries and keys of its weight.

    They are exactly 0 for queries without visible keys. Padding holds NaN.
    """
    mixing, options = MIXINGS[operation], {} if mask is None else {"mask": mask}
    weight = mixing.random_weight(case.q_heads, size, weight_dtype or case.dtype, device)
    mixed = weight.abs().sum(mixing.mixed_dims).max().item()
    q, k, v = case.qkv(device)
    leaves = [*shared.fill_padding(case, q, k, v), weight.requires_grad_()]
    options |= {"causal": case.causal, "kv_start": starts(case.padding, device)}
    out = mixing.attend(*leaves, **options, backend=backend)
    dout = torch.randn_like(out)
    got = out.detach(), *torch.autograd.grad(out, leaves, dout)
    seen = case.visible(device)
    wanted, eager = (
        with_gradients(mixing, (q, k, v, weight), seen, dout, dtype, mask)
        for dtype in (torch.float64, case.dtype)
    )
    rounding = roundings(q, k, v, weight.detach(), dout, mixed, mixing.pairs(case.q_heads))
    for name, x, x_exact, x_eager in zip(RESULTS, got, wanted, eager, strict=True):
        assert x.dtype == (weight.dtype if name == "dweight" else case.dtype)
        within_budget = assert_sum_within_budget if name == "dweight" else assert_within_budget
        # The gradient of an fp32 weight is a sum of products in the dtype of the scores.
        within_budget(name, x.to(case.dtype), x_exact, x_eager, **rounding[name]._asdict())
    empty = ~seen.any(-1).expand(out.shape[:3])
    assert (got[0][empty] == 0).all()
    assert (got[1][empty] == 0).all()


def with_gradients(
    mixing: Mixing,
    inputs: Sequence[Tensor],
    seen: Tensor,
    dout: Tensor,
    dtype: torch.dtype,
    mask: ConvMask | None,
) -> tuple[Tensor, ...]:
    """Returns the output of the definition and the gradients of q, k, v and weight.

    In fp64 each query has its own copy of the weight, with its own gradient.
    """
    if dtype == torch.float64:
        weight = inputs[3]
        inputs = [*inputs[:3], weight.expand(dout.shape[2], *weight.shape)]
    q, k, v, weight = leaves = [x.detach().to(dtype).clone().requires_grad_() for x in inputs]
    options = {} if mask is None else {"mask": mask}
    out = mixing.definition(q, k, v, weight, seen, q.shape[3] ** -0.5, dtype, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))


def shifted(x: Tensor, up: int, right: int) -> Tensor:
    """Returns ``x[..., i - up, j + right]``, 0 outside."""
    padded = torch.nn.functional.pad(x, (max(-right, 0), max(right, 0), up, 0))
    return padded[..., : x.shape[-2], max(right, 0) : max(right, 0) + x.shape[-1]]


def convolved_scores(
    q: Tensor,
    k: Tensor,
    weight: Tensor,
    seen: Tensor,
    scale: float,
    dtype: torch.dtype,
    mask: ConvMask,
) -> Tensor:
    """Computes the convolved scores eagerly in ``dtype``, all in memory; -inf where they are
    masked.

    ``weight`` is ``[Hq, c_q, c_k]``, or ``[N, Hq, c_q, c_k]`` with one for each query.
    """
    statistics = torch.promote_types(dtype, torch.float32)
    q, k, weight = (x.to(dtype) for x in (q, k, weight))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    counts = seen if mask == "query" else seen.any(-1, keepdim=True)
    scores = torch.where(counts, (q @ k.mT).to(statistics) * scale, 0).to(dtype)
    window, taps = weight.shape[-2:]
    weight = weight.expand(q.shape[2], *weight.shape[-3:])
    mixed = torch.zeros_like(scores, dtype=statistics)
    for a, c in itertools.product(range(window), range(taps)):
        up, right = window - 1 - a, c - (taps - 1) // 2
        moved = shifted(scores, up, right)
        if mask == "key":
            moved = moved * shifted(seen, 0, right)
        mixed = mixed + weight[:, :, a, c].T[..., None] * moved
    return mixed.masked_fill(~seen, -torch.inf)


def convolved_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    seen: Tensor,
    scale: float,
    dtype: torch.dtype,
    mask: ConvMask = "query",
) -> Tensor:
    """Computes the definition eagerly in ``dtype``. Rows without visible keys are 0."""
    scores = convolved_scores(q, k, weight, seen, scale, dtype, mask).masked_fill(
        ~seen.any(-1, keepdim=True), 0
    )
    return scores.softmax(-1).masked_fill(~seen, 0).to(dtype) @ v.to(dtype).repeat_interleave(
        q.shape[1] // v.shape[1], 1
    )


def random_convolution(heads: int, size: Size, dtype: torch.dtype, device: str) -> Tensor:
    """Random kernels that preserve the magnitude of scores."""
    return (torch.randn(heads, *size) / (size[0] * size[1]) ** 0.5).to(device, dtype)


def random_mix(heads: int, size: Size, dtype: torch.dtype, device: str) -> Tensor:
    """Random weight near the identity, from which training starts."""
    return (torch.eye(heads) + torch.randn(heads, heads) / (2 * heads**0.5)).to(device, dtype)


def mixed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    seen: Tensor,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """Computes the definition of head_mix_attention eagerly in ``dtype``. Rows without visible keys
    are 0.

    ``weight`` is ``[Hq, Hq]``, or ``[N, Hq, Hq]`` with one for each query.
    """
    by_query = weight.expand(q.shape[2], -1, -1)
    statistics = torch.promote_types(dtype, torch.float32)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT) * scale
    mixed = torch.stack(
        [(by_query[:, h].T[..., None] * scores).sum(1) for h in range(q.shape[1])], 1
    ).to(statistics)
    mixed = mixed.masked_fill(~seen & seen.any(-1, keepdim=True), -torch.inf)
    return mixed.softmax(-1).masked_fill(~seen, 0).to(dtype) @ v


def pairs_of_mix(heads: int) -> int:
    tile = scores.mix_backward_tile(heads)
    return tile.rows * tile.keys


MIXINGS = {
    "conv_attention": Mixing(
        conv_attention,
        convolved_attention,
        random_convolution,
        convolution,
        (1, 2),
        lambda heads: 1,
        ("query", "key"),
    ),
    "head_mix_attention": Mixing(
        head_mix_attention, mixed_attention, random_mix, head_mix, (0,), pairs_of_mix, (None,)
    ),
}
