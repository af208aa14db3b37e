"""The block-retrieval task: problems with one answer, equal starts of both kinds of attention,
exact match.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from msattn.trainer.config.train import MtaConfig
from msattn.trainer.mta import block_retrieval
from msattn.trainer.mta.attention import MultiTokenAttention


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 12), st.data())
@settings(max_examples=100, deadline=None)
def test_only_the_answer_has_all_letters_of_the_question(
    seed: int, blocks: int, size: int, data: st.DataObject
) -> None:
    asked = data.draw(st.integers(1 if blocks == 1 or size < 3 else 2, size))
    ids = block_retrieval.problem(
        np.random.default_rng(seed), blocks=blocks, letters=size, asked=asked
    )
    assert np.array_equal(
        ids,
        block_retrieval.problem(
            np.random.default_rng(seed), blocks=blocks, letters=size, asked=asked
        ),
    )
    text, rest = ids[: blocks * (size + 1)].reshape(blocks, -1), ids[blocks * (size + 1) :]
    assert set(text[:, -1]) == {block_retrieval.BLOCK_END}
    assert rest[0] == block_retrieval.QUESTION
    question, answer = set(rest[1 : 1 + asked]), rest[1 + asked :]
    assert len(question) == asked
    assert len(answer) == size
    held = [block[:-1] for block in text if question <= set(block[:-1])]
    assert len(held) == 1
    assert np.array_equal(held[0], answer)
    assert all(len(set(block)) == size + 1 for block in text)
    assert max(text[:, :-1].max(), answer.max()) < block_retrieval.ALPHABET


@pytest.mark.parametrize(("size", "asked"), [(2, 3), (26, 2), (3, 0)])
def test_problems_without_a_unique_answer_are_refused(size: int, asked: int) -> None:
    with pytest.raises(ValueError, match=f"letters={size}, asked={asked}: expected"):
        block_retrieval.problem(np.random.default_rng(0), blocks=3, letters=size, asked=asked)


CFG = MtaConfig(
    blocks=3, letters=2, asked=2, test_problems=24, num_layers=2, num_heads=2, hidden_size=32
)


def test_both_kinds_of_attention_start_with_the_same_loss() -> None:
    problems = block_retrieval.Problems(CFG, 4, seed=(0, 0))
    ids = torch.stack([problems[index]["input_ids"] for index in range(4)])
    plain, mixed = (
        block_retrieval.build(replace(CFG, attention=kind), seed=0)
        for kind in ("plain", "multi_token")
    )
    assert all(
        isinstance(layer.self_attn, MultiTokenAttention) for layer in mixed.model.model.layers
    )
    losses = [solver(ids)["loss"] for solver in (plain, mixed)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    logits = plain.model(input_ids=ids).logits[:, -3:-1].transpose(1, 2)
    torch.testing.assert_close(
        losses[0], torch.nn.functional.cross_entropy(logits, ids[:, -2:]), rtol=1e-5, atol=1e-5
    )


def test_exact_match_counts_whole_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    solver, seen = block_retrieval.build(CFG, seed=0), 0

    def logits(input_ids: Tensor) -> Tensor:
        nonlocal seen
        guesses = input_ids[:, -2:].clone()
        wrong = torch.arange(seen, seen + len(guesses)) % 3 == 0
        guesses[wrong, 1] = block_retrieval.QUESTION
        seen += len(guesses)
        return 9.0 * torch.nn.functional.one_hot(guesses, block_retrieval.VOCAB_SIZE)

    monkeypatch.setattr(solver, "logits", logits)
    figures = block_retrieval.accuracy(
        solver, block_retrieval.Problems(CFG, 24, seed=(0, 1)), batch_size=7
    )
    assert figures["exact_match"] == 16 / 24
    assert figures["test_loss"] == pytest.approx(9 * 8 / 48, abs=0.01)
