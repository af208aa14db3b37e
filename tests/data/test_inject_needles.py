"""Tests of text with injected needles, as used to train the embedded model."""

import re
from dataclasses import replace
from pathlib import Path

from msattn.trainer.config import DataConfig
from msattn.trainer.data.sources import documents
from msattn.trainer.data.tasks.injection import inject_needles
from msattn.trainer.data.tasks.wordings import TRAINING


def pattern(text: str) -> str:
    """Returns the regular expression of a wording's ``text`` with any key and value."""
    return re.escape(text).replace(r"\{key\}", "(?:[a-z]+ [a-z]+)").replace(r"\{value\}", r"\d{5}")


STATEMENTS = [pattern(wording.statement) for wording in TRAINING]
QUESTIONS = [pattern(wording.question + " {value}.") for wording in TRAINING]
NEEDLE = re.compile(f" (?:{'|'.join(sorted(STATEMENTS + QUESTIONS, key=len, reverse=True))}) ")
TEXT = "".join(f"line {i} of some text that asks for nothing\n" for i in range(2000))


def test_the_text_is_otherwise_unchanged() -> None:
    assert NEEDLE.sub("", inject_needles(TEXT, "a")) == TEXT
    assert inject_needles("", "a") == ""
    assert inject_needles("short", "a") == "short"
    for wording in TRAINING:
        assert NEEDLE.fullmatch(f" {wording.state('red fox', '12345')} ")


def test_half_of_the_needles_repeat_one_of_the_last_sixteen() -> None:
    found = NEEDLE.findall(inject_needles(TEXT, "a"))
    values = [re.findall(r"\d{5}", sentence)[0] for sentence in found]
    distinct = list(dict.fromkeys(values))
    assert len(found) > 200
    assert 0.4 < len(distinct) / len(found) < 0.6
    latest: list[str] = []
    for value in values:
        assert value not in distinct[: max(0, len(latest) - 16)], (
            "only the last sixteen may be repeated"
        )
        latest += [value] if value not in latest else []
    asked = [
        sentence
        for sentence in found
        if any(re.fullmatch(f" {each} ", sentence) for each in QUESTIONS)
    ]
    # of the repetitions, half are questions; some statements are worded like them
    assert len(asked) > len(found) / 8


def test_needles_depend_on_the_name() -> None:
    assert inject_needles(TEXT, "a") == inject_needles(TEXT, "a")
    assert inject_needles(TEXT, "a") != inject_needles(TEXT, "b")


def test_documents_contain_needles_if_configured(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(TEXT)
    plain = DataConfig(source="text", path=str(tmp_path))
    with_needles = replace(plain, needles=True)
    for heldout in (False, True):
        assert {d.text for d in documents(plain, heldout=heldout)} == {TEXT}
        found = list(documents(with_needles, heldout=heldout))
        assert len({d.text for d in found}) == len(found) > 0
        assert all(NEEDLE.sub("", d.text) == TEXT for d in found)
