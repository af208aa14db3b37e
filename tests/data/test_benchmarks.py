"""Files of benchmarks: SQuAD's, HotpotQA's and L-Eval's form, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from msattn.trainer.data.benchmarks import LevalQuestion, read_hotpotqa, read_leval, read_squad
from msattn.trainer.data.tasks.ruler import DocumentQuestion
from msattn.trainer.errors import UserError
from tests.data.texts import paragraph, write

SQUAD = {
    "data": [
        {
            "paragraphs": [
                paragraph("the mill", ("Whose?", ["Anna's", "Anna's", "hers"])),
                paragraph("a flood", ("Why?", [])),
            ]
        },
        {"paragraphs": [paragraph("the bees", ("How many?", ["nine"]))]},
    ]
}
HOTPOT = [
    {
        "question": "Who?",
        "answer": "Anna",
        "context": [["Mill", ["It is old. ", "Anna owns it."]], ["Bees", ["Nine."]]],
    },
    {"question": "How many?", "answer": "nine", "context": [["Bees", ["Nine."]]]},
]
LEVAL = [
    {
        "input": "a lecture",
        "instructions": [
            "Which?\nA. one\nB. two",
            "Which?\n (A) one\n (B) two",
            "All?\nA. one\nB. two\nC. three",
            "Name it.",
        ],
        "outputs": ["B", "(A) one", "AC", "B"],
        "evaluation": "exam",
    },
    {
        "input": "a paper",
        "instructions": ["Which?\nA. one\nB. two"],
        "outputs": ["A "],
        "evaluation": "f1",
    },
]


def test_questions_about_documents(tmp_path: Path) -> None:
    squad = read_squad("eval.ruler.squad", write(tmp_path / "squad.json.xz", SQUAD))
    assert squad.documents == ["a flood", "the bees", "the mill"]
    assert squad.asked == [
        DocumentQuestion("Whose?", ["Anna's", "hers"], [2], [0]),
        DocumentQuestion("How many?", ["nine"], [1], []),
    ]
    hotpot = read_hotpotqa("eval.ruler.hotpotqa", write(tmp_path / "hotpot.json", HOTPOT))
    assert hotpot.documents == ["Bees\nNine.", "Mill\nIt is old. Anna owns it."]
    assert hotpot.asked == [
        DocumentQuestion("Who?", ["Anna"], [1, 0], []),
        DocumentQuestion("How many?", ["nine"], [0], []),
    ]


def test_questions_of_leval(tmp_path: Path) -> None:
    write(tmp_path / "exams.jsonl.xz", *LEVAL)
    write(tmp_path / "more.jsonl", LEVAL[1])
    found = read_leval("eval.leval.path", str(tmp_path))
    assert [*found] == ["exams", "more"]
    assert [(each.gold, each.options) for each in found["exams"]] == [
        ("B", "AB"),
        ("A", "AB"),
        ("AC", "ABC"),
        ("B", ""),
        ("A", ""),
    ]
    assert found["more"] == [LevalQuestion("a paper", "Which?\nA. one\nB. two", "A", "f1")]


@pytest.mark.parametrize(
    ("read", "name", "values", "message"),
    [
        (read_squad, "a.json", [{}], "has no key data"),
        (
            read_squad,
            "a.json",
            [{"data": [{"paragraphs": [paragraph("x", ("Why?", []))]}]}],
            "no question with an answer",
        ),
        (read_squad, "a.json", [1], "Input should be an object"),
        (read_hotpotqa, "a.json", [{"data": 3}], "data"),
        (
            read_hotpotqa,
            "a.json",
            [[{"question": "Who?", "answer": "x"}]],
            "has no key data.0.context",
        ),
        (read_leval, "a.jsonl", [3], "line 1 has no key input"),
        (
            read_leval,
            "a.jsonl",
            [LEVAL[0] | {"outputs": ["B"]}],
            "there are 4 instructions and 1 outputs",
        ),
        (read_leval, "a.jsonl", [LEVAL[1] | {"outputs": [" "]}], "line 1: an output is empty"),
        (read_leval, "a.jsonl", [], "there is no question in it"),
        (read_squad, "a.json.xz", None, "damaged xz data"),
        (read_leval, "a.jsonl", None, "not UTF-8"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, read: Any, name: str, values: list[Any] | None, message: str
) -> None:
    if values is None:
        (tmp_path / name).write_bytes(b"\xff\x00 nothing")
    else:
        write(tmp_path / name, *values)
    with pytest.raises(UserError, match=f"^eval.x=.*{message}"):
        read("eval.x", str(tmp_path / name))
    with pytest.raises(UserError, match=r"^eval\.x="):
        read("eval.x", str(tmp_path / "missing.json"))
