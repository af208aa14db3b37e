"""Settings of gates chosen by what sparse attention does to predictions: target, weight of means.

Both depend on the model and its text. Means of queries and keys help SmolLM2 at every sparsity and
cost Gemma 3 much at 50 %. The loss of a gate does not tell, as it counts all blocks, and
predictions depend on those at the threshold.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from accelerate.utils import reduce as reduce_over_ranks
from torch import Tensor

from msattn.trainer.config import SelectConfig
from msattn.trainer.errors import print_once
from msattn.trainer.methods.base import Scorer
from msattn.trainer.methods.gate.attn_gate import MEAN_WEIGHT, TARGET, Gate, GateScores
from msattn.trainer.methods.selection import Selection
from msattn.trainer.methods.thresholds import CALIBRATION_CHUNKS, calibrate_blocks, shortest_row
from msattn.trainer.methods.untrained.scores.oracle import Oracle
from msattn.trainer.models.layer_attention import selected_attention
from msattn.trainer.models.predictions import token_scores
from msattn.trainer.models.tap import LayerInputs, run_backbone, tap
from msattn.trainer.progress import activity

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TARGETS = (TARGET, "mean_mass")
WEIGHTS = (MEAN_WEIGHT, 0.0, 0.2, 1.0)
SPARSITIES = (0.5, 0.8)
CHUNKS = 2  # of each rank


def can_choose(tokens: int, gate: Gate) -> bool:
    """Returns whether chunks of this number of tokens read more blocks than those that are always
    read.
    """
    sizes = gate.cfg.sizes
    return tokens > sizes.keys * shortest_row(SPARSITIES[0], gate.always, sizes)


def num_passes(scorers: int) -> int:
    """Returns the number of passes over a chunk in which one of so many scorers is chosen."""
    return CALIBRATION_CHUNKS + CHUNKS * (1 + scorers * len(SPARSITIES))


def choose_target(
    gate: Gate, teacher: "PreTrainedModel", chunks: Iterable[dict[str, Tensor]]
) -> None:
    """Gives an untrained ``gate`` the one of ``TARGETS`` whose true block map changes predictions
    least.

    ``chunks`` are this rank's items ``{"input_ids": int64 [N]}``.
    """
    maps = {f"gate.target={target}": Oracle(*gate.cfg.sizes, target=target) for target in TARGETS}
    gate.cfg = replace(gate.cfg, target=maps[_least_change(maps, teacher, chunks)].target)


def choose_mean_weight(
    gate: Gate, teacher: "PreTrainedModel", chunks: Iterable[dict[str, Tensor]]
) -> None:
    """Gives a trained ``gate`` the one of ``WEIGHTS`` that changes predictions least.

    ``chunks`` are as of :func:`choose_target`.
    """
    gates = {f"gate.mean_weight={weight:g}": _with_weight(gate, weight) for weight in WEIGHTS}
    gate.cfg = gates[
        _least_change({name: GateScores(each) for name, each in gates.items()}, teacher, chunks)
    ].cfg


def _with_weight(gate: Gate, weight: float) -> Gate:
    """Returns a gate with the same parameters and another weight."""
    other = copy.copy(gate)
    other.cfg = replace(gate.cfg, mean_weight=weight)
    return other


@torch.no_grad()
def _least_change(
    scorers: Mapping[str, Scorer], teacher: "PreTrainedModel", chunks: Iterable[dict[str, Tensor]]
) -> str:
    """Returns the name of the scorer that changes predictions least under calibrated thresholds.

    The change is KL(dense || sparse) of the next tokens of training text, in nats, a mean over
    ``SPARSITIES`` and the first ``CHUNKS`` of ``chunks``; all of them calibrate.
    """
    chunks = list(chunks)
    tables = calibrate_blocks(scorers, teacher, chunks)
    selections = [
        [
            Selection.from_config(
                SelectConfig(policy="calibrated", sparsity=s),
                scorer=scorer,
                thresholds=tables[name],
            )
            for s in SPARSITIES
        ]
        for name, scorer in scorers.items()
    ]
    with activity(f"choosing among {', '.join(scorers)}"):
        # and the number of chunks
        total = torch.zeros(len(scorers) + 1, dtype=torch.float64, device=teacher.device)
        for chunk in chunks[:CHUNKS]:
            total += _changes(selections, teacher, chunk["input_ids"])
    *sums, count = reduce_over_ranks(total, "sum").tolist()
    changes = {name: each / count for name, each in zip(scorers, sums, strict=True)}
    best = min(changes, key=changes.__getitem__)
    tried = ", ".join(f"{name}: {change:.3g}" for name, change in changes.items())
    print_once(f"{best} changes predictions least (KL in nats; {tried})")
    return best


def _changes(selections: list[list[Selection]], teacher: "PreTrainedModel", ids: Tensor) -> Tensor:
    """Returns how much the selections of each scorer change the predictions of one chunk, and 1:
    fp64 ``[scorers + 1]``.
    """
    ids = ids[None].to(teacher.device)
    dense, changes = run_backbone(teacher, ids), []
    for of_scorer in selections:
        found = torch.zeros((), dtype=torch.float64, device=teacher.device)
        for selection in of_scorer:
            with tap(teacher, partial(_attend, selection)):
                found += (
                    token_scores(teacher, run_backbone(teacher, ids), ids[0], dense)
                    .divergences.double()
                    .mean()
                )
        changes.append(found / len(of_scorer))
    return torch.stack([*changes, torch.ones_like(changes[0])])


def _attend(selection: Selection, x: LayerInputs) -> Tensor:
    return selected_attention(x, selection.blocks(x), selection.sizes).out
