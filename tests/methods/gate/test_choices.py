"""Tests of the settings of gates that are chosen by predictions."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from msattn.trainer.config import GateConfig, SelectConfig
from msattn.trainer.methods.gate.attn_gate import MEAN_WEIGHT, TARGET, Gate
from msattn.trainer.methods.gate.choices import (
    SPARSITIES,
    TARGETS,
    WEIGHTS,
    choose_mean_weight,
    choose_target,
)
from msattn.trainer.methods.gate.train import gate_thresholds
from msattn.trainer.methods.selection import Selection
from msattn.trainer.methods.thresholds import calibrate_blocks
from msattn.trainer.methods.untrained.scores.oracle import Oracle
from msattn.trainer.serving.attach import attach
from tests.factory import tiny_model
from tests.methods.gate.random_gates import BLOCK, config, noisy_gate, topical_tokens


@pytest.mark.parametrize("std", [0.02, 1.0])
@torch.no_grad()
def test_the_chosen_weight_changes_predictions_least(std: float) -> None:
    model = tiny_model(initializer_range=0.3, max_position_embeddings=640)
    gate = noisy_gate(config(mean_weight=None), std=std)
    chunks = [{"input_ids": row} for row in topical_tokens(2, 40, seed=2)]
    choose_mean_weight(gate, model, iter(chunks))
    chosen, changes = gate.cfg.mean_weight, {}
    for weight in WEIGHTS:
        gate.cfg = replace(gate.cfg, mean_weight=weight)
        gate.thresholds = gate_thresholds(gate, model, chunks)
        selects = [
            {"policy": "calibrated", "scores": "gate", "sparsity": sparsity}
            for sparsity in SPARSITIES
        ]
        changes[weight] = sum(
            _change(model, chunks, gate=gate, select=select) for select in selects
        )
    assert chosen == min(changes, key=changes.__getitem__)


def test_the_true_map_of_the_chosen_target_changes_predictions_least() -> None:
    model = tiny_model(initializer_range=0.1, max_position_embeddings=640)
    chosen = []
    for seed in (1, 2):
        gate = noisy_gate(config(target=None))
        chunks = [{"input_ids": row} for row in topical_tokens(2, 40, seed=seed)]
        choose_target(gate, model, iter(chunks))
        chosen.append(gate.cfg.target)
        changes = dict.fromkeys(TARGETS, 0.0)
        for target in TARGETS:
            oracle = Oracle(BLOCK, target=target)
            thresholds = calibrate_blocks({target: oracle}, model, chunks)[target]
            for sparsity in SPARSITIES:
                cfg = SelectConfig(policy="calibrated", sparsity=sparsity)
                select = Selection.from_config(cfg, scorer=oracle, thresholds=thresholds)
                changes[target] += _change(model, chunks, select=select)
        assert gate.cfg.target == min(changes, key=changes.__getitem__)
    assert {*chosen} == {*TARGETS}


@torch.no_grad()
def _change(model: Any, chunks: list[dict[str, Tensor]], **attached: Any) -> float:
    """Returns KL(dense || sparse) of predictions, summed over the chunks."""
    change = 0.0
    for ids in (chunk["input_ids"][None] for chunk in chunks):
        wanted = model(ids).logits.log_softmax(-1)
        with attach(model, dense_below=0, **attached):
            change += (
                (wanted.exp() * (wanted - model(ids).logits.log_softmax(-1))).sum(-1).mean().item()
            )
    return change


def test_a_gate_has_settings_before_they_are_chosen() -> None:
    cfg = Gate.build(tiny_model().config, GateConfig(block_size=BLOCK)).cfg
    assert (cfg.target, cfg.mean_weight) == (TARGET, MEAN_WEIGHT)
