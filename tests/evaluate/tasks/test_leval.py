"""``eval=leval``: likelihood of expected answers, choices, and generated answers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from msattn.trainer import models
from msattn.trainer.config.evaluate import LevalConfig
from msattn.trainer.data.benchmarks import LevalQuestion
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.run import evaluate
from msattn.trainer.evaluate.tasks.leval import (
    encode_questions,
    longest_common,
    score,
    without_middle,
)
from tests.data.texts import write
from tests.evaluate.runs import config, read_rows
from tests.factory import TEMPLATE

TEXT = "the river ran past an old mill and nobody knew where it came from " * 12
QUESTIONS = [
    {
        "input": TEXT,
        "instructions": [
            "Where did it run?\nA. past a mill\nB. past a hill",
            "All?\nA. one\nB. two",
        ],
        "outputs": ["A", "AB"],
        "evaluation": "exam",
    },
    {
        "input": "short",
        "instructions": ["What is it?"],
        "outputs": ["an old mill by the river"],
        "evaluation": "f1",
    },
]


def test_likelihoods_are_those_of_one_pass_over_prompt_and_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "mill.jsonl", *QUESTIONS)
    every = config(tmp_path, "unused").model.presets.num_buckets
    settings = LevalConfig(
        path,
        lengths=[150],
        answers=True,
        max_new_tokens=2,
        sparsities=[0.0, 0.6],
        probes=[0, every],
    )
    cfg = config(
        tmp_path, "unused", tasks=["leval"], baselines=["random"], routers=["quest"], leval=settings
    )
    loaded = models.load(cfg.model, device="cpu", seed=cfg.seed)
    folder = evaluate(cfg)
    rows = read_rows(folder)
    logs, right = [], []
    for each in encode_questions(loaded.tokenizer, cfg, {"mill": questions_of(QUESTIONS)}, 150):
        ids = torch.cat([each.document, each.rest, each.gold])
        assert len(ids) <= 150
        with torch.inference_mode():
            found: Any = loaded.model(ids[None])
        predicted = found.logits[0, -len(each.gold) - 1 : -1].log_softmax(-1)
        logs.append(predicted.gather(1, each.gold[:, None]).mean().item())
        if each.question.gold == "A":
            right.append(float(predicted[0, each.letters].argmax() == 0))
    expected = sum(logs) / 3
    dense = rows["dense", ""]
    assert dense["extra"]["logs"]["mill"] == pytest.approx(logs, abs=1e-4)
    assert (dense["score"], dense["samples"]) == (pytest.approx(math.exp(expected), rel=1e-4), 3)
    assert dense["extra"]["choices"] == right[0]
    assert 0 <= dense["extra"]["answers"] <= 1
    for method, setting in (("random", "sparsity 0"), ("Quest pages", f"{every} probes")):
        assert rows[method, setting]["extra"]["logs"]["mill"] == pytest.approx(logs, abs=1e-4)
    sparse = rows["random", "sparsity 0.6"]
    assert sparse["sparsity"] > 0.2
    difference = [a - b for a, b in zip(sparse["extra"]["logs"]["mill"], logs, strict=True)]
    assert any(abs(each) > 1e-3 for each in difference)
    assert sparse["ratio_to_dense"] == pytest.approx(math.exp(sum(difference) / 3), rel=1e-3)
    low, high = sparse["extra"]["ratio_interval"]
    assert low < sparse["ratio_to_dense"] < high
    assert rows["window only", "0 probes"]["selectivity"] < 0.9


def questions_of(rows: list[dict[str, Any]]) -> list[LevalQuestion]:
    gold = {"A": "AB", "AB": "AB"}
    return [
        LevalQuestion(row["input"], asked, output, row["evaluation"], gold.get(output, ""))
        for row in rows
        for asked, output in zip(row["instructions"], row["outputs"], strict=True)
    ]


def test_documents_lose_their_middle() -> None:
    assert without_middle(range(9), 9) == [*range(9)]
    assert without_middle(range(9), 5) == [0, 1, 2, 7, 8]
    cfg = config(Path("unused"), "unused", leval=LevalConfig("unused"))
    tokenizer = models.load(cfg.model, device="cpu").tokenizer
    tokenizer.chat_template = TEMPLATE
    first, *_ = encode_questions(tokenizer, cfg, {"mill": questions_of(QUESTIONS)}, 90)
    prompt = str(tokenizer.decode([*first.document, *first.rest]))
    assert prompt.startswith("<user>the river ran past")
    assert prompt.endswith(
        "past a hill Answer with the letter of the right option, or the letters of "
        "all.\n<assistant>Answer:"
    )
    with pytest.raises(
        UserError,
        match=r"eval.leval.lengths=40: mill has a question of \d+ and an answer of 1 tokens, "
        r"which leave",
    ):
        encode_questions(tokenizer, cfg, {"mill": questions_of(QUESTIONS)}, 40)


@pytest.mark.parametrize(
    ("question", "text", "expected"),
    [
        (("AC", "exam", "ABC"), "(CA), as it is", 1),
        (("AC", "exam", "ABC"), "A", 0),
        (("The role of art", "exam", ""), "It was the role of Art in life.", 1),
        (("The role of art", "exam", ""), "arts", 0),
        (("Paris.", "exam", ""), "Paris, France", 1),
        (("The role of art.", "exam", ""), "It is the role of art, he says", 1),
        (("A car", "exam", ""), "He bought the car", 1),
        (("role of art", "exam", ""), "role of the art", 1),
        (("U.S.", "exam", ""), "the US", 1),
        (("Don't", "exam", ""), "“I don’t”", 1),
        (("(5)", "exam", ""), "Answer:5.", 1),
        (("-$5", "exam", ""), "(-5)", 1),
        (("5", "exam", ""), "-5", 0),
        (("5", "exam", ""), "3.5", 0),
        (("5", "exam", ""), ".5", 0),
        (("12", "exam", ""), "1/2", 0),
        (("2", "exam", ""), "1,2,3", 1),
        (("5", "exam", ""), "pages 3-5", 1),
        (("1000", "exam", ""), "$1,000.", 1),
        (("the old mill", "f1", ""), "a mill", 2 / 3),
        (("one two three four", "rouge", ""), "two one three", 4 / 7),
        (("one", "rouge", ""), "", 0),
    ],
)
def test_metrics_of_answers(question: tuple[str, str, str], text: str, expected: float) -> None:
    assert score(LevalQuestion("", "", *question), text) == pytest.approx(expected)


def test_longest_common_subsequence() -> None:
    assert longest_common("abcbdab", "bdcaba") == 4
