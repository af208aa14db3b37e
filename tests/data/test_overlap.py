"""Training and held-out text never meet: the check of data.heldout_path, and the splits that are
made here.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import overlap
import pytest

from msattn.trainer.config import DataConfig
from msattn.trainer.data.overlap import SAMPLED, WINDOW, check_heldout, shared_windows, windows
from msattn.trainer.data.sources import Document, documents
from msattn.trainer.errors import UserError, run_program
from tests.running import exit_code_of


def prose(seed: int, words: int = 20_000) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(words))


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_windows_are_those_of_a_plain_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msattn.trainer.data.overlap._PIECE", 256)
    # the white space at the ends of a window would not count
    text = prose(0, 300).replace(" ", "x")
    equal: dict[str, set[int]] = {}
    sampled = windows(text)
    for start in range(len(text) - WINDOW + 1):
        (value,) = windows(text[start : start + WINDOW])  # exactly one window, which is not sampled
        equal.setdefault(text[start : start + WINDOW], set()).add(int(value))
    assert all(len(values) == 1 for values in equal.values())
    every = [values.pop() for values in equal.values()]
    assert len(set(every)) == len(every), "different windows have different hashes"
    assert sorted(sampled.tolist()) == sorted(value for value in every if value % SAMPLED == 0)
    assert 0.5 < len(sampled) * SAMPLED / len(every) < 1.5


def test_a_common_passage_is_found_at_any_place_in_any_layout() -> None:
    passage, train, heldout = prose(1, 400), prose(2), prose(3)
    moved = Document("t", train + "\n\n" + passage.upper().replace(" ", "\n  ") + train[:7])
    shared, total = shared_windows([moved], [Document("h", heldout[:301] + passage + heldout)])
    expected = (len(passage) - WINDOW) / SAMPLED
    assert 0.5 * expected < shared < 1.5 * expected
    assert total > shared
    assert shared_windows([Document("t", train)], [Document("h", heldout)])[0] == 0
    assert shared_windows([], [Document("h", "short")]) == (0, 1)
    assert shared_windows(
        [Document("t", " SHORT\n")], [Document("h", "short"), Document("e", " ")]
    ) == (1, 1)


def test_overlapping_held_out_text_is_refused_with_its_count(tmp_path: Path) -> None:
    train = write(tmp_path, "train.txt", prose(1))
    same = DataConfig("text", path=train, heldout_path=train)
    with pytest.raises(
        UserError,
        match=r"data\.heldout_path=.*: ([\d,]+) of its \1 compared passages of 200 characters are "
        r"also in",
    ):
        check_heldout(same)


def test_a_heading_in_common_only_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heading = "Permission is granted to anyone to use this text. " * 3 + prose(9, 40)
    train = write(tmp_path, "train.txt", heading + prose(1))
    check_heldout(
        DataConfig("text", path=train, heldout_path=write(tmp_path, "other.txt", prose(2)))
    )
    assert capsys.readouterr().err == ""
    check_heldout(
        DataConfig(
            "text", path=train, heldout_path=write(tmp_path, "heldout.txt", heading + prose(3))
        )
    )
    assert "msattn: warning: data.heldout_path=" in capsys.readouterr().err


def test_a_held_out_split_is_compared_over_its_first_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    books = [{"text": prose(seed, 400)} for seed in range(8)]
    splits = {
        "train": books,
        "validation": [{"text": prose(8, 400)}, books[0]],
        "test": [{"text": prose(9, 400)}, books[7]],
    }
    read: list[str] = []

    def rows(cfg: DataConfig, split: str) -> Iterator[dict[str, str]]:
        for row in splits[split]:
            read.append(split)
            yield row

    monkeypatch.setattr("msattn.trainer.data.sources.hub_rows", rows)
    monkeypatch.setattr("msattn.trainer.data.sources.hub_identity", lambda cfg: None)
    cfg = DataConfig("hub", path="a/b", heldout_split="validation", cache=str(tmp_path))
    with pytest.raises(
        UserError,
        match=r"data\.heldout_split=validation: [\d,]+ of its .* are also in data\.path=a/b; ",
    ):
        check_heldout(cfg)
    monkeypatch.setattr("msattn.trainer.data.overlap.STREAMED", 5 * len(prose(0, 400)))
    read.clear()
    check_heldout(replace(cfg, heldout_split="test"))
    assert 4 <= read.count("train") < 8
    assert list(tmp_path.iterdir()) == [], (
        "a data set whose files are not known has no outcome to keep"
    )


def run(*arguments: str) -> int:
    return exit_code_of(lambda: run_program(lambda: overlap.main(arguments)))


def test_the_command_counts_windows_and_fails_on_shared_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book, code, apart = (write(tmp_path, f"{seed}.txt", prose(seed)) for seed in range(3))
    mixed = write(tmp_path, "mixed.txt", prose(3, 3000) + prose(1)[5000:9000])
    assert run(book, code, "--heldout", apart) == 0
    said = capsys.readouterr().out
    total = len(np.unique(windows(prose(2))))
    assert (
        said
        == f"0 of {total:,} windows of 200 characters are also in the training texts (one in 16 "
        f"sampled)\n"
    )
    assert run(book, code, "--heldout", apart, mixed) == 1
    shared, total = (int(count.replace(",", "")) for count in capsys.readouterr().out.split()[:3:2])
    assert 0 < shared < 4000 / SAMPLED * 1.5 < total
    assert run(book, "--heldout", str(tmp_path / "none.txt")) == 2
    assert capsys.readouterr().err.startswith(
        f"msattn: --heldout={tmp_path}/none.txt: no such file"
    )


def test_the_splits_of_files_and_rows_share_no_passage(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": prose(seed, 200)}) + "\n" for seed in range(60))
    )
    (tmp_path / "one.txt").write_text(prose(100))
    for name in ("rows.jsonl", "one.txt"):
        cfg = DataConfig("text", path=str(tmp_path / name))
        sides = [list(documents(cfg, heldout=heldout)) for heldout in (False, True)]
        shared, total = shared_windows(*sides)
        assert (shared, total > 50) == (0, True)
        assert np.isin(windows(sides[1][0].text), windows(sides[0][0].text)).sum() == 0
