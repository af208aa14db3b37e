"""Benchmark files: questions in the formats of SQuAD and HotpotQA, for RULER, and tasks in L-Eval's
format.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen

from msattn.trainer.config.text_files import decode, largest_corpus, parse_json, text_files
from msattn.trainer.config.values import shown
from msattn.trainer.data.sources import decompressed, json_lines
from msattn.trainer.data.tasks.ruler import DocumentQuestion, Questions
from msattn.trainer.errors import UserError
from msattn.trainer.storage.documents import checked


@dataclass(frozen=True)
class _Answer:
    text: str


@dataclass(frozen=True)
class _Asked:
    question: str
    answers: list[_Answer]


@dataclass(frozen=True)
class _Paragraph:
    context: str
    qas: list[_Asked]


@dataclass(frozen=True)
class _Article:
    paragraphs: list[_Paragraph]


@dataclass(frozen=True)
class _Squad:
    data: Annotated[list[_Article], MinLen(1)]


@dataclass(frozen=True)
class _HotpotQuestion:
    question: str
    answer: str
    context: list[tuple[str, list[str]]]


@dataclass(frozen=True)
class _HotpotQA:
    data: Annotated[list[_HotpotQuestion], MinLen(1)]


def read_squad(key: str, path: str) -> Questions:
    """Returns the questions of a JSON file in SQuAD's format; distractors come from the same
    article first.

    Questions without an answer are left out. Raises UserError, which begins with ``key``, for a
    file in another format.
    """
    where = f"{key}={shown(path)}"
    articles = checked(_json_of(key, path), _Squad, where).data
    documents = sorted(
        {paragraph.context for article in articles for paragraph in article.paragraphs}
    )
    number = {text: place for place, text in enumerate(documents)}
    questions = []
    for article in articles:
        of_article = {number[paragraph.context] for paragraph in article.paragraphs}
        for paragraph in article.paragraphs:
            own = number[paragraph.context]
            for asked in paragraph.qas:
                answers = list(dict.fromkeys(answer.text for answer in asked.answers))
                if answers:
                    questions.append(
                        DocumentQuestion(asked.question, answers, [own], sorted(of_article - {own}))
                    )
    return _questions(documents, questions, where)


def read_hotpotqa(key: str, path: str) -> Questions:
    """Returns the questions of a JSON file in HotpotQA's format, each with its own documents;
    others are distractors.

    Raises UserError, which begins with ``key``, for a file in another format.
    """
    where = f"{key}={shown(path)}"
    asked = checked({"data": _json_of(key, path)}, _HotpotQA, where).data
    texts = [
        [f"{title}\n{''.join(sentences)}" for title, sentences in question.context]
        for question in asked
    ]
    documents = sorted({text for of_question in texts for text in of_question})
    number = {text: place for place, text in enumerate(documents)}
    questions = [
        DocumentQuestion(
            question.question, [question.answer], [number[text] for text in dict.fromkeys(own)], []
        )
        for question, own in zip(asked, texts, strict=True)
    ]
    return _questions(documents, questions, where)


def _questions(documents: list[str], questions: list[DocumentQuestion], where: str) -> Questions:
    if not questions:
        raise UserError(f"{where}: no question with an answer")
    return Questions(documents, questions)


def _json_of(key: str, path: str) -> Any:
    where, file = f"{key}={shown(path)}", Path(os.path.expanduser(path))
    return parse_json(decode(decompressed(file, where, largest_corpus()), where), where)


@dataclass(frozen=True)
class _LevalDocument:
    input: str
    instructions: list[str]
    outputs: list[str]
    evaluation: str

    def __post_init__(self) -> None:
        if len(self.instructions) != len(self.outputs):
            raise ValueError(
                f"there are {len(self.instructions)} instructions and {len(self.outputs)} outputs"
            )


@dataclass(frozen=True)
class LevalQuestion:
    """A question of L-Eval about a document. ``options`` are the letters of a multiple-choice
    question, otherwise ``""``.

    ``gold`` is the expected answer; for multiple choice, its letter or letters. ``metric`` is
    L-Eval's: ``exam`` (the answer itself), ``rouge``, ``f1``, or others that people or models
    judge.
    """

    document: str
    instruction: str
    gold: str
    metric: str
    options: str = field(default="")


def read_leval(key: str, path: str) -> dict[str, list[LevalQuestion]]:
    """Returns the questions of a jsonl file in L-Eval's format, or of each file in a folder or
    glob, keyed by file name.

    Raises UserError, which begins with ``key``: there is no such file, or a line has another
    format.
    """
    by_task: dict[str, list[LevalQuestion]] = {}
    for file in text_files(key, path):
        where = f"{key}={shown(file)}"
        rows = json_lines(decompressed(file, where, largest_corpus()), where)
        asked = [question for place, row in rows for question in _leval_questions(row, place)]
        if not asked:
            raise UserError(f"{where}: there is no question in it")
        by_task[file.name.partition(".")[0]] = asked
    return by_task


def _leval_questions(row: Any, where: str) -> Iterator[LevalQuestion]:
    document = checked(row if isinstance(row, dict) else {}, _LevalDocument, where)
    for instruction, output in zip(document.instructions, document.outputs, strict=True):
        gold, options = output.strip(), ""
        if (
            document.evaluation == "exam"
            and (letters := _chosen(gold))
            and {*letters} <= {*(given := _options(instruction))}
        ):
            gold, options = letters, given
        if not gold:
            raise UserError(f"{where}: an output is empty")
        yield LevalQuestion(document.input, instruction.strip(), gold, document.evaluation, options)


def _options(instruction: str) -> str:
    """Returns the letters (A, B and so on) of the options that an instruction lists as ``(A) ...``
    or ``A. ...``.
    """
    letters = re.findall(r"(?:^|\n)\s*\(?([A-Z])[.):]", instruction)
    return "".join(
        letter
        for place, letter in enumerate(dict.fromkeys(letters))
        if letter == chr(ord("A") + place)
    )


def _chosen(output: str) -> str:
    """Returns the letters of an output such as ``B``, ``ACD`` or ``(B) because``; empty for other
    texts.
    """
    match = re.match(r"\(([A-Z])\)|([A-Z]+)\.?$", output)
    return "" if match is None else match[1] or match[2]
