"""``train-gate``: gates learn the frozen model's own block map (SeerAttention, section 4).

The teacher runs without a graph. When a layer's queries and keys pass by, its attention and block map come from one kernel
call, and the layer's gate loss and gradient are computed on the spot; only the small gradients live on. So training needs the
memory of inference, and ``loss.backward()`` stays what a trainer expects.
"""

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from msattn.kernels.best_blocks import block_softmax
from msattn.kernels.maxpool_attention import maxpool_attention
from msattn.trainer.config import GateConfig
from msattn.trainer.models.tap import LayerInputs, run_backbone, tap
from msattn.trainer.seer.blocks import visible_blocks
from msattn.trainer.seer.gate import Gate
from msattn.trainer.seer.maps import BlockMaps
from msattn.trainer.seer.select import Oracle, Selection, TopK, normalize_rows, recall

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEALTH_SPARSITIES = (0.5, 0.8, 0.9)
SMOOTH_L1_BETA = 0.01  # errors of probabilities rarely pass 1, torch's default, below which smooth L1 is half the MSE


def gate_loss(logits: Tensor, pooled: Tensor, visible: Tensor, cfg: GateConfig) -> Tensor:
    """How far a gate's block probabilities are from the normalised block map.

    Errors are summed over the blocks of a row and averaged over rows: a mean over blocks would shrink with the square of the
    context length, and a clipped gradient with it.

    Parameters
    ----------
    logits : fp32 ``[B, Hg, Tr, Tc]`` of the gate, before masking.
    pooled : fp32 ``[B, Hq, Tr, Tc]``, from ``maxpool_attention``. Gates that serve a query group learn its mean map.
    visible : bool ``[B | 1, 1, Tr, Tc]``. Rows that see nothing, and the first ``cfg.skip_rows``, do not count.
    """
    target = normalize_rows(pooled).unflatten(1, (logits.shape[1], -1)).mean(2)
    if cfg.loss == "kl":
        log_gate = logits.masked_fill(~visible, torch.finfo(logits.dtype).min).log_softmax(-1)
        errors = torch.xlogy(target, target) - target * log_gate
    elif cfg.loss == "mse":
        errors = (block_softmax(logits, visible) - target).square()
    else:
        errors = F.smooth_l1_loss(block_softmax(logits, visible), target, reduction="none", beta=SMOOTH_L1_BETA)
    rows = visible.any(-1)
    rows = (rows & (torch.arange(rows.shape[-1], device=rows.device) >= cfg.skip_rows)).expand(errors.shape[:-1])
    return (errors.sum(-1) * rows).sum() / rows.sum().clamp(min=1)


class ReadyGradients(torch.autograd.Function):
    """A loss whose gradients are known already: ``backward`` hands them to the parameters, as any other graph would."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *(grad_output * gradient for gradient in ctx.gradients)


class GateDistiller(nn.Module):
    """Gates in training beside their teacher, for the training loop.

    Parameters
    ----------
    gate : trains; the only registered submodule, so the only thing saved and synchronised.
    teacher : frozen, and kept out of the module tree.

    Notes
    -----
    A layer's loss and gradient hold some nine block maps (fp32 ``[B, Hq, Tr, Tc]``) for a moment. At the shape of Llama-3.1-8B
    that is less than the middle of the MLP holds, up to some 256k tokens; so the peak is that of inference, plus the gates.
    """

    def __init__(self, gate: Gate, teacher: "PreTrainedModel") -> None:
        super().__init__()
        self.gate = gate
        self._teacher = (teacher,)  # a tuple hides it from nn.Module's registration

    def forward(self, input_ids: Tensor) -> dict[str, Any]:
        """One pass of the teacher over ``input_ids`` int64 ``[B, N]``.

        Returns
        -------
        dict
            ``loss``, the sum over layers, and ``parts``, ``{"layer i": loss}``; both detached but for ready gradients.
        """
        parts: dict[str, Tensor] = {}
        parameters: list[Tensor] = []
        gradients: list[Tensor] = []

        def attend(x: LayerInputs) -> Tensor:
            cfg = self.gate.cfg
            size = cfg.block_size
            dense = maxpool_attention(x.q, x.k, x.v, block_size=size, scale=x.scale, kv_start=x.kv_start)
            visible = visible_blocks(x.num_queries, x.num_keys, size, x.kv_start, x.q.device)
            own = list(self.gate.layers[x.layer].parameters())
            with torch.enable_grad():
                loss = gate_loss(self.gate.logits(x), dense.pooled, visible, cfg)
            gradients.extend(torch.autograd.grad(loss, own))
            parameters.extend(own)
            parts[f"layer {x.layer}"] = loss.detach()
            return dense.out

        (teacher,) = self._teacher
        with torch.no_grad(), tap(teacher, attend):
            run_backbone(teacher, input_ids)
        loss = torch.stack(list(parts.values())).sum()
        return {"loss": ReadyGradients.apply(loss, gradients, *parameters), "parts": parts}


@torch.no_grad()
def health(
    gate: Gate, teacher: "PreTrainedModel", chunks: Iterable[dict[str, Tensor]], maps: BlockMaps | None = None
) -> dict[str, float]:
    """Recall of attention mass under top-k selection, the gate's and the oracle's beside it.

    Parameters
    ----------
    chunks : items ``{"input_ids": int64 [N]}``, this process's share of them; all processes return the mean over all.
    maps : takes in the block maps that pass by (those of the last chunk stay), at the largest sparsity.

    Returns
    -------
    dict
        ``recall/gate@0.9`` and the like, the mean over layers, and ``recall/gate@0.9/layer 3`` for each layer.
    """
    found: dict[str, list[Tensor]] = defaultdict(list)

    def attend(x: LayerInputs) -> Tensor:
        size = gate.cfg.block_size
        dense = maxpool_attention(x.q, x.k, x.v, block_size=size, scale=x.scale, kv_start=x.kv_start)
        true, scores = normalize_rows(dense.pooled), gate.scores(x)
        for name, ranked in (("gate", scores), ("oracle", true)):
            for sparsity in HEALTH_SPARSITIES:
                mask = Selection(TopK(sparsity), Oracle(size)).choose(ranked, x)
                share = recall(x, mask, size, dense.lse).mean()
                found[f"recall/{name}@{sparsity}"].append(share)
                found[f"recall/{name}@{sparsity}/layer {x.layer}"].append(share)
                if maps is not None and (name, sparsity) == ("gate", HEALTH_SPARSITIES[-1]):
                    maps.add(x, size, true, scores, mask)
        return dense.out

    with tap(teacher, attend):
        for chunk in chunks:
            run_backbone(teacher, chunk["input_ids"][None].to(teacher.device))
    merged: dict[str, list[float]] = defaultdict(list)
    for part in gather_object([{name: torch.stack(shares).tolist() for name, shares in found.items()}]):
        for name, shares in part.items():
            merged[name] += shares
    return {name: fmean(shares) for name, shares in merged.items()}
