"""Scores of a model's predictions of each token, from last hidden states."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from msattn.trainer.models.families import output_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# tokens whose logits are in memory at once; fp32 logits over a vocabulary of 128k take 0.26 GB
LOGIT_ROWS = 512


class TokenScores(NamedTuple):
    """Loss, KL divergence from dense attention (both in nats) and equality of the most likely
    token, fp32 ``[tokens]`` each.
    """

    losses: Tensor
    divergences: Tensor
    agreements: Tensor


@torch.inference_mode()
def token_scores(
    model: "PreTrainedModel", hidden: Tensor, input_ids: Tensor, dense: Tensor | None = None
) -> TokenScores:
    """Returns the scores of the predictions of tokens 1, 2, ... of ``input_ids [N]``, from hidden
    states ``[1, N, hidden]``.

    ``dense`` are the hidden states of dense attention, on any device; None: the same as ``hidden``.
    Logits are computed for ``LOGIT_ROWS`` tokens at a time to save memory.
    """
    pieces = []
    for begin in range(0, len(input_ids) - 1, LOGIT_ROWS):
        rows = slice(begin, min(begin + LOGIT_ROWS, len(input_ids) - 1))
        targets = input_ids[1:][rows].to(hidden.device)
        own = output_logits(model, hidden[0, rows]).float().log_softmax(-1)
        losses = -own.gather(-1, targets[:, None])[:, 0]
        if dense is None:
            pieces.append(TokenScores(losses, torch.zeros_like(losses), torch.ones_like(losses)))
            continue
        expected = output_logits(model, dense[0, rows].to(hidden.device)).float().log_softmax(-1)
        agreements = (own.argmax(-1) == expected.argmax(-1)).float()
        divergences = own.sub_(expected).mul_(expected.exp_()).sum(-1).neg_()
        pieces.append(TokenScores(losses, divergences, agreements))
    return TokenScores(*map(torch.cat, zip(*pieces, strict=True)))
