"""Blocks that gates select as bits, also in parts of the heads, against those of their scores."""

import itertools
from dataclasses import replace

import pytest
import torch

from msattn.kernels.common.block_bits import pack_blocks
from msattn.trainer.config import SelectConfig
from msattn.trainer.config.policies import CalibratedLayer, Threshold, TokenBudget, TopK
from msattn.trainer.methods import selection as select
from msattn.trainer.methods.blocks import AlwaysRead
from msattn.trainer.methods.blocks import sparsity as share_unread
from msattn.trainer.methods.gate.attn_gate import GATE_SCORERS, pool_keys
from msattn.trainer.methods.selection import Selection
from msattn.trainer.models.layer_attention import Pooled, selected_attention
from tests.factory import inputs_of_layers, left_padded, random_tokens, tiny_model
from tests.methods.gate.random_gates import BLOCK, config, noisy_gate


@pytest.mark.parametrize("heads", ["query", "kv"])
@torch.no_grad()
def test_parts_of_the_heads_choose_what_all_of_them_do(
    heads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, model = (
        noisy_gate(config(block_size=2 * BLOCK, key_block_size=BLOCK, heads=heads), std=0.2),
        tiny_model(),
    )
    ids, mask = left_padded(
        [random_tokens(1, length, seed)[0] for seed, length in enumerate((160, 131))]
    )
    for layer in inputs_of_layers(model, ids, attention_mask=mask):
        pooled = pool_keys(
            gate.cfg.cached_pools, layer.k_nope, layer.k, block_size=BLOCK, start=layer.kv_start
        )
        for x, scores in itertools.product(
            (layer, replace(layer, pooled=Pooled(pooled, layer.num_keys))),
            ("gate", "gate_question"),
        ):
            selection = Selection.from_config(
                SelectConfig("topk", scores=scores, sparsity=0.5), gate
            )
            whole = selection.blocks(x)
            with monkeypatch.context() as patch:
                patch.setattr(select, "SCORE_BYTES", 1)
                assert len([*selection._parts(x, 1)]) == 2
                assert torch.equal(selection.blocks(x), whole)


@pytest.mark.parametrize("sizes", [(32, 16), (16, 16)])
@pytest.mark.parametrize("scores", ["gate", "gate_question"])
def test_gates_select_what_policies_select_from_their_scores(
    scores: str, sizes: tuple[int, int]
) -> None:
    """In whole prompts and in chunks, with padding, and with the policy of earlier chunks."""
    gate = noisy_gate(config(block_size=sizes[0], key_block_size=sizes[1]), std=0.2)
    ids, mask = left_padded(
        [random_tokens(1, length, seed)[0] for seed, length in enumerate((160, 131, 20))]
    )
    best = (
        Threshold(0.03),
        TopK(0.6),
        TokenBudget(80, sizes[1]),
        CalibratedLayer(0.2, 1.5, -1, -0.5, 3),
    )
    for layer in inputs_of_layers(tiny_model(), ids, attention_mask=mask):
        pooled = pool_keys(
            gate.cfg.cached_pools, layer.k_nope, layer.k, block_size=sizes[1], start=layer.kv_start
        )
        last = {name: getattr(layer, name)[:, :, 64:] for name in ("q", "q_nope", "k_nope")}
        chunk = replace(layer, **last, pooled=Pooled(pooled, layer.num_keys))
        always = AlwaysRead(1, 1, dense_queries=10, short_rows=2)
        for x, policy in itertools.product((layer, chunk, replace(chunk, ends_prompt=False)), best):
            selection = Selection(
                policy, GATE_SCORERS[scores](gate), always, earlier=[TopK(0.7)] * 2
            )
            wanted = selection.choose(selection.scorer(x), x)
            assert torch.equal(selection.blocks(x), pack_blocks(wanted))
            found, candidates = selection.blocks(x), selection.candidates(x)
            assert share_unread(found, candidates) == share_unread(wanted, candidates)
            bits, whole = (
                selected_attention(x, chosen, selection.sizes) for chosen in (found, wanted)
            )
            assert torch.equal(bits.out, whole.out)
