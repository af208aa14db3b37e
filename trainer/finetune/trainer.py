"""A language model in training, its attention dense or through the blocks that gates choose.

Long-context fine-tuning of SeerAttention (sections 4.3 and 5.2): the language model's loss trains the weights through
``block_sparse_attention`` with the top-k blocks of the gates' scores; the gates go on learning the block map, from inputs that
carry no gradient. Weights are float32, since bfloat16 keeps 8 bits and an update of 1e-5 of a weight's size would be rounded
away; products run in bfloat16 under autocast.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from msattn.kernels.best_blocks import block_softmax
from msattn.kernels.maxpool_attention import maxpool_attention
from msattn.trainer.config import SelectConfig
from msattn.trainer.models.tap import LayerInputs, run_backbone, tap, use_dense_attention
from msattn.trainer.seer.blocks import visible_blocks
from msattn.trainer.seer.distillation import ReadyGradients, gate_loss
from msattn.trainer.seer.gate import Gate
from msattn.trainer.seer.select import Selection, selected_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGIT_BYTES = 2**30  # of the fp32 logits that exist at once: all of 32k tokens over 128k words would be 17 GB


class Look(NamedTuple):
    """What one layer's gate saw of a batch.

    Attributes
    ----------
    mask : bool ``[B, Hg, Tr, Tc]``, the blocks to read.
    loss : scalar, of the gate, without a graph.
    gradients : of that loss, for the gate's parameters.
    """

    mask: Tensor
    loss: Tensor
    gradients: tuple[Tensor, ...]


class FineTuner(nn.Module):
    """A language model in training, with or without gates, for the training loop.

    Parameters
    ----------
    model : trains; its weights are fp32.
    gate : trains beside it, and chooses the blocks that are read; None: attention is dense.
    select : how many blocks.
    gate_weight : of the gates' loss beside the language model's.
    dtype : of the products; float32 or bfloat16.
    """

    def __init__(
        self, model: "PreTrainedModel", gate: Gate | None, select: SelectConfig, *, gate_weight: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.model = model
        self.gate = gate
        self.selection = Selection.from_config(select, gate) if gate is not None else None
        self.gate_weight = gate_weight
        self.dtype = dtype
        self._looks: dict[int, Look] = {}  # of this batch, by layer
        if gate is None:
            use_dense_attention(model)

    def attached(self) -> AbstractContextManager[None]:
        """While the context lasts the model's attention is this module's.

        It has to outlast the backward pass: activation checkpointing runs the layers again there.
        """
        return nullcontext() if self.gate is None else tap(self.model, self.attend)

    def forward(self, input_ids: Tensor, weights: Tensor | None = None) -> dict[str, Any]:
        """One pass over ``input_ids`` int64 ``[B, N]``; ``weights`` fp32 ``[B, N]`` is what each token counts (None: 1).

        Returns
        -------
        dict
            ``loss``; ``parts``: ``language``, the mean cross-entropy (nats) of tokens 1 to N - 1, and, where gates train,
            ``layer i`` for the loss of each.
        """
        self._looks.clear()
        # Without autocast's cache, which would hold a half precision copy of every weight until the pass ends.
        half = self.dtype == torch.bfloat16
        with torch.autocast(input_ids.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            hidden = run_backbone(self.model, input_ids)
            head: Any = self.model.get_output_embeddings()
            weights = torch.ones_like(input_ids, dtype=torch.float32) if weights is None else weights
            language = language_loss(head, hidden[:, :-1], input_ids[:, 1:], weights[:, 1:])
        parts = {"language": language.detach()}
        if self.gate is None or not self._looks:
            return {"loss": language, "parts": parts}
        looks = sorted(self._looks.items())
        parts |= {f"layer {layer}": look.loss for layer, look in looks}
        gates = torch.stack([look.loss for _, look in looks]).sum()
        gradients = [gradient for _, look in looks for gradient in look.gradients]
        parameters = [weight for layer, _ in looks for weight in self.gate.layers[layer].parameters()]
        return {"loss": language + self.gate_weight * ReadyGradients.apply(gates, gradients, *parameters), "parts": parts}

    def attend(self, x: LayerInputs) -> Tensor:
        """Sparse attention of one layer ``[B, Hq, N, D]``, differentiable in its queries, keys and values."""
        assert self.gate is not None
        assert self.selection is not None
        x = replace(x, q=x.q.to(x.v.dtype), k=x.k.to(x.v.dtype))  # under autocast RoPE leaves fp32
        with torch.autocast(x.q.device.type, enabled=False):  # operations choose their own precision
            if not torch.is_grad_enabled():  # an evaluation
                return selected_attention(x, self.selection.blocks(x), self.selection.block_size).out
            if x.layer not in self._looks:  # activation checkpointing comes by again, for attention alone
                self._looks[x.layer] = self._look(x, self.gate, self.selection)
            return selected_attention(x, self._looks[x.layer].mask, self.selection.block_size).out

    def _look(self, x: LayerInputs, gate: Gate, selection: Selection) -> Look:
        size = selection.block_size
        with torch.no_grad():
            pooled = maxpool_attention(x.q, x.k, x.v, block_size=size, scale=x.scale, kv_start=x.kv_start).pooled
        visible = visible_blocks(x.num_queries, x.num_keys, size, x.kv_start, x.q.device)
        # What autograd keeps here is its own: a checkpoint around the layer would count it, and miss it the second time.
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            logits = gate.logits(x)
            loss = gate_loss(logits, pooled, visible, gate.cfg)
            gradients = torch.autograd.grad(loss, list(gate.layers[x.layer].parameters()))
        with torch.no_grad():
            mask = selection.choose(block_softmax(logits, visible), x)
        return Look(mask, loss.detach(), gradients)


def language_loss(head: nn.Linear, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean over sequences of each one's weighted mean of the cross-entropy (nats).

    So a batch may be split among micro-batches and processes as one likes. Logits exist for a slice of the tokens at a time, in
    the backward pass too.

    Parameters
    ----------
    head : from hidden states ``[n, hidden]`` to logits ``[n, vocabulary]``.
    hidden : ``[B, N, hidden]``.
    targets, weights : int64 and fp32 ``[B, N]``.
    """
    rows = max(1, LOGIT_BYTES // (4 * head.out_features))

    def slice_loss(hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        # No dot product: under autocast it would round to bfloat16.
        return (F.cross_entropy(head(hidden).float(), targets, reduction="none") * weights).sum()

    shares = weights / weights.sum(1, keepdim=True).clamp(min=1) / len(weights)
    tokens = (hidden.flatten(0, 1), targets.flatten(), shares.flatten())
    slices = zip(*(each.split(rows) for each in tokens), strict=True)
    losses = [checkpoint(slice_loss, *part, use_reentrant=False) for part in slices]
    return torch.stack(losses).sum()


def checkpoint_activations(model: "PreTrainedModel") -> None:
    """Keep only each layer's input for the backward pass, which runs the layer again."""
    # The second name is that before transformers 5.23.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
