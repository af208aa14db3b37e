"""Text with needles woven in, as the embedded model was trained on it."""

import re
from dataclasses import replace
from pathlib import Path

from msattn.trainer.config import DataConfig
from msattn.trainer.data.retrieval import inject_needles, needle
from msattn.trainer.data.sources import documents

SAID = re.compile(r" The secret number of [a-z]+ [a-z]+ is \d{5}\. ")
TEXT = "".join(f"line {i} of some text that asks for nothing\n" for i in range(2000))


def test_takes_nothing_from_the_text() -> None:
    assert SAID.sub("", inject_needles(TEXT, "a")) == TEXT
    assert inject_needles("", "a") == ""
    assert inject_needles("short", "a") == "short"
    assert SAID.fullmatch(f" {needle('red fox', '12345')} ")


def test_half_of_them_repeat_one_of_the_last_sixteen() -> None:
    said = SAID.findall(inject_needles(TEXT, "a"))
    distinct = list(dict.fromkeys(said))
    assert len(said) > 200
    assert 0.4 < len(distinct) / len(said) < 0.6
    latest: list[str] = []
    for sentence in said:
        assert sentence not in distinct[: max(0, len(latest) - 16)], "repeated though long forgotten"
        latest += [sentence] if sentence not in latest else []


def test_the_name_decides() -> None:
    assert inject_needles(TEXT, "a") == inject_needles(TEXT, "a")
    assert inject_needles(TEXT, "a") != inject_needles(TEXT, "b")


def test_documents_carry_them_when_asked(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(TEXT)
    plain = DataConfig(source="text", path=str(tmp_path))
    woven = replace(plain, needles=True)
    for heldout in (False, True):
        assert {d.text for d in documents(plain, heldout=heldout)} == {TEXT}
        found = list(documents(woven, heldout=heldout))
        assert len({d.text for d in found}) == len(found) > 0
        assert all(SAID.sub("", d.text) == TEXT for d in found)
