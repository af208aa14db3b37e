"""Scores of a gate that knows the question: against loops in fp64, padding, chunks, caches,
calibration.
"""

from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from msattn.trainer.config import SelectConfig
from msattn.trainer.config.policies import TopK
from msattn.trainer.errors import UserError
from msattn.trainer.methods.blocks import AlwaysRead, sparsity
from msattn.trainer.methods.gate import attn_gate
from msattn.trainer.methods.gate.attn_gate import Gate, QuestionScores, pool_keys
from msattn.trainer.methods.gate.train import gate_thresholds
from msattn.trainer.methods.selection import Selection
from msattn.trainer.models.layer_attention import LayerInputs, Pooled
from tests.factory import inputs_of_layers, left_padded, random_tokens, tiny_model
from tests.methods.gate.random_gates import BLOCK, config, noisy_gate, topical_tokens

LAST = 24  # not whole blocks
FEWER_KEYS = {"block_size": 2 * BLOCK, "key_block_size": BLOCK}


@pytest.fixture(autouse=True)
def _few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attn_gate, "LAST_QUERIES", LAST)


def attention_of_last(x: LayerInputs, b: int, head: int) -> dict[int, Tensor]:
    """Attention of the last queries of a sequence by their positions, fp64 over the positions up to
    each.
    """
    pad, softcap = 0 if x.kv_start is None else int(x.kv_start[b]), x.scoring.softcap
    found = {}
    for query in range(max(0, x.num_queries - LAST), x.num_queries):
        position = query + x.num_keys - x.num_queries - pad
        if position >= 0:
            keys = x.k[b, head // (x.q.shape[1] // x.k.shape[1]), pad : pad + position + 1].double()
            logits = keys @ x.q[b, head, query].double() * x.scale
            found[position] = (
                logits if softcap is None else softcap * (logits / softcap).tanh()
            ).softmax(0)
    return found


def by_definition(gate: Gate, x: LayerInputs) -> Tensor:
    """The scores in loops over heads, queries and blocks, fp64 ``[B, Hg, Tr, Tc]``."""
    scores = gate.scores(x).double()
    group, blocks = x.q.shape[1] // scores.shape[1], scores.shape[3]
    sizes = gate.cfg.sizes
    for b, h in torch.cartesian_prod(*map(torch.arange, scores.shape[:2])).tolist():
        pad = 0 if x.kv_start is None else int(x.kv_start[b])
        keys, first = x.num_keys - pad, max(0, x.num_keys - x.num_queries - pad)
        of_query: dict[int, Tensor] = {}  # mass in each block, the largest of the heads
        for head in range(h * group, (h + 1) * group):
            for position, mass in attention_of_last(x, b, head).items():
                masses = torch.zeros(blocks * sizes.keys, dtype=torch.float64)
                masses[: position + 1] = mass
                own = masses.view(blocks, sizes.keys).sum(1)
                of_query[position] = torch.maximum(of_query.get(position, own), own)
        columns = torch.stack([*of_query.values()]).sum(0)
        columns *= attn_gate.COLUMNS / columns.sum()
        for r, begin in enumerate(range(first, keys, sizes.queries)):
            queries = range(begin, min(begin + sizes.queries, keys))
            joined = torch.zeros(blocks, dtype=torch.float64)
            for c in range(queries[-1] // sizes.keys + 1):
                joined[c] = max(scores[b, h, r, c], columns[c])
            joined /= joined.sum()
            if known := [of_query[i] for i in queries if i in of_query]:
                exact = torch.stack(known).amax(0)
                exact /= exact.sum()
                joined = exact if len(known) == len(queries) else torch.maximum(joined, exact)
            scores[b, h, r] = joined
    return scores


# changes of the gate, lengths, changes of the inputs
CASES: dict[str, tuple[dict[str, Any], list[int], dict[str, Any]]] = {
    "whole blocks": ({}, [96], {}),
    "the last row is short": ({}, [101], {"softcap": 3.0}),
    "a shared gate head": ({"heads": "kv"}, [90], {}),
    "shorter than the last queries": ({}, [LAST - 5], {}),
    "one token": ({}, [1], {}),
    "left padding": ({}, [90, 101, 37, 9], {}),
    "fewer keys than queries in a block": (FEWER_KEYS, [160, 131, 20], {}),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_scores_equal_their_definition(case: str) -> None:
    changes, lengths, of_inputs = CASES[case]
    gate, model = noisy_gate(config(**changes), std=0.2), tiny_model()
    ids, mask = left_padded(
        [random_tokens(1, length, seed)[0] for seed, length in enumerate(lengths)]
    )
    for x in inputs_of_layers(model, ids, attention_mask=mask):
        x = replace(x, q=3 * x.q, scoring=x.scoring._replace(**of_inputs))  # sharper attention
        expected = by_definition(gate, x)
        torch.testing.assert_close(QuestionScores(gate)(x).double(), expected, rtol=1e-4, atol=1e-6)
        for dtype in (torch.bfloat16, torch.float16):
            half = replace(
                x,
                **{
                    name: getattr(x, name).to(dtype) for name in ("q", "k", "v", "q_nope", "k_nope")
                },
            )
            assert (QuestionScores(gate)(half) - expected).abs().max() < 0.02


@torch.no_grad()
def test_only_the_chunk_that_ends_a_prompt_knows_the_question() -> None:
    gate = noisy_gate(config(), std=0.2)
    for x in inputs_of_layers(tiny_model(), random_tokens(1, 101)):
        earlier = replace(x, ends_prompt=False)
        assert torch.equal(QuestionScores(gate)(earlier), gate.scores(x))
        assert not Selection(TopK(sparsity=0.5), QuestionScores(gate)).needs_keys(earlier)
        pooled = pool_keys(gate.cfg.cached_pools, x.k_nope, x.k, block_size=BLOCK)
        last = {name: getattr(x, name)[:, :, 64:] for name in ("q", "q_nope", "k_nope")}
        chunk = QuestionScores(gate)(replace(x, **last, pooled=Pooled(pooled, x.num_keys)))
        torch.testing.assert_close(chunk, QuestionScores(gate)(x)[:, :, 4:], rtol=1e-4, atol=1e-6)


def test_its_thresholds_are_measured_on_its_own_scores() -> None:
    gate, select = noisy_gate(config()), SelectConfig("calibrated", scores="gate_question")
    with pytest.raises(
        UserError, match=r"needs calibrated thresholds of select.scores=gate_question"
    ):
        Selection.from_config(select, gate)
    gate.always = AlwaysRead(2, 1)
    gate.thresholds = gate_thresholds(gate, tiny_model(), [{"input_ids": random_tokens(1, 400)[0]}])
    selection = Selection.from_config(select, gate)
    of_gate = Selection.from_config(replace(select, scores="gate"), gate)
    assert isinstance(selection.scorer, QuestionScores)
    assert selection.policy != of_gate.policy
    assert selection.always == of_gate.always


@torch.no_grad()
@pytest.mark.parametrize(
    ("share", "changes", "within"),
    [(0.5, {}, 0.02), (0.3, {}, 0.02), (0.4, FEWER_KEYS, 0.04)],
)
def test_whole_prompts_and_chunks_read_the_share_that_is_asked_for(
    share: float, changes: dict[str, int], within: float
) -> None:
    """Chunks before the last one are scored by the gate alone, the last one with its question; each
    reads the share.
    """
    model = tiny_model(initializer_range=0.3)
    gate = noisy_gate(config(**changes), std=0.2)
    ids = topical_tokens(4, 60, seed=2)
    gate.thresholds = gate_thresholds(
        gate, model, [{"input_ids": row} for row in topical_tokens(4, 60, seed=3)]
    )
    selection = Selection.from_config(SelectConfig("calibrated", sparsity=1 - share), gate)
    read: dict[str, list[float]] = {"whole": [], "earlier": [], "last": []}
    for x in inputs_of_layers(model, ids):
        earlier = {
            name: getattr(x, name)[:, :, : 40 * BLOCK]
            for name in ("q", "k", "v", "q_nope", "k_nope")
        }
        last = {name: getattr(x, name)[:, :, 40 * BLOCK :] for name in ("q", "q_nope", "k_nope")}
        pooled = pool_keys(gate.cfg.cached_pools, x.k_nope, x.k, block_size=BLOCK)
        chunks = (
            x,
            replace(x, **earlier, ends_prompt=False),
            replace(x, **last, pooled=Pooled(pooled, x.num_keys)),
        )
        for shares, chunk in zip(read.values(), chunks, strict=True):
            shares.append(1 - sparsity(selection.blocks(chunk), selection.candidates(chunk)).item())
    for name, shares in read.items():
        assert fmean(shares) == pytest.approx(share, abs=within), name
