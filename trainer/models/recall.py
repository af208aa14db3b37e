"""Recall: the share of the attention mass in what sparse attention reads."""

import torch
from torch import Tensor


def attention_recall(lse: Tensor, dense_lse: Tensor) -> Tensor:
    """Returns the recall of each head: fp32 ``[H]``, the mean over batch and queries.

    A query reads ``exp(lse - dense_lse)`` of its attention mass, at most 1.

    Parameters
    ----------
    lse, dense_lse : fp32 ``[B, H, N]``, log-sum-exp of the scores of sparse and of dense attention over the same inputs. Rows
        whose ``dense_lse`` is -inf (padding) do not count.
    """
    real = dense_lse > -torch.inf
    share = (lse - dense_lse).exp().clamp(max=1).masked_fill(~real, 0)
    return share.sum((0, 2)) / real.sum((0, 2)).clamp(min=1)
