"""Tests of text with injected needles, as used to train the embedded model."""

import re
from dataclasses import replace
from pathlib import Path

from msattn.trainer.config import DataConfig
from msattn.trainer.data.sources import documents
from msattn.trainer.data.tasks.injection import inject_needles
from msattn.trainer.data.tasks.wordings import KNOWN

NEEDLE = re.compile(r" The secret number of [a-z]+ [a-z]+ is \d{5}\. ")
TEXT = "".join(f"line {i} of some text that asks for nothing\n" for i in range(2000))


def test_the_text_is_otherwise_unchanged() -> None:
    assert NEEDLE.sub("", inject_needles(TEXT, "a")) == TEXT
    assert inject_needles("", "a") == ""
    assert inject_needles("short", "a") == "short"
    assert NEEDLE.fullmatch(f" {KNOWN.state('red fox', '12345')} ")


def test_half_of_the_needles_repeat_one_of_the_last_sixteen() -> None:
    found = NEEDLE.findall(inject_needles(TEXT, "a"))
    distinct = list(dict.fromkeys(found))
    assert len(found) > 200
    assert 0.4 < len(distinct) / len(found) < 0.6
    latest: list[str] = []
    for sentence in found:
        assert sentence not in distinct[: max(0, len(latest) - 16)], "only the last sixteen may be repeated"
        latest += [sentence] if sentence not in latest else []


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
