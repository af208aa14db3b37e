"""Distillation of the frozen model's attention to blocks into decode gates (SeerAttention-R, section 3.2)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from msattn.kernels.best_blocks import block_softmax
from msattn.trainer.methods.blocks import Candidates, normalize_rows
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from msattn.trainer.methods.gate.distillation import GateDistiller, LayerLoss, Recalls, gate_loss
from msattn.trainer.methods.gate.maps import BlockMaps
from msattn.trainer.methods.gate.query_maps import far_blocks, largest_in_blocks, mass_of_blocks, sample_queries
from msattn.trainer.models.layer_attention import dense_attention
from msattn.trainer.models.tap import LayerInputs, run_tapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MEASURED_QUERIES = 256  # queries per chunk, evenly spaced


class DecodeGateDistiller(GateDistiller):
    """Trains decode gates on the largest attention probabilities of single queries in each block.

    The targets of a query are normalized over the blocks with a key that counts, see ``gate.sink`` and ``gate.recent``.
    """

    gate: DecodeGate

    def forward(self, input_ids: Tensor) -> dict:
        """Runs the teacher as :meth:`GateDistiller.forward`, and trains with some queries of ``input_ids``."""
        cfg = self.gate.cfg
        first = max(cfg.sink + cfg.recent, cfg.skip_rows * cfg.block_size)
        self._positions = [sample_queries(ids[None], cfg.queries, first) for ids in input_ids]
        return super().forward(input_ids)

    def layer_loss(self, x: LayerInputs) -> LayerLoss:
        """Returns dense attention, and the loss of the layer's gates, the mean over the sequences."""
        with torch.enable_grad():
            losses = [self._sequence_loss(x.sequence(b), positions) for b, positions in enumerate(self._positions)]
            loss = torch.stack(losses).mean()
        return LayerLoss(dense_attention(x), loss, list(self.gate.gates[x.layer].parameters()))

    def _sequence_loss(self, x: LayerInputs, positions: Tensor) -> Tensor:
        """Returns the loss of the layer's gates at ``positions [n]`` of one sequence."""
        cfg = self.gate.cfg
        with torch.no_grad():
            largest = largest_in_blocks(x, positions, cfg.block_size, sink=cfg.sink, recent=cfg.recent)
        visible = far_blocks(positions, x.num_keys, cfg.block_size, cfg.recent)
        return gate_loss(self.gate.logits(x, positions), largest, visible, replace(cfg, skip_rows=0))


@torch.no_grad()
def decode_gate_recall(
    gate: DecodeGate, teacher: "PreTrainedModel", chunks: Iterable[dict[str, Tensor]], maps: BlockMaps | None = None
) -> dict[str, float]:
    """Measures the attention mass of single queries in the best blocks, by the scores of the gate and of the oracle.

    The blocks of the first ``gate.sink`` and of the last ``gate.recent`` keys, and the query's own, are always read. Arguments
    and result are those of :func:`msattn.trainer.methods.gate.distillation.gate_recall`; rows of ``maps`` are queries.
    """
    recalls, cfg = Recalls(), gate.cfg
    size = cfg.block_size

    def dense_attention_with_recall(x: LayerInputs) -> Tensor:
        positions = torch.linspace(0, x.num_keys - 1, min(MEASURED_QUERIES, x.num_keys), device=x.q.device).round().long()
        visible, far = (far_blocks(positions, x.num_keys, size, recent) for recent in (0, cfg.recent + size))
        always = visible & ~far
        always[..., : -(-cfg.sink // size)] |= visible[..., : -(-cfg.sink // size)]
        candidates = Candidates(visible, always)
        true = normalize_rows(largest_in_blocks(x, positions, size, sink=cfg.sink))
        scores = block_softmax(gate.logits(x, positions), visible)
        mass = mass_of_blocks(x, positions, size).unflatten(1, (true.shape[1], -1))  # [B, Hkv, group, n, Tc]
        recalls.add_each(
            {"gate": scores, "oracle": true}, candidates, x.layer, lambda mask: (mass * mask[:, :, None]).sum(-1).mean(), maps
        )
        return dense_attention(x)

    run_tapped(teacher, dense_attention_with_recall, chunks)
    return recalls.means()
