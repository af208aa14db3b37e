"""Blocks of fewer keys than queries: what is visible and always read, scores, gates, thresholds,
policies.
"""

import itertools
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msattn.kernels.common.block_bits import pack_blocks
from msattn.kernels.testing import pool_over_blocks, visible
from msattn.trainer.config import BlockSizes, GateConfig, SelectConfig
from msattn.trainer.config.policies import CalibratedLayer, Threshold, TokenBudget, TopK
from msattn.trainer.errors import UserError
from msattn.trainer.methods import selection as select
from msattn.trainer.methods.blocks import AlwaysRead, candidate_blocks
from msattn.trainer.methods.blocks import sparsity as share_unread
from msattn.trainer.methods.gate.attn_gate import Gate, GateScores, pool_keys
from msattn.trainer.methods.gate.question import QuestionScores
from msattn.trainer.methods.gate.train import gate_thresholds
from msattn.trainer.methods.selection import Selection, selected_attention
from msattn.trainer.methods.thresholds import calibrate_blocks, shortest_row
from msattn.trainer.methods.untrained.scores.a_shape import measure_spans
from msattn.trainer.methods.untrained.scores.mean_pool import MeanPool
from msattn.trainer.methods.untrained.scores.oracle import Oracle
from msattn.trainer.methods.untrained.scores.quest import Quest
from msattn.trainer.methods.untrained.scores.xattention import XAttention
from msattn.trainer.models.layer_attention import Pooled
from tests.factory import inputs_of_layers, left_padded, random_tokens, tiny_model
from tests.methods.gate.random_gates import noisy_gate, topical_tokens
from tests.methods.layers import blocks_read, layer_inputs
from tests.sparse import save

SIZES = BlockSizes(64, 16)
ARGUMENTS = SIZES.arguments


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.lists(st.integers(0, 200), min_size=1, max_size=2),
    st.sampled_from(
        [BlockSizes(64, 16), BlockSizes(32, 16), BlockSizes(64, 32), BlockSizes(16, 16)]
    ),
    st.sampled_from(
        [AlwaysRead(0, 0), AlwaysRead(1, 1), AlwaysRead(2, 1, dense_queries=40), AlwaysRead(0, 2)]
    ),
)
def test_sink_and_local_blocks_hold_as_many_keys_as_those_of_equal_sizes(
    num_queries, num_keys, padding, sizes, always
) -> None:
    """By definition, in loops over the rows and columns of blocks."""
    padding = [p % num_keys for p in padding]
    found = candidate_blocks(layer_inputs(num_queries, num_keys, padding), sizes, always)
    for b, pad in enumerate(padding):
        keys = num_keys - pad
        begin = max(0, keys - num_queries)
        for r, first in enumerate(range(begin, begin + num_queries, sizes.queries)):
            queries = range(first, min(first + sizes.queries, keys))
            for c in range(found.visible.shape[3]):
                own = range(c * sizes.keys, (c + 1) * sizes.keys)
                seen = bool(queries) and own[0] <= queries[-1]
                local = own[-1] >= first - always.local_blocks * sizes.queries
                required = local or own[0] < always.sink_blocks * sizes.queries
                if always.dense_queries:
                    required = required or (
                        bool(queries) and queries[-1] >= keys - always.dense_queries
                    )
                assert found.visible[b, 0, r, c].item() == seen
                assert found.always[b, 0, r, c].item() == (seen and required)


