"""Calibrated thresholds: the share that is read at several lengths, the always-read blocks, chunks,
refusals.
"""

import re
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from msattn.trainer import progress
from msattn.trainer.config import BlockSizes, SelectConfig
from msattn.trainer.config.select import BASELINES
from msattn.trainer.errors import UserError
from msattn.trainer.methods.base import Scorer
from msattn.trainer.methods.blocks import AlwaysRead, sparsity_in_reach
from msattn.trainer.methods.selection import Selection
from msattn.trainer.methods.thresholds import SPARSITIES, Allocation, calibrate_blocks, shortest_row
from msattn.trainer.methods.untrained.scores.a_shape import measure_spans
from msattn.trainer.methods.untrained.scores.quest import Quest
from tests.factory import inputs_of_layers, random_tokens, tiny_model
from tests.methods.layers import layer_inputs

BLOCK = 16


@pytest.mark.parametrize("scores", BASELINES)
def test_calibrated_baselines_read_the_given_share_of_each_layer(scores: str) -> None:
    """The share is counted block by block over the causal triangle, which needs none of the
    calibration's code.
    """
    model, ids, blocks = tiny_model(initializer_range=0.3), random_tokens(3, 40 * BLOCK), 40
    chunks = [{"input_ids": row} for row in ids]
    if scores == "a_shape":
        scorer: Scorer = measure_spans(model, chunks, BlockSizes(BLOCK, BLOCK))
    else:
        scorer = Selection.from_config(SelectConfig(scores=scores, block_size=BLOCK)).scorer
    table = calibrate_blocks({scores: scorer}, model, chunks, allocation=Allocation())[scores]
    select = SelectConfig("calibrated", scores=scores, block_size=BLOCK, sparsity=0.6)
    selection = Selection.from_config(select, scorer=scorer, thresholds=table)
    triangle = [(row, col) for row in range(blocks) for col in range(row + 1)]
    # Chunk by chunk, because random scores depend on the shape.
    masks = [[selection.blocks(x)[0] for x in inputs_of_layers(model, row[None])] for row in ids]
    for layer in range(2):
        read = torch.stack(
            [torch.stack([masks[i][layer][:, r, c] for r, c in triangle]) for i in range(len(ids))]
        )
        assert read.float().mean().item() == pytest.approx(
            0.4, abs=0.05 if scores == "a_shape" else 0.02
        )


def scores_of_power_law(blocks: int, seed: int) -> Tensor:
    """Heavy-tailed scores of 16 heads, whose rows sum to 1: a few blocks of a row hold most of it,
    as in a language model.
    """
    raw = torch.rand(1, 16, blocks, blocks, generator=torch.Generator().manual_seed(seed)) ** -0.5
    raw = raw * torch.ones(blocks, blocks).tril()
    return raw / raw.sum(-1, keepdim=True)


