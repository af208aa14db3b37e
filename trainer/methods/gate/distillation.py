"""Distillation of the frozen model's block maps into gates (SeerAttention, section 4).

The teacher runs without an autograd graph. In each layer one kernel call computes attention and
block map, and the gate's loss and gradients are computed immediately; only these small gradients
are kept until the end of the pass. Training therefore needs hardly more memory than inference, and
``loss.backward()`` works as in any other training loop.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from msattn.kernels.best_blocks import block_softmax
from msattn.trainer.config import GateConfig
from msattn.trainer.config.policies import TopK
from msattn.trainer.methods.blocks import (
    RowCandidates,
    candidate_blocks,
    normalize_rows,
    visible_blocks,
)
from msattn.trainer.methods.gate.attn_gate import Gate, GateScores
from msattn.trainer.methods.gate.maps import BlockMaps
from msattn.trainer.models.layer_attention import LayerInputs, attention_recall, selected_attention
from msattn.trainer.models.tap import run_backbone, run_tapped, tap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RECALL_SPARSITIES = (0.5, 0.8, 0.9)
# PyTorch's default of 1 would make it half the MSE, since errors of probabilities rarely exceed 1
SMOOTH_L1_BETA = 0.01


def gate_loss(logits: Tensor, pooled: Tensor, visible: Tensor, cfg: GateConfig) -> Tensor:
    """Computes the loss of a gate's block probabilities against the row-normalized block map.

    Errors are summed over the blocks of a row and averaged over rows. A mean over blocks would
    shrink with the square of the context length, and the gradient with it. ``logits`` fp32
    ``[B, Hg, Tr, Tc]`` are the gate's before masking, ``pooled`` fp32 ``[B, Hq, Tr, Tc]`` is the
    block map: a gate that serves a query group learns the mean map of the group. Rows without a
    ``visible`` block, bool ``[B | 1, 1, Tr, Tc]``, and the first ``cfg.skip_rows``, do not count.
    """
    target = normalize_rows(pooled).unflatten(1, (logits.shape[1], -1)).mean(2)
    if cfg.loss == "kl":
        log_gate = logits.masked_fill(~visible, torch.finfo(logits.dtype).min).log_softmax(-1)
        errors = torch.xlogy(target, target) - target * log_gate
    elif cfg.loss == "mse":
        errors = (block_softmax(logits, visible) - target).square()
    else:
        errors = F.smooth_l1_loss(
            block_softmax(logits, visible), target, reduction="none", beta=SMOOTH_L1_BETA
        )
    rows = visible.any(-1)
    rows = (rows & (torch.arange(rows.shape[-1], device=rows.device) >= cfg.skip_rows)).expand(
        errors.shape[:-1]
    )
    return (errors.sum(-1) * rows).sum() / rows.sum().clamp(min=1)


class PrecomputedGradients(torch.autograd.Function):
    """A loss whose gradients were computed in the forward pass; ``backward`` passes them to the
    parameters.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return None, None, *(grad_output * gradient for gradient in ctx.gradients)


class GateDistiller(nn.Module):
    """Trains gates on the block maps of their frozen teacher; a module for the training loop.

    The gate is the only registered submodule, so that nothing else is saved and synchronized.

    Loss and gradient of a layer need about nine block maps (fp32 ``[B, Hq, Tr, Tc]``) at a time.
    For the shape of Llama-3.1-8B and up to about 256k tokens, 64k with blocks of 16 keys, that is
    less than the hidden activations of the MLP, so peak memory is that of inference plus the gates.
    """

    gate: Any

    def __init__(self, gate: nn.Module, teacher: "PreTrainedModel") -> None:
        super().__init__()
        self.gate = gate
        self._teacher = (teacher,)  # a tuple hides it from nn.Module's registration

    def forward(self, input_ids: Tensor) -> dict[str, Any]:
        """Runs the teacher on ``input_ids`` int64 ``[B, N]``.

        Returns ``loss``, the sum over layers, whose ``backward`` passes on the precomputed
        gradients, and the detached ``parts`` ``{"layer i": loss}``.
        """
        parts: dict[str, Tensor] = {}
        parameters: list[Tensor] = []
        gradients: list[Tensor] = []

        def dense_attention_with_gate_loss(x: LayerInputs) -> Tensor:
            out, loss, gate_parameters = self.layer_loss(x)
            gradients.extend(torch.autograd.grad(loss, gate_parameters))
            parameters.extend(gate_parameters)
            parts[f"layer {x.layer}"] = loss.detach()
            return out

        (teacher,) = self._teacher
        with torch.no_grad(), tap(teacher, dense_attention_with_gate_loss):
            run_backbone(teacher, input_ids)
        loss = torch.stack(list(parts.values())).sum()
        return {"loss": PrecomputedGradients.apply(loss, gradients, *parameters), "parts": parts}

    def layer_loss(self, x: LayerInputs) -> tuple[Tensor, Tensor, list[nn.Parameter]]:
        """Returns dense attention, the loss of the layer's gates with a graph to their parameters,
        and these parameters.
        """
        cfg = self.gate.cfg
        dense = self.gate.true_map(x)
        visible = visible_blocks(x, cfg.sizes)
        with torch.enable_grad():
            loss = gate_loss(self.gate.logits(x), dense.pooled, visible, cfg)
        return dense.out, loss, list(self.gate.layers[x.layer].parameters())