def test_scores_that_pool_keys_by_their_definitions() -> None:
    x, rows, cols = layer_inputs(150, 210), range(0, 150, 64), range(0, 210, 16)
    seen = candidate_blocks(x, SIZES).visible[0, 0]
    probs = (
        (x.q @ x.k.repeat_interleave(2, 1).mT * x.scale)
        .masked_fill(~visible(1, 150, 210, True, None), -torch.inf)
        .softmax(-1)
    )
    masses = pool_over_blocks(
        probs, torch.arange(150)[None] // 64, torch.arange(210)[None] // 16, (3, 14), "mass"
    )
    torch.testing.assert_close(Oracle(*SIZES)(x), masses / masses.sum(-1, keepdim=True))
    means, bounds = (torch.full((1, 4, 3, 14), -torch.inf) for _ in range(2))
    for h in range(4):
        for r, first in enumerate(rows):
            queries = x.q[0, h, first : first + 64]
            for c, begin in enumerate(cols):
                keys = x.k[0, h // 2, begin : begin + 16]
                if seen[r, c]:
                    means[0, h, r, c] = queries.mean(0) @ keys.mean(0) * x.scale
                    bound = torch.maximum(queries * keys.amax(0), queries * keys.amin(0)).sum(-1)
                    bounds[0, h, r, c] = bound.amax() * x.scale
    torch.testing.assert_close(MeanPool(*SIZES)(x), means.softmax(-1))
    torch.testing.assert_close(Quest(*SIZES)(x), bounds.softmax(-1))


def test_scores_that_add_over_keys_add_up_to_those_of_larger_blocks() -> None:
    x = layer_inputs(128, 256)
    fine, coarse = XAttention(*SIZES)(x), XAttention(64, 64)(x)
    torch.testing.assert_close(fine.unflatten(-1, (-1, 4)).sum(-1), coarse)


def test_spans_of_heads_are_measured_by_distance_in_blocks_of_keys() -> None:
    shape = measure_spans(tiny_model(), [{"input_ids": random_tokens(1, 260)[0]}], SIZES)
    assert shape.sizes == SIZES
    assert shape.profile.shape == (2, 4, 1 + 17)
    x = layer_inputs(150, 210)
    seen = candidate_blocks(x, SIZES).visible
    torch.testing.assert_close(shape(x).sum(-1), torch.ones(1, 4, 3))
    assert (shape(x).masked_select(~seen.expand(1, 4, -1, -1)) == 0).all()


def gate_config(**changes: Any) -> GateConfig:
    return GateConfig(**{"block_size": 32, "key_block_size": 16, **changes})


def test_thresholds_read_the_share_of_the_keys_that_is_asked_for() -> None:
    model, gate = tiny_model(initializer_range=0.3), noisy_gate(gate_config(), std=0.2)
    gate.thresholds = gate_thresholds(
        gate, model, [{"input_ids": row} for row in topical_tokens(4, 80, seed=3)]
    )
    for scores in ("gate", "gate_question"):
        selection = Selection.from_config(
            SelectConfig("calibrated", scores=scores, sparsity=0.6), gate
        )
        read, seen = 0, 0
        for row in topical_tokens(4, 80, seed=2):
            for x in inputs_of_layers(model, row[None]):
                read += blocks_read(selection, x)[0, :, :-1].sum().item()
                seen += 4 * selection.candidates(x).visible[..., :-1, :].sum().item()
        assert read / seen == pytest.approx(0.4, abs=0.04)


def test_short_rows_are_counted_in_blocks_of_as_many_keys_as_queries() -> None:
    """Rows read nothing but the always-read blocks up to the same number of keys, whatever the keys
    of a block.
    """
    always = AlwaysRead()
    for sparsity in (0.5, 0.9):
        keys = {
            sizes.keys * shortest_row(sparsity, always, sizes)
            for sizes in (BlockSizes(64, 16), BlockSizes(64, 64))
        }
        assert len(keys) == 1
    chunks = [{"input_ids": random_tokens(1, 40 * 32)[0]}]
    table = calibrate_blocks({"quest": Quest(32, 16)}, tiny_model(), chunks)["quest"]
    select = SelectConfig(
        "calibrated", scores="quest", block_size=32, key_block_size=16, sparsity=0.8
    )
    x = layer_inputs(40 * 32)
    mask = Selection.from_config(select, thresholds=table).blocks(x)
    whole = (
        mask.all(1)[0]
        .masked_fill(~candidate_blocks(x, BlockSizes(32, 16)).visible[0, 0], True)
        .all(-1)
    )
    assert whole[:5].all()  # rows of up to 5 blocks of 32, an eighth of the prompt
    assert not whole[5:].any()


def test_a_prompt_budget_counts_keys() -> None:
    x = layer_inputs(40 * 64)
    select = SelectConfig("token_budget", scores="random", tokens=1024, **ARGUMENTS)
    assert (Selection.from_config(select).blocks(x)[0, :, 20:].sum(-1) == 64).all()


def test_unequal_sizes_are_checked() -> None:
    with pytest.raises(
        UserError, match=r"^gate\.key_block_size=128: expected gate\.block_size=64 or a part of it$"
    ):
        GateConfig(key_block_size=128)
    with pytest.raises(
        UserError,
        match=r"^select\.key_block_size=32: expected select\.block_size=16 or a part of it$",
    ):
        SelectConfig(block_size=16, key_block_size=32)
    with pytest.raises(
        UserError, match=r"^gate\.key_block_size=16: allowed only with gate\.phase=prefill$"
    ):
        GateConfig(phase="decode", key_block_size=16)
    with pytest.raises(UserError, match=r"^select\.policy=multiscale: expected another policy"):
        Selection.from_config(SelectConfig("multiscale", scores="quest", **ARGUMENTS))


@torch.no_grad()
def test_rows_of_the_question_by_their_definition() -> None:
    """The last row holds the exact map; others the gate's probability or half of the mean
    attention, whichever is larger.
    """
    gate, model = noisy_gate(gate_config(), std=0.2), tiny_model()
    ids, mask = left_padded(
        [random_tokens(1, length, seed)[0] for seed, length in enumerate((160, 131))]
    )
    for x in inputs_of_layers(model, ids, attention_mask=mask):
        x = replace(x, q=3 * x.q)
        found, plain = QuestionScores(gate)(x), GateScores(gate, last_block="pooled")(x)
        seen = candidate_blocks(x, gate.cfg.sizes).visible
        for b, pad in enumerate((0, 29)):
            keys = 160 - pad
            probs = x.q[b, :, -64:] @ x.k[b, :, pad:].repeat_interleave(2, 0).mT * x.scale
            probs = probs.masked_fill(
                torch.arange(keys) > torch.arange(keys - 64, keys)[:, None], -torch.inf
            ).softmax(-1)
            # [4, 64, c]
            masses = torch.nn.functional.pad(probs, (0, -keys % 16)).unflatten(-1, (-1, 16)).sum(-1)
            last = -(-keys // 32) - 1
            own = keys - 32 * last
            exact = masses[:, -own:].amax(1)
            width = exact.shape[-1]
            torch.testing.assert_close(
                found[b, :, last, :width], exact / exact.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6
            )
            columns = masses.mean(1)[:, None]
            rows = (
                plain[b, :, : last - 2, :width].maximum(0.5 * columns)
                * seen[b if len(seen) > 1 else 0, :, : last - 2, :width]
            )
            torch.testing.assert_close(
                found[b, :, : last - 2, :width],
                rows / rows.sum(-1, keepdim=True),
                rtol=1e-4,
                atol=1e-6,
            )


def test_artifacts_keep_the_sizes(tmp_path: Path) -> None:
    model = tiny_model()
    gate = Gate.build(model.config, gate_config()).requires_grad_(False)
    folder = save(tmp_path, model, gate)
    loaded = Gate.load(folder)
    assert loaded.cfg.sizes == BlockSizes(32, 16)
    x = inputs_of_layers(model, random_tokens(1, 100))[0]
    assert torch.equal(loaded.scores(x), gate.scores(x))


def test_artifacts_of_older_versions_have_equal_sizes(tmp_path: Path) -> None:
    model = tiny_model()
    gate = Gate.build(model.config, GateConfig(block_size=32)).requires_grad_(False)
    older = {name: value for name, value in asdict(gate.cfg).items() if name != "key_block_size"}
    assert Gate.load(save(tmp_path, model, gate, gate=older)).cfg.sizes == BlockSizes(32, 32)


@pytest.mark.parametrize("heads", ["query", "kv"])
@torch.no_grad()
def test_parts_of_the_heads_choose_what_all_of_them_do(
    heads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, model = noisy_gate(gate_config(heads=heads), std=0.2), tiny_model()
    ids, mask = left_padded(
        [random_tokens(1, length, seed)[0] for seed, length in enumerate((160, 131))]
    )
    for layer in inputs_of_layers(model, ids, attention_mask=mask):
        pooled = pool_keys(
            gate.cfg.cached_pools, layer.k_nope, layer.k, block_size=16, start=layer.kv_start
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
    gate = noisy_gate(gate_config(block_size=sizes[0], key_block_size=sizes[1]), std=0.2)
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
            selection = Selection(policy, gate.scorer(scores), always, earlier=[TopK(0.7)] * 2)
            wanted = selection.choose(selection.scorer(x), x)
            assert torch.equal(selection.blocks(x), pack_blocks(wanted))
            found, candidates = selection.blocks(x), selection.candidates(x)
            assert share_unread(found, candidates) == share_unread(wanted, candidates)
            bits, whole = (
                selected_attention(x, chosen, selection.sizes) for chosen in (found, wanted)
            )
            assert torch.equal(bits.out, whole.out)
