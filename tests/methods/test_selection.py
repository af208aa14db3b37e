"""Visible blocks, policies, scorers, recall, sparsity."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from msattn.kernels import testing
from msattn.kernels.common import block_counts
from msattn.kernels.common.block_bits import pack_blocks
from msattn.kernels.maxpool_attention import maxpool_attention
from msattn.trainer.config import POLICIES, SCORES, BlockSizes, SelectConfig
from msattn.trainer.config.policies import Multiscale, Nucleus, Threshold, TokenBudget, TopK
from msattn.trainer.config.select import GATE_SCORES
from msattn.trainer.errors import UserError
from msattn.trainer.methods import selection as select
from msattn.trainer.methods.blocks import AlwaysRead, candidate_blocks, normalize_rows, sparsity
from msattn.trainer.methods.gate.attn_gate import GATE_SCORERS
from msattn.trainer.methods.untrained import base, untrained_scorer
from msattn.trainer.methods.untrained.scores.mean_pool import MeanPool
from msattn.trainer.methods.untrained.scores.oracle import Oracle
from msattn.trainer.methods.untrained.scores.quest import Quest
from msattn.trainer.methods.untrained.scores.random import Random
from msattn.trainer.models.layer_attention import attention_recall, selected_attention
from msattn.trainer.models.tap import LayerInputs
from tests.methods.layers import BLOCK, SHAPES, geometry, layer_inputs, row_candidates

# policies that need no trained gate
FREE_POLICIES = [policy for policy in POLICIES if policy != "calibrated"]
BASELINES = [untrained_scorer(name) for name in SCORES if name not in (*GATE_SCORES, "a_shape")]


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.none() | st.lists(st.integers(0, 200), min_size=1, max_size=3),
    st.sampled_from(
        [BlockSizes(64, 16), BlockSizes(32, 16), BlockSizes(64, 32), BlockSizes(16, 16)]
    ),
    st.sampled_from(
        [AlwaysRead(0, 0), AlwaysRead(1, 1), AlwaysRead(2, 1, dense_queries=40), AlwaysRead(0, 2)]
    ),
)
@example(30, 61, [0, 40, 50], BlockSizes(16, 16), AlwaysRead(0, 0))
@example(75, 40, None, BlockSizes(16, 16), AlwaysRead(0, 0))
def test_visible_diagonal_sink_and_local_blocks(num_queries, num_keys, padding, sizes, always):
    """By definition, in loops over the rows and columns of blocks: sink and local blocks hold as
    many keys as those of equal sizes.
    """
    padding = None if padding is None else [p % num_keys for p in padding]
    found = candidate_blocks(layer_inputs(num_queries, num_keys, padding), sizes, always)
    for b, pad in enumerate(padding or [0]):
        keys = num_keys - pad
        begin = max(0, keys - num_queries)
        for r, first in enumerate(range(begin, begin + num_queries, sizes.queries)):
            queries = range(first, min(first + sizes.queries, keys))
            for c in range(found.visible.shape[3]):
                own = range(c * sizes.keys, (c + 1) * sizes.keys)
                seen = bool(queries) and own[0] <= queries[-1]
                # with no local blocks, those of the diagonal
                local = range(first - always.local_blocks * sizes.queries, queries.stop)
                required = own[0] < always.sink_blocks * sizes.queries
                required = required or any(key in local for key in own)
                if always.dense_queries:
                    required = required or (
                        bool(queries) and queries[-1] >= keys - always.dense_queries
                    )
                assert found.visible[b, 0, r, c].item() == seen
                assert found.always[b, 0, r, c].item() == (seen and required)


@pytest.mark.parametrize(("num_queries", "num_keys", "padding"), SHAPES)
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.99])
def test_topk_reads_the_given_share_of_each_row(num_queries, num_keys, padding, sparsity):
    # two sink blocks, which count within the share
    among = row_candidates(num_queries, num_keys, padding, sink_blocks=2)
    visible, always = among.visible, among.always
    scores = torch.rand(visible.shape[0], 4, *visible.shape[2:]) * visible
    mask = TopK(sparsity=sparsity)(scores, among)
    for row, seen, least in zip(
        mask.transpose(0, 1).flatten(1, 2).unbind(1),
        visible.flatten(0, 2),
        always.flatten(0, 2),
        strict=True,
    ):
        v = int(seen.sum())
        count = min(v, max(1, round((1 - sparsity) * v), int(least.sum())))
        assert (row.sum(-1) == count).all()
    assert (mask <= visible).all()
    assert (always <= mask).all()
    if sparsity == 0:
        assert torch.equal(mask, visible.expand_as(mask))


def test_token_budget_limits_the_keys_of_a_row():
    among = row_candidates(160, 160, None)
    visible, diagonal = among.visible, among.always
    scores = torch.rand(1, 2, 10, 10) * visible
    mask = TokenBudget(tokens=3 * BLOCK + 5, block_size=BLOCK)(scores, among)
    assert torch.equal(mask.sum(-1), visible.sum(-1).clamp(max=3).expand(1, 2, 10))
    smallest = TokenBudget(tokens=1, block_size=BLOCK)(scores, among)
    assert torch.equal(smallest, diagonal.expand_as(smallest))


def test_a_prompt_budget_counts_keys():
    sizes = BlockSizes(64, 16).arguments
    select_config = SelectConfig("token_budget", scores="random", tokens=1024, **sizes)
    mask = select.Selection.from_config(select_config).blocks(layer_inputs(40 * 64))
    assert (mask[0, :, 20:].sum(-1) == 64).all()


@pytest.mark.parametrize(("num_queries", "num_keys", "padding"), SHAPES)
def test_multiscale_gives_each_zoom_its_share(num_queries, num_keys, padding):
    among = row_candidates(num_queries, num_keys, padding)
    visible, diagonal = among.visible, among.always
    scores = torch.rand(visible.shape[0], 4, *visible.shape[2:]) * visible
    shares = [0.25, 0.25, 0.125, 0.125]
    zoom = Multiscale(shares=shares)(scores, among)
    assert zoom.dtype == torch.uint8
    assert ((zoom > 0) <= visible).all()
    assert (zoom[diagonal.expand_as(zoom)] == 1).all()
    counts = visible.sum(-1).double()
    for i, z in enumerate((1, 2, 4, 8)):
        first, end = ((counts * sum(shares[:n])).round() for n in (i, i + 1))
        at_zoom = (zoom == z).sum(-1)
        if z == 1:
            assert (at_zoom == torch.maximum(end, diagonal.sum(-1))).all()
        else:
            # what must be read whole comes out of the next shares
            forced = (diagonal.sum(-1) - first).clamp(min=0)
            assert (at_zoom == (end - first - forced).clamp(min=0)).all()


def test_multiscale_zooms_follow_the_scores_and_read_the_stated_cost():
    among = row_candidates(1280, 1280, None)
    scores = torch.rand(1, 2, 80, 80) * among.visible
    policy = Multiscale(shares=[0.1, 0.1, 0.2, 0.4])
    zoom = policy(scores, among)
    last, own = scores[0, 0, -1, :-1], zoom[0, 0, -1, :-1]
    for finer, coarser in ((1, 2), (2, 4), (4, 8), (8, 0)):
        assert last[own == finer].min() > last[own == coarser].max()
    assert policy.cost == pytest.approx(0.25)
    assert sparsity(zoom[:, :, -1:], among.rows(slice(-1, None))).item() == pytest.approx(
        1 - policy.cost
    )
    whole = Multiscale(shares=[1.0, 0.0, 0.0, 0.0])(scores, among)
    assert torch.equal(whole.bool(), among.visible.expand_as(whole))
    as_many = Multiscale(shares=[0.25, 0.0, 0.0, 0.0])(scores, among)
    assert torch.equal(as_many.bool(), TopK(sparsity=0.75)(scores, among))


def test_threshold_reads_every_block_that_reaches_it():
    among = row_candidates(160, 160, None)
    visible, diagonal = among.visible, among.always
    scores = normalize_rows(torch.rand(1, 2, 10, 10) * visible)
    mask = Threshold(threshold=0.1)(scores, among)
    assert torch.equal(mask, (scores >= 0.1) & visible | diagonal)
    assert torch.equal(Threshold(threshold=0.0)(scores, among), visible.expand_as(mask))


def test_nucleus_is_the_smallest_set_with_the_mass():
    among = row_candidates(160, 160, None)
    visible, diagonal = among.visible, among.always
    scores = normalize_rows(torch.rand(1, 2, 10, 10).square() * visible)
    mask = Nucleus(mass=0.7)(scores, among)
    held = (scores * mask).sum(-1)
    assert (held >= 0.7 - 1e-6).all()
    least = scores.masked_fill(~mask | diagonal, math.inf).amin(-1)
    # without its lowest score the mass would not be reached
    assert ((held - least < 0.7) | (least == math.inf)).all()
    assert torch.equal(Nucleus(mass=1.0)(scores, among), visible.expand_as(mask))


# keys of policies that read few blocks
FEW: dict[str, Any] = {"topk": {"sparsity": 0.8}, "token_budget": {"tokens": 20}}
# numbers of queries and keys, padding of each sequence
PLACES = (
    st.integers(1, 90),
    st.integers(1, 90),
    st.lists(st.integers(0, 100), min_size=1, max_size=3),
)


@settings(deadline=None, max_examples=40)
@given(*PLACES, st.sampled_from(FREE_POLICIES), st.sampled_from([(None, None), (0, 0), (3, 2)]))
def test_any_policy_reads_sink_local_and_diagonal_blocks_and_no_invisible_one(
    num_queries, num_keys, padding, policy, always
):
    padding = [p % num_keys for p in padding]
    x = layer_inputs(num_queries, num_keys, padding)
    sink, local = always
    cfg = SelectConfig(
        policy,
        scores="random",
        block_size=BLOCK,
        sink_blocks=sink,
        local_blocks=local,
        **FEW.get(policy, {}),
    )
    mask = select.Selection.from_config(cfg).blocks(x) > 0
    visible, diagonal = geometry(num_queries, num_keys, padding)
    sink, local = (1 if given is None else given for given in always)
    required = diagonal.clone()
    for _ in range(local):
        required |= F.pad(required, (0, 1))[..., 1:]  # the block before each
    required[..., :sink] |= visible[..., :sink]
    assert (mask <= visible).all()
    assert (required <= mask).all()
    assert torch.equal(mask.any(-1), visible.any(-1).expand(mask.shape[:-1]))


@settings(deadline=None, max_examples=40)
@given(*PLACES, st.sampled_from(FREE_POLICIES), st.integers(1, 200))
def test_rows_of_the_last_queries_read_every_block(
    num_queries, num_keys, padding, policy, dense_queries
):
    padding = [p % num_keys for p in padding]
    x = layer_inputs(num_queries, num_keys, padding)
    cfg = SelectConfig(policy, scores="random", block_size=BLOCK, **FEW.get(policy, {}))
    few, more = (
        select.Selection.from_config(each)
        for each in (cfg, replace(cfg, dense_queries=dense_queries))
    )
    mask, visible = more.blocks(x) > 0, geometry(num_queries, num_keys, padding)[0]
    for b, pad in enumerate(padding):
        queries = min(num_queries, num_keys - pad)  # that are not padding
        first_row = max(0, queries - dense_queries) // BLOCK
        assert torch.equal(
            mask[b, :, first_row:], visible[b, :, first_row:].expand_as(mask[b, :, first_row:])
        )
        assert torch.equal(mask[b, :, :first_row], few.blocks(x)[b, :, :first_row] > 0)


@pytest.mark.parametrize("scorer", BASELINES)
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "padding", "sizes"),
    [
        *((*shape, BlockSizes(BLOCK, BLOCK)) for shape in SHAPES),
        (150, 210, None, BlockSizes(64, 16)),
        (150, 210, [0, 37], BlockSizes(64, 16)),
    ],
)
def test_scores_are_distributions_over_visible_blocks(
    scorer, num_queries, num_keys, padding, sizes
):
    x = layer_inputs(num_queries, num_keys, padding)
    scores = scorer(*sizes)(x)
    visible = candidate_blocks(x, sizes).visible
    assert scorer(*sizes).sizes == sizes
    assert scores.dtype == torch.float32
    assert scores.shape == (x.q.shape[0], 4, *visible.shape[2:])
    assert (scores.masked_select(~visible.expand_as(scores)) == 0).all()
    assert (scores >= 0).all()
    torch.testing.assert_close(scores.sum(-1), visible.any(-1).float().expand(scores.shape[:-1]))


@pytest.mark.parametrize("scorer", [each for each in BASELINES if each is not Random])
def test_padding_moves_no_score(scorer):
    padding = [0, 5, 33]
    x = layer_inputs(70, padding=padding)
    scores = scorer(BLOCK)(x)
    for b, pad in enumerate(padding):
        alone = LayerInputs(
            **{
                **vars(x),
                **{
                    name: getattr(x, name)[b : b + 1, :, pad:]
                    for name in ("q", "k", "v", "q_nope", "k_nope")
                },
                "kv_start": None,
            }
        )
        expected = scorer(BLOCK)(alone)
        torch.testing.assert_close(
            scores[b : b + 1, :, : expected.shape[2], : expected.shape[3]], expected
        )


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "sizes"),
    [(70, 70, BlockSizes(BLOCK, BLOCK)), (150, 210, BlockSizes(64, 16))],
)
def test_scores_that_pool_keys_by_their_definitions(num_queries, num_keys, sizes, monkeypatch):
    """For any size of the chunks in which queries are scored."""
    x = layer_inputs(num_queries, num_keys)
    seen = candidate_blocks(x, sizes).visible[0, 0]
    probs = testing.dense_attention(
        x.q, x.k, x.v, testing.visible(1, num_queries, num_keys, True, None), x.scale
    ).probs.float()
    masses = testing.pool_over_blocks(
        probs,
        torch.arange(num_queries)[None] // sizes.queries,
        torch.arange(num_keys)[None] // sizes.keys,
        tuple(seen.shape),
        "mass",
    )
    means, bounds = (torch.full((1, 4, *seen.shape), -math.inf) for _ in range(2))
    for h in range(4):
        for r, c in seen.nonzero().tolist():
            queries = x.q[0, h].split(sizes.queries)[r]
            keys = x.k[0, h // 2].split(sizes.keys)[c]
            means[0, h, r, c] = queries.mean(0) @ keys.mean(0) * x.scale
            bound = torch.maximum(queries * keys.amax(0), queries * keys.amin(0)).sum(-1)
            bounds[0, h, r, c] = bound.amax() * x.scale
    for chunk_bytes in (base.CHUNK_BYTES, 1):
        monkeypatch.setattr(base, "CHUNK_BYTES", chunk_bytes)
        torch.testing.assert_close(Oracle(*sizes)(x), masses / masses.sum(-1, keepdim=True))
        torch.testing.assert_close(MeanPool(*sizes)(x), means.softmax(-1))
        torch.testing.assert_close(Quest(*sizes)(x), bounds.softmax(-1))


def test_random_scores_depend_on_seed_and_layer_only():
    first = Random(BLOCK)(layer_inputs())
    assert torch.equal(first, Random(BLOCK)(layer_inputs(seed=7)))
    assert not torch.equal(first, Random(BLOCK)(layer_inputs(layer=2)))
    assert not torch.equal(first, Random(BLOCK, seed=1)(layer_inputs()))


def test_a_scorer_of_ones_own_is_no_gate_whatever_its_attributes():
    class Own(Random):
        gate = "mine"

        def select(self, *_: Any) -> None:
            raise AssertionError("selected by the scorer")

    x = layer_inputs(70)
    own, plain = (select.Selection(TopK(sparsity=0.6), scorer(BLOCK)) for scorer in (Own, Random))
    assert own.gate is None
    assert own.needs_keys(x)
    assert torch.equal(own.blocks(x), plain.blocks(x))


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "padding"),
    [(70, 70, None), (64, 64, [0, 20, 63]), (30, 61, [0, 40, 5])],
)
def test_recall_is_the_probability_mass_of_the_blocks_read(num_queries, num_keys, padding):
    x = layer_inputs(num_queries, num_keys, padding)
    mask = select.Selection(TopK(sparsity=0.6), Random(BLOCK)).blocks(x)
    dense_lse = maxpool_attention(
        x.q, x.k, x.v, block_size=BLOCK, scale=x.scale, kv_start=x.kv_start
    ).lse
    seen = testing.visible(x.q.shape[0], num_queries, num_keys, True, x.kv_start)
    probs = testing.dense_attention(x.q, x.k, x.v, seen, x.scale).probs
    read = testing.tokens_of_blocks(
        mask, x.q.shape[0], 4, num_queries, num_keys, True, x.kv_start, BLOCK
    )
    real = seen.any(-1).expand(probs.shape[:-1])
    expected = (probs * read).sum(-1).sum((0, 2)) / real.sum((0, 2))
    recall = attention_recall(selected_attention(x, mask, BlockSizes(BLOCK, BLOCK)).lse, dense_lse)
    torch.testing.assert_close(recall.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_configuration_names_the_scores_of_gates():
    assert GATE_SCORERS.keys() == {*GATE_SCORES}


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        *((each, "a gate") for each in GATE_SCORES),
        ("a_shape", "spans that msattn eval measures on text; sink"),
    ],
)
def test_scores_need_what_they_are_made_of(scores, says):
    with pytest.raises(UserError, match=rf"^select.scores={scores}: needs {says}"):
        select.Selection.from_config(SelectConfig(scores=scores))


def test_zooms_need_blocks_of_as_many_keys_as_queries():
    cfg = SelectConfig("multiscale", scores="quest", **BlockSizes(64, 16).arguments)
    with pytest.raises(UserError, match=r"^select\.policy=multiscale: expected another policy"):
        select.Selection.from_config(cfg)


@pytest.mark.parametrize("shape", [(1, 1, 3, 5), (2, 3, 70, 70)])
def test_shares_count_eighths_of_blocks(shape, device):
    zooms = torch.tensor([0, 1, 2, 4, 8], dtype=torch.uint8)[torch.randint(0, 5, shape)].to(device)
    eighths = torch.tensor([0, 8, 4, 0, 2, 0, 0, 0, 1], device=device)
    copies, visible = shape[0] * shape[1], torch.tensor(shape[2] * shape[3], device=device)
    for selected in (zooms, zooms == 4, torch.ones_like(zooms)):
        expected = 1 - eighths[selected.long()].sum().item() / (8 * selected.numel())
        for add in (block_counts.add_share_left_out, block_counts.launch):
            total = torch.tensor(2.0, dtype=torch.float64, device=device)
            add(total, selected.mT, visible, copies)
            assert total.item() == pytest.approx(2 + expected, rel=1e-15)


@pytest.mark.parametrize("shape", [(1, 1, 3, 5), (2, 3, 70, 70), (1, 2, 300, 900)])
def test_shares_count_bits(shape, device):
    mask = (torch.rand(shape) < 0.4).to(device)
    mask[..., 0, :] = True  # whole words, whose sign is set
    visible = torch.tensor(shape[2] * shape[3], device=device)
    for add in (block_counts.add_share_left_out, block_counts.launch):
        total = torch.tensor(2.0, dtype=torch.float64, device=device)
        add(total, pack_blocks(mask), visible, shape[0] * shape[1])
        assert total.item() == pytest.approx(3 - mask.double().mean().item(), rel=1e-15)


def test_sparsity_counts_visible_blocks_only():
    among = row_candidates(160, 160, None)
    visible, diagonal = among.visible, among.always
    assert sparsity(visible.expand(2, 3, -1, -1), among) == 0
    assert sparsity(diagonal.expand(2, 3, -1, -1), among).item() == pytest.approx(1 - 10 / 55)
