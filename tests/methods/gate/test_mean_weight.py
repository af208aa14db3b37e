"""Tests of the weight that mean-pooled scores get beside a trained gate's."""

from dataclasses import replace

import pytest
import torch

from msattn.trainer.config import GateConfig
from msattn.trainer.methods.gate.attn_gate import MEAN_WEIGHT, Gate
from msattn.trainer.methods.gate.mean_weight import SPARSITIES, WEIGHTS, choose_mean_weight
from msattn.trainer.methods.gate.train import gate_thresholds
from msattn.trainer.serving.attach import attach
from tests.factory import tiny_model
from tests.methods.gate.test_attn_gate import BLOCK, config, noisy_gate, topical_tokens


@pytest.mark.parametrize("std", [0.02, 1.0])
@torch.no_grad()
def test_the_chosen_weight_changes_predictions_least(std: float) -> None:
    model, gate = tiny_model(initializer_range=0.3, max_position_embeddings=640), noisy_gate(config(mean_weight=None), std=std)
    ids = topical_tokens(2, 40, seed=2)
    chunks = [{"input_ids": row} for row in ids]
    choose_mean_weight(gate, model, iter(chunks))
    chosen, thresholds, changes = gate.cfg.mean_weight, gate.thresholds, {}
    wanted = model(ids).logits.log_softmax(-1)
    for weight in WEIGHTS:
        gate.cfg = replace(gate.cfg, mean_weight=weight)
        gate.thresholds = gate_thresholds(gate, model, chunks)
        if weight == chosen:
            assert gate.thresholds == thresholds
        changes[weight] = 0.0
        for sparsity in SPARSITIES:
            with attach(model, gate=gate, sparsity=sparsity, dense_below=0):
                rows = [model(row[None]).logits.log_softmax(-1) for row in ids]
            changes[weight] += (wanted.exp() * (wanted - torch.cat(rows))).sum(-1).mean().item()
    assert chosen == min(changes, key=changes.__getitem__)


def test_a_gate_has_a_weight_before_one_is_chosen() -> None:
    assert Gate.build(tiny_model().config, GateConfig(block_size=BLOCK)).cfg.mean_weight == MEAN_WEIGHT
