"""Distillation of the frozen model's attention to blocks into decode gates (SeerAttention-R,
section 3.2).

The targets are block maps of single queries, in plain PyTorch. Only some queries of a chunk are
needed, so the scores are computed for a few of them at a time. Their inputs are whole prompts
without padding; softmax statistics are fp32 (fp64 for fp64 inputs).
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msattn.kernels.best_blocks import block_softmax
from msattn.trainer.methods.blocks import RowCandidates, normalize_rows
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from msattn.trainer.methods.gate.distillation import GateDistiller, Recalls, gate_loss
from msattn.trainer.methods.gate.maps import BlockMaps
from msattn.trainer.models.layer_attention import LayerInputs, dense_attention
from msattn.trainer.models.tap import visit_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MEASURED_QUERIES = 256  # queries per chunk, evenly spaced
SCORES_AT_ONCE = 2**26  # scores of all heads; 256 MB


class DecodeGateDistiller(GateDistiller):
    """Trains decode gates on the largest attention probabilities of single queries in each block.

    The targets of a query are normalized over the blocks with a key that counts, see ``gate.sink``
    and ``gate.recent``.
    """

    gate: DecodeGate

    def forward(self, input_ids: Tensor) -> dict:
        """Runs the teacher as :meth:`GateDistiller.forward`, and trains with some queries of
        ``input_ids``.
        """
        cfg = self.gate.cfg
        first = max(cfg.sink + cfg.recent, cfg.skip_rows * cfg.block_size)
        self._positions = [sample_queries(ids[None], cfg.queries, first) for ids in input_ids]
        return super().forward(input_ids)

    def layer_loss(self, x: LayerInputs) -> tuple[Tensor, Tensor, list[nn.Parameter]]:
        with torch.enable_grad():
            losses = [
                self._sequence_loss(x.sequence(b), positions)
                for b, positions in enumerate(self._positions)
            ]
            loss = torch.stack(losses).mean()  # over the sequences
        return dense_attention(x), loss, list(self.gate.gates[x.layer].parameters())

    def _sequence_loss(self, x: LayerInputs, positions: Tensor) -> Tensor:
        """Returns the loss of the layer's gates at ``positions [n]`` of one sequence."""
        cfg = self.gate.cfg
        with torch.no_grad():
            largest = largest_in_blocks(
                x, positions, cfg.block_size, sink=cfg.sink, recent=cfg.recent
            )
        visible = far_blocks(positions, x.num_keys, cfg.block_size, cfg.recent)
        return gate_loss(
            self.gate.logits(x, positions), largest, visible, replace(cfg, skip_rows=0)
        )


