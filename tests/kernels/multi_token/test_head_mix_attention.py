"""Tests head_mix_attention alone: the range of scores and of heads; see also
test_mixed_scores.py.
"""

import pytest
import torch

from msattn.kernels.multi_token.head_mix_attention import head_mix_attention
from msattn.kernels.testing import random_qkv
from tests.kernels.shared import HALF


def test_scores_beyond_half_precision(device: str) -> None:
    """Scores saturate at the largest fp16 number, and nothing becomes NaN."""
    q, k, v = random_qkv(1, 2, 1, 40, head_size=16, dtype=HALF, device=device)
    k[:, :, 3] = q[:, :1, 30] * 40
    inputs = [200 * q, 40 * k, v, torch.eye(2, dtype=HALF, device=device)]
    leaves = [x.requires_grad_() for x in inputs]
    out = head_mix_attention(*leaves, backend="triton")
    gradients = torch.autograd.grad(out.sum(), leaves)
    torch.testing.assert_close(out[:, :1, 30], v[:, :, 3])
    assert all(x.isfinite().all() for x in gradients)


def test_rejects_more_heads_than_the_kernels_support(device: str) -> None:
    q, k, v = random_qkv(1, 129, 1, 3, head_size=8, device=device)
    weight = torch.eye(129, device=device)
    assert head_mix_attention(q, k, v, weight, backend="torch").isfinite().all()
    with pytest.raises(ValueError, match=r"q.shape=\(1, 129, 3, 8\)"):
        head_mix_attention(q, k, v, weight, backend="triton")
