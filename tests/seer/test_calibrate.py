"""Calibrated thresholds of the baselines' block scores."""

import pytest
import torch

from msattn.trainer.config import SelectConfig
from msattn.trainer.config.select import BASELINES
from msattn.trainer.errors import UserError
from msattn.trainer.seer.a_shape import measure_spans
from msattn.trainer.seer.calibrate import calibrate
from msattn.trainer.seer.select import Scorer, Selection
from tests.factory import inputs_of_layers, random_tokens, tiny_model

BLOCK = 16


@pytest.mark.parametrize("scores", BASELINES)
def test_calibrated_baselines_read_the_given_share_of_each_layer(scores: str) -> None:
    """The share is counted block by block over the causal triangle, which needs none of the calibration's code."""
    model, ids, blocks = tiny_model(initializer_range=0.3), random_tokens(3, 256), 256 // BLOCK
    chunks = [{"input_ids": row} for row in ids]
    if scores == "a_shape":
        scorer: Scorer = measure_spans(model, chunks, BLOCK)
    else:
        scorer = Selection.from_config(SelectConfig(scores=scores, block_size=BLOCK)).scorer
    table = calibrate(scorer, model, chunks)
    select = SelectConfig("calibrated", scores=scores, block_size=BLOCK, sparsity=0.6)
    selection = Selection.from_config(select, scorer=scorer, thresholds=table)
    triangle = [(row, col) for row in range(blocks) for col in range(row + 1)]
    # Chunk by chunk, because random scores depend on the shape.
    masks = [[selection.blocks(x)[0] for x in inputs_of_layers(model, row[None])] for row in ids]
    for layer in range(2):
        read = torch.stack([torch.stack([masks[i][layer][:, r, c] for r, c in triangle]) for i in range(len(ids))])
        assert read.float().mean().item() == pytest.approx(0.4, abs=0.02)


def test_thresholds_are_those_of_sorted_scores() -> None:
    """Without a floor, the blocks read are the diagonal and the highest scores of the layer."""
    model, ids = tiny_model(initializer_range=0.3), random_tokens(1, 256)
    scorer = Selection.from_config(SelectConfig(scores="oracle", block_size=BLOCK)).scorer
    table = calibrate(scorer, model, [{"input_ids": ids[0]}], floor=0)
    selection = Selection.from_config(
        SelectConfig("calibrated", scores="oracle", block_size=BLOCK, sparsity=0.5), thresholds=table
    )
    for x in inputs_of_layers(model, ids):
        scores, mask = scorer(x), selection.blocks(x)
        diagonal = torch.eye(mask.shape[-1], dtype=torch.bool).expand_as(mask)
        below = torch.ones_like(mask).tril(-1)
        assert mask[diagonal].all()
        wanted = round(0.5 * (below | diagonal).sum().item()) - int(diagonal.sum())
        ranked = scores[below].sort(descending=True).values
        lowest = scores[below & mask].min()
        assert scores[below & ~mask].max() < lowest
        assert (ranked >= lowest).sum().item() == pytest.approx(wanted, rel=0.02)  # bins of the histogram are 0.01 wide in log2


def test_calibrated_scores_without_thresholds_are_refused() -> None:
    with pytest.raises(UserError, match=r"^select.policy=calibrated: needs calibrated thresholds of select.scores=quest; topk"):
        Selection.from_config(SelectConfig("calibrated", scores="quest"))
    table = calibrate(
        Selection.from_config(SelectConfig(scores="quest", block_size=BLOCK)).scorer,
        tiny_model(),
        [{"input_ids": random_tokens(1, 64)[0]}],
    )
    with pytest.raises(UserError, match=r"^select.sparsity=0.97: quest is calibrated up to 0.95$"):
        Selection.from_config(SelectConfig("calibrated", scores="quest", sparsity=0.97), thresholds=table)
