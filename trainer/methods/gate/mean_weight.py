"""The weight of mean-pooled scores beside those of a trained gate, chosen by what sparse attention does to predictions.

It depends on the model: means help SmolLM2 at every sparsity, and cost Gemma 3 much at 50 %. The loss of the gate does not tell
it, as it counts all blocks, and predictions depend on those at the threshold.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from accelerate.utils import reduce as reduce_over_ranks
from torch import Tensor

from msattn.trainer.config import SelectConfig
from msattn.trainer.errors import print_once
from msattn.trainer.methods.gate.attn_gate import MEAN_WEIGHT, Gate, GateScores
from msattn.trainer.methods.selection import Selection, selected_attention
from msattn.trainer.methods.thresholds import calibrate_blocks
from msattn.trainer.models.predictions import token_scores
from msattn.trainer.models.tap import LayerInputs, run_backbone, tap
from msattn.trainer.progress import activity

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS = (MEAN_WEIGHT, 0.0, 0.2, 1.0)  # the first of equal ones is chosen, as in chunks too short to leave out blocks
SPARSITIES = (0.5, 0.8)
CHUNKS = 2  # of each rank


@torch.no_grad()
def choose_mean_weight(gate: Gate, teacher: "PreTrainedModel", chunks: Iterable[dict[str, Tensor]]) -> None:
    """Gives ``gate`` the one of ``WEIGHTS`` that changes predictions least, and its thresholds.

    The change is KL(dense || sparse) of the next tokens of training text, in nats, a mean over ``SPARSITIES``. ``chunks`` are
    this rank's items ``{"input_ids": int64 [N]}``; the first ``CHUNKS`` of them are read with each weight.
    """
    chunks = list(chunks)
    gates = [_with_weight(gate, weight) for weight in WEIGHTS]
    scorers = {f"gate.mean_weight={weight:g}": GateScores(each) for weight, each in zip(WEIGHTS, gates, strict=True)}
    tables = calibrate_blocks(scorers, teacher, chunks, always=gate.always)
    for each, table in zip(gates, tables.values(), strict=True):
        each.thresholds = table
    with activity("choosing gate.mean_weight"):
        found = torch.stack([_changes(gates, teacher, chunk["input_ids"]) for chunk in chunks[:CHUNKS]]).mean(0)
    changes = reduce_over_ranks(found, "mean").tolist()
    best = min(range(len(gates)), key=changes.__getitem__)
    gate.cfg, gate.thresholds = gates[best].cfg, gates[best].thresholds
    tried = ", ".join(f"{weight:g}: {change:.4f}" for weight, change in zip(WEIGHTS, changes, strict=True))
    print_once(f"gate.mean_weight={WEIGHTS[best]:g}, with which predictions change least (KL in nats by weight, {tried})")


def _with_weight(gate: Gate, weight: float) -> Gate:
    """Returns a gate with the same parameters and another weight."""
    other = copy.copy(gate)
    other.cfg = replace(gate.cfg, mean_weight=weight)
    return other


def _changes(gates: Sequence[Gate], teacher: "PreTrainedModel", ids: Tensor) -> Tensor:
    """Returns how much each gate changes the predictions of one chunk, fp64 ``[len(gates)]``."""
    ids = ids[None].to(teacher.device)
    dense, changes = run_backbone(teacher, ids), []
    for gate in gates:
        found = torch.zeros((), dtype=torch.float64, device=teacher.device)
        for sparsity in SPARSITIES:
            selection = Selection.from_config(SelectConfig(policy="calibrated", sparsity=sparsity), gate)
            with tap(teacher, partial(_attend, selection)):
                found += token_scores(teacher, run_backbone(teacher, ids), ids[0], dense).divergences.double().mean()
        changes.append(found / len(SPARSITIES))
    return torch.stack(changes)


def _attend(selection: Selection, x: LayerInputs) -> Tensor:
    return selected_attention(x, selection.blocks(x), selection.block_size).out