class Drawn:
    """Scores that depend on the number of blocks alone."""

    sizes = BlockSizes(BLOCK, BLOCK)

    def __call__(self, x) -> Tensor:
        return scores_of_power_law(x.num_keys // BLOCK, seed=x.num_keys)


@pytest.mark.parametrize("sparsity", [0.5, 0.8, 0.9])
def test_the_share_holds_at_other_lengths_than_those_of_the_calibration(sparsity: float) -> None:
    """Measured on 128 blocks, prompts of 32 to 192 blocks read the share, or what is always
    read.
    """
    table = calibrate_blocks(
        {"drawn": Drawn()}, tiny_model(), [{"input_ids": random_tokens(1, 128 * BLOCK)[0]}]
    )["drawn"]
    select = SelectConfig("calibrated", scores="quest", block_size=BLOCK, sparsity=sparsity)
    selection = Selection.from_config(select, thresholds=table)
    for blocks in (32, 64, 128, 192):
        x = layer_inputs(blocks * BLOCK)
        mask = selection.choose(scores_of_power_law(blocks, seed=blocks), x)
        read = mask.sum() / (16 * selection.candidates(x).visible.sum())
        least = 1 - sparsity_in_reach(blocks, selection.always)
        assert read.item() == pytest.approx(max(1 - sparsity, least), abs=0.022)


def test_all_scores_are_calibrated_in_one_pass() -> None:
    model, chunks, passes = tiny_model(), [{"input_ids": random_tokens(1, 20 * BLOCK)[0]}], []
    scorers = {
        name: Selection.from_config(SelectConfig(scores=name, block_size=BLOCK)).scorer
        for name in ("quest", "mean_pool")
    }
    hook = model.register_forward_pre_hook(lambda *_: passes.append(1))
    decoder = model.model.register_forward_pre_hook(lambda *_: passes.append(1))
    together = calibrate_blocks(scorers, model, chunks)
    hook.remove()
    assert len(passes) == 1
    decoder.remove()
    for name, scorer in scorers.items():
        assert calibrate_blocks({name: scorer}, model, chunks)[name] == together[name]


def test_a_calibration_counts_its_chunks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(Quest):
        def __call__(self, x: Any) -> Tensor:
            time.sleep(0.1)
            return super().__call__(x)

    monkeypatch.setattr(progress, "INTERVAL", 0.01)
    chunks = ({"input_ids": row} for row in random_tokens(3, 20 * BLOCK))
    calibrate_blocks({"quest": Slow(BLOCK)}, tiny_model(), chunks)
    found = capsys.readouterr().err
    assert re.search(r"^msattn: calibrating the thresholds of quest, chunks: [12]/3, ", found, re.M)


def test_chunks_too_short_for_a_sparsity_leave_it_to_topk() -> None:
    table = calibrate_blocks(
        {"quest": Quest(BLOCK)}, tiny_model(), [{"input_ids": random_tokens(1, 24 * BLOCK)[0]}]
    )["quest"]
    assert table.layers[0][SPARSITIES.index(0.5)] is not None
    assert table.layers[0][SPARSITIES.index(0.9)] is None
    x = inputs_of_layers(tiny_model(), random_tokens(1, 60 * BLOCK))[0]
    masks = [
        Selection.from_config(
            SelectConfig(policy, scores="quest", block_size=BLOCK, sparsity=0.9), thresholds=table
        ).blocks(x)
        for policy in ("calibrated", "topk")
    ]
    assert torch.equal(*(mask[:, :, 7:] for mask in masks))  # rows before are short


def test_calibrated_scores_without_thresholds_are_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"^select.policy=calibrated: needs calibrated thresholds of select.scores=quest; "
        r"topk",
    ):
        Selection.from_config(SelectConfig("calibrated", scores="quest"))
    table = calibrate_blocks(
        {"quest": Quest(BLOCK)}, tiny_model(), [{"input_ids": random_tokens(1, 64)[0]}]
    )["quest"]
    with pytest.raises(UserError, match=r"^select.sparsity=0.97: quest is calibrated up to 0.95$"):
        Selection.from_config(
            SelectConfig("calibrated", scores="quest", sparsity=0.97), thresholds=table
        )


def calibrated_quest(sizes: BlockSizes) -> Selection:
    ids = random_tokens(1, 40 * sizes.queries)[0]
    table = calibrate_blocks({"quest": Quest(*sizes)}, tiny_model(), [{"input_ids": ids}])["quest"]
    select = SelectConfig("calibrated", scores="quest", sparsity=0.8, **sizes.arguments)
    return Selection.from_config(select, thresholds=table)


@pytest.mark.parametrize(
    ("sizes", "blocks", "short"),
    [
        (BlockSizes(BLOCK, BLOCK), 40, 5),
        (BlockSizes(BLOCK, BLOCK), 128, 16),
        (BlockSizes(BLOCK, BLOCK), 160, 16),
        (BlockSizes(2 * BLOCK, BLOCK), 40, 5),
    ],
)
def test_short_rows_are_read_whole(sizes: BlockSizes, blocks: int, short: int) -> None:
    """Rows of up to 16 blocks, and of up to an eighth of the prompt's, whatever the keys of a
    block.
    """
    candidates = calibrated_quest(sizes).candidates(layer_inputs(blocks * sizes.queries))
    whole = (candidates.always == candidates.visible).all(-1).flatten().tolist()
    assert whole == [True] * short + [False] * (blocks - short)


@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_a_share_is_in_reach_from_the_same_number_of_keys_on(sparsity: float) -> None:
    fine, equal = (
        size * shortest_row(sparsity, AlwaysRead(), BlockSizes(64, size)) for size in (16, 64)
    )
    assert fine == equal


def test_chunks_may_differ_in_length() -> None:
    ids = random_tokens(1, 60 * BLOCK)[0]
    chunks = [{"input_ids": ids[: blocks * BLOCK]} for blocks in (24, 60, 1, 33)]
    table = calibrate_blocks({"quest": Quest(BLOCK)}, tiny_model(initializer_range=0.3), chunks)[
        "quest"
    ]
    assert (
        table
        == calibrate_blocks(
            {"quest": Quest(BLOCK)}, tiny_model(initializer_range=0.3), chunks[::-1]
        )["quest"]
    )
    assert all(layer[SPARSITIES.index(0.5)] is not None for layer in table.layers)
