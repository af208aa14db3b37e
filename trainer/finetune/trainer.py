"""Long-context fine-tuning of a language model (SeerAttention, sections 4.3 and 5.2), with sparse
or dense attention.

The language model's loss trains the weights through ``block_sparse_attention`` over the top-k
blocks by gate score, or through ``multiscale_attention``, which reads the best blocks whole and the
next ones as means. At the same time the gates are trained on the block map, with detached inputs.
Weights are float32: bfloat16 has 8 significant bits and would round away an update of 1e-5 of a
weight's magnitude. Matrix products run in bfloat16 under autocast.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from msattn.trainer.config import SelectConfig
from msattn.trainer.methods.blocks import visible_blocks
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.gate.distillation import PrecomputedGradients, gate_loss
from msattn.trainer.methods.selection import Selection
from msattn.trainer.models.families import output_logits, text_config
from msattn.trainer.models.layer_attention import selected_attention
from msattn.trainer.models.tap import LayerInputs, run_backbone, tap, use_dense_attention

# fp32 logits in memory at once: those of 32k tokens would take 17 GB with a vocabulary of 128k
LOGIT_BYTES = 2**30


class GateTargets(NamedTuple):
    """Result of a layer's gate for a batch: the blocks to read and the gate's loss against the
    block map, detached.
    """

    selected: Tensor  # of Selection.blocks
    loss: Tensor
    gradients: tuple[Tensor, ...]  # gradients of the loss, one for each of the gate's parameters


class FineTuner(nn.Module):
    """Trains a language model with fp32 weights, with gates or, if ``gate`` is None, with dense
    attention.

    ``gate_weight`` weights the gates' loss in the sum with the language model's; ``dtype`` is that
    of matrix products.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        gate: Gate | None,
        select: SelectConfig,
        *,
        gate_weight: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.model = model
        self.gate = gate
        self.selection = Selection.from_config(select, gate) if gate is not None else None
        self.gate_weight = gate_weight
        self.dtype = dtype
        self._targets: dict[int, GateTargets] = {}  # targets of the current batch, keyed by layer
        if gate is None:
            use_dense_attention(model)

    def attached(self) -> AbstractContextManager[None]:
        """Returns a context in which the model's attention is :meth:`gated_attention`, if there are
        gates.

        It must include the backward pass, in which activation checkpointing runs the layers again.
        """
        return nullcontext() if self.gate is None else tap(self.model, self.gated_attention)

    def forward(self, input_ids: Tensor, weights: Tensor | None = None) -> dict[str, Any]:
        """Computes the loss of ``input_ids`` int64 ``[B, N]``, with token ``weights`` fp32
        ``[B, N]`` (None: all 1).

        ``parts`` of the result are ``language``, the mean cross-entropy (nats) of tokens 1 to N -
        1, and the loss of each gate.
        """
        self._targets.clear()
        # Autocast's cache would hold a half-precision copy of every weight until the end of the
        # pass.
        half = self.dtype == torch.bfloat16
        with torch.autocast(
            input_ids.device.type, torch.bfloat16, enabled=half, cache_enabled=False
        ):
            hidden = run_backbone(self.model, input_ids)
            weights = (
                torch.ones_like(input_ids, dtype=torch.float32) if weights is None else weights
            )
            head = partial(output_logits, self.model)
            vocabulary = text_config(self.model.config).vocab_size
            language = language_loss(
                head, hidden[:, :-1], input_ids[:, 1:], weights[:, 1:], vocabulary=vocabulary
            )
        parts = {"language": language.detach()}
        if self.gate is None or not self._targets:
            return {"loss": language, "parts": parts}
        layers = sorted(self._targets)
        targets = [self._targets[layer] for layer in layers]
        parts |= {f"layer {layer}": each.loss for layer, each in zip(layers, targets, strict=True)}
        total = torch.stack([each.loss for each in targets]).sum()
        gradients = [gradient for each in targets for gradient in each.gradients]
        parameters = [weight for layer in layers for weight in self.gate.layers[layer].parameters()]
        gates = PrecomputedGradients.apply(total, gradients, *parameters)
        return {"loss": language + self.gate_weight * gates, "parts": parts}

    def gated_attention(self, x: LayerInputs) -> Tensor:
        """Computes sparse attention ``[B, Hq, N, D]`` of a layer, differentiable in its queries,
        keys and values.
        """
        assert self.gate is not None
        assert self.selection is not None
        x = replace(x, q=x.q.to(x.v.dtype), k=x.k.to(x.v.dtype))  # under autocast RoPE returns fp32
        # the operations have their own precision
        with torch.autocast(x.q.device.type, enabled=False):
            if not torch.is_grad_enabled():  # evaluation
                return selected_attention(x, self.selection.blocks(x), self.selection.sizes).out
            # activation checkpointing runs the layer again; it must read the same blocks
            if x.layer not in self._targets:
                self._targets[x.layer] = _gate_targets(x, self.gate, self.selection)
            return selected_attention(x, self._targets[x.layer].selected, self.selection.sizes).out


def _gate_targets(x: LayerInputs, gate: Gate, selection: Selection) -> GateTargets:
    with torch.no_grad():
        pooled = gate.true_map(x).pooled
    visible = visible_blocks(x, selection.sizes)
    # The identity hooks hide these tensors from a checkpoint around the layer, because its
    # recomputation does not create them.
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        loss = gate_loss(gate.logits(x), pooled, visible, gate.cfg)
        gradients = torch.autograd.grad(loss, list(gate.layers[x.layer].parameters()))
    return GateTargets(selection.blocks(x), loss.detach(), gradients)


def language_loss(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    vocabulary: int,
) -> Tensor:
    """Computes the weighted mean cross-entropy (nats) of each sequence, and their mean.

    The result does not depend on how a batch is split into micro-batches and across ranks. ``head``
    computes the logits of ``hidden [B, N, hidden]`` for a slice of the tokens at a time, also in
    the backward pass. Targets and weights are ``[B, N]``.
    """
    rows = max(1, LOGIT_BYTES // (4 * vocabulary))

    def slice_loss(hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        # Not a dot product: autocast would round it to bfloat16.
        return (F.cross_entropy(head(hidden).float(), targets, reduction="none") * weights).sum()

    shares = weights / weights.sum(1, keepdim=True).clamp(min=1) / len(weights)
    tokens = (hidden.flatten(0, 1), targets.flatten(), shares.flatten())
    slices = zip(*(each.split(rows) for each in tokens), strict=True)
    losses = [checkpoint(slice_loss, *part, use_reentrant=False) for part in slices]
    return torch.stack(losses).sum()


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Enables activation checkpointing: only the input of each layer is kept, and the backward pass
    runs the layer again.
    """
    # The second name is that of transformers before 5.23.
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})