class Recalls:
    """Recalls of layers in several chunks, by source of the scores and sparsity."""

    def __init__(self) -> None:
        self._found: dict[str, list[Tensor]] = defaultdict(list)

    def add(
        self,
        scores: Mapping[str, Tensor],
        candidates: RowCandidates,
        layer: int,
        recall: Callable[[Tensor], Tensor],
        maps: BlockMaps | None,
    ) -> None:
        """Adds the recalls of a layer in a chunk under top-k selection at each sparsity.

        It selects by the ``scores`` ``gate`` and ``oracle``; ``recall`` maps a block mask to its
        recall. ``maps`` collects the blocks that the gate reads at the largest sparsity.
        """
        for name, ranked in scores.items():
            for sparsity in RECALL_SPARSITIES:
                mask = TopK(sparsity=sparsity)(ranked, candidates)
                found = recall(mask)
                for metric in (
                    f"recall/{name}@{sparsity}",
                    f"recall/{name}@{sparsity}/layer {layer}",
                ):
                    self._found[metric].append(found)
                if maps is not None and (name, sparsity) == ("gate", RECALL_SPARSITIES[-1]):
                    maps.add(layer, candidates.visible, scores["oracle"], ranked, mask)

    def means(self) -> dict[str, float]:
        """Returns the means over the chunks of all ranks; each rank must call it."""
        merged: dict[str, list[float]] = defaultdict(list)
        for rank_recalls in gather_object(
            [{name: torch.stack(values).tolist() for name, values in self._found.items()}]
        ):
            for name, values in rank_recalls.items():
                merged[name] += values
        return {name: fmean(values) for name, values in merged.items()}


def gate_recall(
    gate: Gate,
    teacher: "PreTrainedModel",
    chunks: Iterable[dict[str, Tensor]],
    maps: BlockMaps | None = None,
) -> dict[str, float]:
    """Measures the recall of attention mass under top-k selection, by the scores of the gate and of
    the oracle.

    ``chunks`` are this rank's items ``{"input_ids": int64 [N]}``; every rank returns the mean over
    all ranks, in ``recall/gate@0.9``, ``recall/oracle@0.9`` and so on for each of
    ``RECALL_SPARSITIES``, the mean over layers, and in ``recall/gate@0.9/layer 3`` and so on for
    each layer. ``maps`` collects the block maps of the last chunk, at the largest sparsity.
    """
    recalls = Recalls()

    def dense_attention_with_recall(x: LayerInputs) -> Tensor:
        sizes = gate.cfg.sizes
        dense = gate.true_map(x)
        candidates = candidate_blocks(x, sizes, gate.always)

        def recall(mask: Tensor) -> Tensor:
            return attention_recall(selected_attention(x, mask, sizes).lse, dense.lse).mean()

        scores = {"gate": GateScores(gate)(x), "oracle": normalize_rows(dense.pooled)}
        recalls.add(scores, candidates, x.layer, recall, maps)
        return dense.out

    run_tapped(teacher, dense_attention_with_recall, chunks)
    return recalls.means()