def decode_gate_recall(
    gate: DecodeGate,
    teacher: "PreTrainedModel",
    chunks: Iterable[dict[str, Tensor]],
    maps: BlockMaps | None = None,
) -> dict[str, float]:
    """Measures the attention mass of single queries in the best blocks, by the scores of the gate
    and of the oracle.

    The blocks of the first ``gate.sink`` and of the last ``gate.recent`` keys, and the query's own,
    are always read. Arguments and result are those of
    :func:`msattn.trainer.methods.gate.distillation.gate_recall`; rows of ``maps`` are queries.
    """
    recalls, cfg = Recalls(), gate.cfg
    size = cfg.block_size

    def measure(x: LayerInputs) -> None:
        positions = (
            torch.linspace(0, x.num_keys - 1, min(MEASURED_QUERIES, x.num_keys), device=x.q.device)
            .round()
            .long()
        )
        own, local = (
            (positions - recent).clamp(min=0)[None, None, :, None] // size
            for recent in (0, cfg.recent)
        )
        candidates = RowCandidates(
            own.int() + 1, local.int(), -(-cfg.sink // size), -(-x.num_keys // size)
        )
        true = normalize_rows(largest_in_blocks(x, positions, size, sink=cfg.sink))
        scores = block_softmax(gate.logits(x, positions), candidates.visible)
        # [B, Hkv, group, n, Tc]
        mass = mass_of_blocks(x, positions, size).unflatten(1, (true.shape[1], -1))
        recalls.add(
            {"gate": scores, "oracle": true},
            candidates,
            x.layer,
            lambda mask: (mass * mask[:, :, None]).sum(-1).mean(),
            maps,
        )

    visit_layers(teacher, measure, chunks)
    return recalls.means()


def sample_queries(input_ids: Tensor, count: int, first: int) -> Tensor:
    """Returns ``count`` random positions from ``first`` on (or all of them) of tokens ``[B, N]``:
    int64 ``[n]``, increasing.

    They depend only on the tokens, so that a resumed run draws the same positions.
    """
    generator = torch.Generator().manual_seed(int(input_ids.sum()))
    drawn = torch.randperm(input_ids.shape[1] - first, generator=generator)[:count]
    return (first + drawn.sort().values).to(input_ids.device)


def far_blocks(positions: Tensor, num_keys: int, block_size: int, recent: int) -> Tensor:
    """Returns the blocks with a key that is not among the last ``recent`` ones of a query: bool
    ``[1, 1, n, Tc]``.
    """
    first_keys = torch.arange(0, num_keys, block_size, device=positions.device)
    return (first_keys <= (positions - recent)[:, None])[None, None]


def largest_in_blocks(
    x: LayerInputs, positions: Tensor, block_size: int, *, sink: int, recent: int = 0
) -> Tensor:
    """Returns the largest attention probability in each block, over its keys and the query group:
    fp32 ``[B, Hkv, n, Tc]``.

    Probabilities are those of the full row. The first ``sink`` keys and a query's last ``recent``
    keys do not count. ``positions``: int64 ``[n]``, positions of the queries in the prompt.
    """
    keys = torch.arange(x.num_keys, device=x.q.device)
    found = []
    for some, probabilities in _few_queries(x, positions):
        left_out = (keys < sink) | (keys > (some - recent)[:, None])
        blocks = _as_blocks(probabilities.masked_fill_(left_out, 0), block_size)
        found.append(blocks.amax(-1).amax(2))
    return torch.cat(found, dim=2)


def mass_of_blocks(x: LayerInputs, positions: Tensor, block_size: int) -> Tensor:
    """Returns the attention mass of each block: fp32 ``[B, Hq, n, Tc]``; arguments as of
    :func:`largest_in_blocks`.
    """
    found = [
        _as_blocks(probabilities, block_size).sum(-1)
        for _, probabilities in _few_queries(x, positions)
    ]
    return torch.cat(found, dim=3).flatten(1, 2)


def _few_queries(x: LayerInputs, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields some of ``positions`` and the attention probabilities of these queries:
    ``[B, Hkv, group, n, M]``.
    """
    dtype = torch.promote_types(x.q.dtype, torch.float32)
    k = x.k.to(dtype).mT  # [B, Hkv, D, M]
    keys = torch.arange(x.num_keys, device=x.q.device)
    for some in positions.split(
        max(1, SCORES_AT_ONCE // (x.q.shape[0] * x.q.shape[1] * x.num_keys))
    ):
        # [B, Hkv, group, n, D]
        q = (x.q[:, :, some].to(dtype) * x.scale).unflatten(1, (k.shape[1], -1))
        scores = (q.flatten(2, 3) @ k).unflatten(2, q.shape[2:4])
        yield some, scores.masked_fill_(keys > some[:, None], -torch.inf).softmax(-1)


def _as_blocks(values: Tensor, block_size: int) -> Tensor:
    """Splits ``[..., M]`` into blocks ``[..., Tc, block_size]``; the last one is padded with
    zeros.
    """
    return F.pad(values, (0, -values.shape[-1] % block_size)).unflatten(-1, (-1, block_size))
