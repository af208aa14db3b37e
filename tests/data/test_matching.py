"""Expected answers that are in a generated text, and those that are not."""

import unicodedata

import pytest

from msattn.trainer.data.matching import contains_answer

FOUND = [
    ("Here.", "It is\n  HERE. Yes"),
    ("3", "There are 3."), ("3", "(3)"), ("3", "1, 2, 3"), ("2024", "12/05/2024"),
    ("5", "pages 3-5"), ("19", "COVID-19"),
    ("2", "1,2,3"), ("1", "Answer: 1,2"), ("12", "[11,12]"), ("9", "9,10"), ("5", "June 5,2024"),
    ("2024", "12.05.2024"),
    ("3.5", "2.5,3.5,4.5"), ("2,3", "1,2,3"), ("1,234,567.5", "1234567.5"), ("3", "3,5"),
    ("-5", "It is -5 °C"), ("-5", "It is −5 °C"), ("3.5", "about 3.5."), ("1000", "1,000 men"),
    ("1,000,000", "1000000"),
    ("25,000.5", "25000.5 m"), (".5", "p = .5"), ("10²", "10² m"), ("3½", "3½ cups"),
    ("東京", "答えは東京です。"), ("ワイン", "赤ワインの樽"), ("北京", "首都是北京市"),
    ("서울", "답은 서울입니다"), ("กรุงเทพ", "คือกรุงเทพมหานคร"),
    ("3", "答えは3個です"), ("Python", "彼はPythonを使う"), ("１２", "12 boxes"), ("ﾊﾞｽ", "バスで"),
    (unicodedata.normalize("NFD", "café"), "the Café"),
    ("café", unicodedata.normalize("NFD", "the café")),
    ("don't know", "I don’t know"), ('"yes"', "He said “yes”."),
    ("well-known", "a well\u2011known man"),
    ("Straße", "in der STRASSE"), ("paris", "in Pa\u00adris"),
    ("O'Brien", "O\u2019Brien’s house"), ("राम", "यह राम है"),
]  # fmt: skip
ABSENT = [
    ("Here.", "hereafter"), ("there", "here"), ("art", "arts"), ("art", "_art_"),
    ("3", "3.5"), ("5", "3.5"), ("5", "-5"), ("5", "−5"), ("5", ".5"), ("1", "1,000"),
    ("234", "1,234,567"), ("1", "1,234,567"),
    ("1", "11,12"), ("2", "1,23"), ("5", "2.5,3.5"), ("2", "1,-2"), ("5", "12.05.2024"),
    ("000", "1,000"),
    ("3", "13"), ("3.5", "3.50"), ("3.5", "-3.5"), ("10", "10²"), ("102", "10²"), ("3", "3½"),
    ("room 3", "room 3.5"),
    ("-5", "3-5"), ("3", "答えは3.5です"), ("東京", "京都"), ("cafe", "café"), ("राम", "रामा"),
    ("\u200b", "any"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "text"), FOUND)
def test_answers_that_are_there(answer: str, text: str) -> None:
    assert contains_answer(text, answer)


@pytest.mark.parametrize(("answer", "text"), ABSENT)
def test_answers_that_are_not_there(answer: str, text: str) -> None:
    assert not contains_answer(text, answer)
