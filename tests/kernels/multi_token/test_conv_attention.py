"""Tests conv_attention alone: its masks, and later tokens; see also test_mixed_scores.py."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from msattn.kernels.multi_token.conv_attention import conv_attention
from msattn.kernels.testing import random_qkv
from msattn.kernels.types import Backend, ConvMask
from tests.kernels import shared
from tests.kernels.multi_token.mixed_scores import random_convolution
from tests.kernels.shared import BACKENDS, FULL, HALF


def literal_attention(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, counts: Callable[[int, int, int], bool]
) -> Tensor:
    """Computes causal attention in fp64, score by score; ``counts(i, row, key)`` chooses the scores
    that enter output row i.
    """
    q, k, v, weight = (x.double() for x in (q, k, v, weight))
    tokens, (window, taps) = q.shape[2], weight.shape[1:]
    scores = q @ k.mT * q.shape[3] ** -0.5
    mixed = torch.full_like(scores, -torch.inf)
    for i, j in itertools.product(range(tokens), repeat=2):
        if j <= i:
            places = [
                (a, c, i - window + 1 + a, j - (taps - 1) // 2 + c)
                for a in range(window)
                for c in range(taps)
            ]
            inside = [
                at for at in places if min(at[2:]) >= 0 and at[3] < tokens and counts(i, *at[2:])
            ]
            mixed[:, :, i, j] = sum(
                (weight[:, a, c] * scores[:, :, row, key] for a, c, row, key in inside),
                torch.zeros(()),
            )
    return mixed.softmax(-1) @ v


def own_query(_: int, row: int, key: int) -> bool:
    """The reading of ``mask="query"``: a score counts unless its key comes after its own query."""
    return key <= row


def output_query(i: int, _: int, key: int) -> bool:
    """The printed formula of the paper, ``mask="key"``: a score counts unless its key comes after
    the output's query.
    """
    return key <= i


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_are_the_readings_of_the_paper(backend: Backend, device: str) -> None:
    """The two readings of the causal mask differ on normal inputs."""
    q, k, v = random_qkv(1, 2, 2, 14, head_size=16, device="cpu")
    weight = random_convolution(2, (4, 5), FULL, "cpu")
    own, printed = (
        literal_attention(q, k, v, weight, counts) for counts in (own_query, output_query)
    )
    masks: tuple[ConvMask, ConvMask] = ("query", "key")
    for mask, want in zip(masks, (own, printed), strict=True):
        got = (
            conv_attention(*(x.to(device) for x in (q, k, v, weight)), mask=mask, backend=backend)
            .cpu()
            .double()
        )
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert (printed - own).norm() > 0.1 * own.norm()
    assert ((printed - own).abs().amax((1, 3))[0, 1:] > 1e-3).all(), (
        "every row but the first, which has one key"
    )


@pytest.mark.parametrize("mask", ["query", "key"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_later_tokens_have_no_influence(backend: Backend, mask: ConvMask, device: str) -> None:
    """The results of earlier queries are bitwise equal."""
    q, k, v = random_qkv(1, 1, 1, 40, head_size=16, dtype=HALF, device=device)
    weight = random_convolution(1, (3, 4), HALF, device)
    before = conv_attention(q, k, v, weight, mask=mask, backend=backend)[:, :, :30]
    for x in (q, k, v):
        x[:, :, 30:] *= 3
    shared.assert_same(
        conv_attention(q, k, v, weight, mask=mask, backend=backend)[:, :, :30], before
    )
