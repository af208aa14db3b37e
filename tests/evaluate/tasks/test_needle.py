"""Needles in a haystack: samples, and answers from a cache that routings share."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from msattn import attach
from msattn.trainer import models
from msattn.trainer.evaluate import compared
from msattn.trainer.evaluate.tasks import needle
from msattn.trainer.evaluate.tasks.needle import Samples
from msattn.trainer.models.loading import Loaded
from tests.evaluate.runs import BUCKETS, config


@pytest.fixture
def samples(loaded: Loaded, tmp_path: Path, text: str) -> Samples:
    cfg = config(tmp_path, text)
    return needle.make_samples(
        cfg, loaded.tokenizer, needle.read_haystack(cfg, loaded.tokenizer), 192
    )


@pytest.mark.parametrize("question", ["dense", "sparse"])
def test_routing_with_all_buckets_predicts_as_dense(
    loaded: Loaded, trained: Path, text: str, question: str
) -> None:
    cfg = config(trained, text)
    cfg = replace(
        cfg, eval=replace(cfg.eval, needle=replace(cfg.eval.needle, question=question, needles=3))
    )
    samples = needle.make_samples(
        cfg, loaded.tokenizer, needle.read_haystack(cfg, loaded.tokenizer), 192
    )
    found = compared.find_compared(cfg, models.load(cfg.model, device="cpu"))
    routing = replace(found.bucket_routings[0], dense_layers=())
    routing.router.artifact = None  # skips the check of the model: this one has other weights
    dense = needle.prefill_samples(loaded, samples, lambda: None)
    plan = routing.cases(loaded.model, [BUCKETS, 0, BUCKETS])
    every, none, again = needle.decode_samples(loaded, samples, routing, plan, lambda: None)
    assert torch.equal(every.predicted, dense.predicted)
    assert torch.equal(again.predicted, dense.predicted)  # the shared cache is unchanged
    assert every.spent["selectivity"] == pytest.approx(1)
    assert none.spent["selectivity"] < 0.5


def test_the_answer_does_not_choose_what_the_question_reads(
    loaded: Loaded, samples: Samples
) -> None:
    """Queries of a block share their keys, so an answer that is read in one pass with its prompt
    would help to find itself.
    """
    ((_, tokens),) = samples.prefills()
    other = replace(samples, ids=samples.ids.clone())
    other.ids[:, tokens:] = 100
    first = tokens - 192
    select = {"scores": "quest", "policy": "topk", "block_size": 16, "sparsity": 0.8}
    with attach(loaded.model, select=select, dense_below=0) as sparse:
        results = [
            needle.prefill_samples(loaded, each, lambda: None, sparse) for each in (samples, other)
        ]
    assert torch.equal(results[0].predicted[:, first], results[1].predicted[:, first])
    assert results[0].spent["sparsity"] > 0.5


def test_samples_contain_the_needle_once(
    loaded: Loaded, samples: Samples, tmp_path: Path, text: str
) -> None:
    cfg = config(tmp_path, text)
    again = needle.make_samples(
        cfg, loaded.tokenizer, needle.read_haystack(cfg, loaded.tokenizer), 192
    )
    assert torch.equal(samples.ids, again.ids)
    assert samples.ids.shape == (4, 192)
    assert samples.depths == [0.0, 0.0, 0.5, 0.5]
    for ids, answers in zip(
        samples.ids, (prompt.answer_tokens for prompt in samples.prompts), strict=True
    ):
        answer = str(loaded.tokenizer.decode(ids[-answers:])).strip()
        assert answer.isdigit()
        assert len(answer) == 5
        assert loaded.tokenizer.decode(ids[:-answers]).count(answer) == 1
    asked = [str(loaded.tokenizer.decode(ids[-samples.decoded :])) for ids in samples.ids]
    for text, question in zip(
        asked, ("hidden token", "agent", "chest named", "ledger"), strict=True
    ):
        assert question in text  # held-out wordings, in turn
    right = samples.ids[:, -samples.longest :].clone()
    assert samples.found(right) == [True] * 4
    right[2, -1] += 1
    assert samples.found(right) == [True, True, False, True]


def test_white_space_before_the_number_is_not_judged(loaded: Loaded, samples: Samples) -> None:
    """It does not depend on the needle. This tokenizer makes it a token of its own, as those that
    split numbers into digits.
    """
    assert samples.judged == [prompt.answer_tokens - 1 for prompt in samples.prompts]
    ((rows, tokens),) = samples.prefills()
    assert rows == [0, 1, 2, 3]
    assert all(
        str(loaded.tokenizer.decode(ids[tokens : tokens + 1])).strip().isdigit()
        for ids in samples.ids
    )
    predicted = samples.ids[:, -samples.longest :].clone()
    predicted[:, 0] += 1
    assert samples.found(predicted) == [True] * 4
    (first, _) = samples.examples(predicted)
    assert first["answer"] == first["expected"]
    predicted[0, 1] = loaded.tokenizer(["\n"], add_special_tokens=False)["input_ids"][0][0]
    assert samples.examples(predicted)[0]["answer"] == "\n" + first["expected"][1:], (
        "answers are shown as they are"
    )
