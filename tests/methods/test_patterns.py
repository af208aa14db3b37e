"""Vertical-slash and A-shape scores against loops over single queries and keys."""

import pytest
import torch
from torch import Tensor

from msattn.kernels import testing
from msattn.trainer.config import BlockSizes, SelectConfig
from msattn.trainer.methods.blocks import candidate_blocks
from msattn.trainer.methods.selection import Selection
from msattn.trainer.methods.thresholds import Allocation, calibrate_blocks
from msattn.trainer.methods.untrained.scores.a_shape import AShape, falling, measure_spans
from msattn.trainer.methods.untrained.scores.vertical_slash import VerticalSlash
from msattn.trainer.models.layer_attention import dense_attention
from msattn.trainer.models.tap import LayerInputs, run_backbone, tap
from tests.factory import random_tokens, tiny_model
from tests.methods.layers import SHAPES, geometry, layer_inputs

BLOCK = 16


def slow_vertical_slash(x: LayerInputs, row: int, head: int, last: int) -> Tensor:
    """Unnormalized block scores ``[Tr, Tc]`` of one sequence and head, with dictionaries of columns
    and distances.
    """
    pad = 0 if x.kv_start is None else int(x.kv_start[row])
    past, keys = x.num_keys - x.num_queries, x.num_keys - pad
    k = x.k[row, head // 2, pad:]
    columns, distances = dict.fromkeys(range(keys), 0.0), {}
    for query in range(max(0, x.num_queries - last), x.num_queries):
        position = query + past - pad
        if position < 0:
            continue
        weights = (k[: position + 1] @ x.q[row, head, query] * x.scale).softmax(0).tolist()
        for key, weight in enumerate(weights):
            columns[key] += weight
            distances[position - key] = distances.get(position - key, 0.0) + weight
    visible = geometry(
        x.num_queries, x.num_keys, None if x.kv_start is None else x.kv_start.tolist()
    )[0]
    first = max(past - pad, 0)
    scores = torch.zeros(visible.shape[2:])
    for r, c in visible[row if len(visible) > 1 else 0, 0].nonzero().tolist():
        for key in range(c * BLOCK, (c + 1) * BLOCK):
            crossing = [distances.get(first + r * BLOCK + i - key, 0.0) for i in range(BLOCK)]
            scores[r, c] = max(scores[r, c].item(), columns.get(key, 0.0), *crossing)
    return scores


@pytest.mark.parametrize(("num_queries", "num_keys", "padding"), SHAPES)
def test_vertical_slash_scores_are_the_largest_mass_that_crosses_a_block(
    num_queries, num_keys, padding
):
    x = layer_inputs(num_queries, num_keys, padding)
    scores = VerticalSlash(BLOCK, last_queries=24)(x)
    for row in range(len(x.q)):
        for head in range(4):
            expected = slow_vertical_slash(x, row, head, 24)
            expected /= expected.sum(-1, keepdim=True).clamp(min=1e-30)
            torch.testing.assert_close(scores[row, head], expected, rtol=1e-4, atol=1e-6)


def slow_profile(x: LayerInputs) -> tuple[Tensor, Tensor]:
    """Sums and counts of the oracle's scores of one head and sequence: first block, then by
    distance.
    """
    probs = testing.dense_attention(
        x.q, x.k, x.v, testing.visible(1, x.num_keys, x.num_keys, True, None), x.scale
    ).probs[0]
    blocks = -(-x.num_keys // BLOCK)
    sums, counts = torch.zeros(probs.shape[0], 1 + blocks), torch.zeros(1 + blocks)
    for r in range(1, blocks):
        rows = probs[:, r * BLOCK : (r + 1) * BLOCK]
        best = torch.stack(
            [rows[:, :, c * BLOCK : (c + 1) * BLOCK].amax((1, 2)) for c in range(r + 1)], 1
        )
        best /= best.sum(1, keepdim=True)
        for c in range(r + 1):
            place = 0 if c == 0 else 1 + r - c
            sums[:, place] += best[:, c]
            counts[place] += 1
    return sums, counts


def test_spans_are_measured_by_head_and_distance():
    model, ids = tiny_model(initializer_range=0.3), random_tokens(2, 150)
    shape = measure_spans(model, [{"input_ids": row} for row in ids], BlockSizes(BLOCK, BLOCK))
    sums, counts = torch.zeros(2, 4, 11), torch.zeros(11)

    def record(x: LayerInputs) -> Tensor:
        found = slow_profile(x)
        sums[x.layer] += found[0]
        counts.add_(found[1] / 2)
        return dense_attention(x)

    with torch.no_grad(), tap(model, record):
        for row in ids:
            run_backbone(model, row[None])
    torch.testing.assert_close(
        shape.profile, falling(sums / counts.clamp(min=1)), rtol=1e-4, atol=1e-6
    )


def test_spans_of_fewer_keys_than_queries_are_measured_by_distance_in_blocks_of_keys():
    sizes = BlockSizes(64, 16)
    shape = measure_spans(tiny_model(), [{"input_ids": random_tokens(1, 260)[0]}], sizes)
    assert shape.sizes == sizes
    assert shape.profile.shape == (2, 4, 1 + 17)
    x = layer_inputs(150, 210)
    seen = candidate_blocks(x, sizes).visible
    torch.testing.assert_close(shape(x).sum(-1), torch.ones(1, 4, 3))
    assert (shape(x).masked_select(~seen.expand(1, 4, -1, -1)) == 0).all()


def test_a_profile_falls_with_the_distance():
    profile = falling(torch.tensor([[0.5, 0.1, 0.4, 0.2, 0.2, 0.0]]))
    assert profile[0, 0] == 0.5
    assert (profile[0, 1:].diff() < 0).all()
    torch.testing.assert_close(
        profile[0, 1:], torch.tensor([0.4, 0.4, 0.2, 0.2, 0]), rtol=0.5, atol=1e-8
    )


@pytest.mark.parametrize(("num_queries", "num_keys", "padding"), SHAPES)
def test_a_shape_scores_depend_on_head_and_distance_alone(num_queries, num_keys, padding):
    # shorter than the prompts
    profile = falling(torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(0)))
    x = layer_inputs(num_queries, num_keys, padding)
    scores = AShape(BLOCK, profile=profile)(x)
    visible = geometry(num_queries, num_keys, padding)[0]
    assert scores.shape == (len(x.q), 4, *visible.shape[2:])
    for b, h, r in torch.cartesian_prod(*map(torch.arange, scores.shape[:3])).tolist():
        count = int(visible[b if len(visible) > 1 else 0, 0, r].sum())
        if not count:
            assert not scores[b, h, r].any()
            continue
        sink, near = profile[1, h, 0].item(), profile[1, h, 1:].tolist()
        raw = [sink] + [near[min(d, 2)] * 3 / max(d + 1, 3) for d in range(count - 2, -1, -1)]
        expected = torch.zeros(scores.shape[3])
        expected[:count] = torch.tensor(raw) / sum(raw)
        torch.testing.assert_close(scores[b, h, r], expected)


def test_calibrated_spans_follow_the_profiles_of_the_heads():
    model, ids = tiny_model(), random_tokens(2, 640)
    reach = torch.tensor([0.5, 1, 2, 8])[:, None]
    profile = falling(
        torch.cat([torch.full((4, 1), 0.2), (-torch.arange(40) / reach).exp()], dim=1)
    ).expand(2, -1, -1)
    shape = AShape(BLOCK, profile=profile)
    table = calibrate_blocks(
        {"a_shape": shape}, model, [{"input_ids": row} for row in ids], allocation=Allocation(0)
    )["a_shape"]
    cfg = SelectConfig("calibrated", scores="a_shape", block_size=BLOCK, sparsity=0.6)
    mask = Selection.from_config(cfg, scorer=shape, thresholds=table).blocks(layer_inputs(640))[0]
    spans = torch.stack([window_length(mask[h, 39]) for h in range(4)])
    assert (spans.diff() >= 0).all()
    assert spans[3] >= 2 * spans[0]
    read, visible = mask[:, 16:].sum().item(), 4 * sum(range(17, 41))
    assert read / visible == pytest.approx(0.4, abs=0.03)


def window_length(row: Tensor) -> Tensor:
    """Returns the number of blocks next to the last one that are read, and asserts that all others
    but the first are not.
    """
    near = row[1:].flip(0).int()
    assert (near.diff() <= 0).all()
    return near.sum()
