"""The next tokens of a source file after its repository: prompts, matched lines, and the rows of a
run.
"""

import csv
import json
import lzma
import runpy
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from msattn.trainer.models.loading import EMBEDDED
from tests.data.texts import WORDS
from tests.house.modules import ROOT

PROGRAM = runpy.run_path(str(ROOT / "docs/experiments/long_code.py"))
PATHS = ("a/near.py", "a/sub/far.py", "a/target.py", "b/other.py", "docs/conf.py", "guide.rst")


@pytest.fixture
def repositories(tmp_path: Path) -> Path:
    """A folder with a repository of files that are too long to continue, apart from ``a/target.py``
    and that of ``docs``.
    """
    files = {}
    for place, path in enumerate(PATHS):
        lines = [
            f"    {word} = {path[0]}({word}, {number})\n" + "\n" * (number % 5 == 0)
            for number, word in enumerate(WORDS)
        ]
        files[path] = "".join(
            lines[place * 400 :][: 200 if path in ("a/target.py", "docs/conf.py") else 700]
        )
    text = "".join(f"# ===== owner/name: {path} =====\n{text}" for path, text in files.items())
    (tmp_path / "code-name.txt.xz").write_bytes(lzma.compress(text.encode()))
    return tmp_path


def test_a_prompt_ends_inside_the_target_after_the_nearest_files(repositories: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(EMBEDDED)
    [(files, target)] = PROGRAM["targets"](repositories, [], 0)
    assert (tuple(files), target) == (PATHS, "a/target.py")
    whole = len(tokenizer("".join(files.values())).input_ids)
    assert PROGRAM["encode_prompt"](tokenizer, files, target, [512, whole]) is None, (
        "half of the target is no context"
    )
    short, long = PROGRAM["encode_prompt"](tokenizer, files, target, [512, whole - 3000])
    assert (len(short.document), len(long.document), len(short.gold)) == (512, whole - 3000, 64)
    assert short.document.equal(long.document[-512:])
    order = ("b/other.py", "docs/conf.py", "guide.rst", "a/sub/far.py", "a/near.py")
    text = tokenizer.decode([*long.document, *long.gold])
    everything = (
        "".join(files[path] for path in order) + files[target][: len(files[target]) * 3 // 4]
    )
    assert text in everything
    assert text.endswith(short.question.gold)
    before = files[target].partition(short.question.gold)[0]
    assert before.endswith("\n")
    assert len(before) == pytest.approx(len(files[target]) / 2, abs=50)


def test_matched_lines() -> None:
    found = PROGRAM["matched_lines"]
    assert found("a\n\n  b\nc", "a\n\n  b\nd") == 1, "the last line is not complete"
    assert found("a\n\n  b\nc\n", "a\n  b\nc\n") == pytest.approx(1 / 3), "at another place"
    assert found("a\nb\n", "") == 0


@pytest.mark.slow
def test_processes_share_a_run(
    repositories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "settings.json").write_text(
        json.dumps({"gate:artifacts": {"0.2": 0.7}, "gate_question:artifacts": {"0.2": 0.6}})
    )
    arguments: list[Any] = f"""
        {tmp_path}/out {repositories} model=tiny device=cpu --lengths 2304
        --prompts 1 --policy topk --gates {ROOT}/trainer/embedded/artifacts/gate --baselines quest
        --settings {tmp_path}/settings.json --sparsities 0.8
    """.split()
    for part in ("0", "1"):
        PROGRAM["main"]([*arguments, "--part", part, "2"])
    assert not (tmp_path / "out/long_code.csv").exists()
    measured = sorted((tmp_path / "out").rglob("*.safetensors"))
    PROGRAM["main"](arguments)
    assert measured == sorted((tmp_path / "out").rglob("*.safetensors")), (
        "nothing was measured again"
    )
    lines = [*csv.DictReader((tmp_path / "out/long_code.csv").open())]
    dense, window, gate, question, quest = lines
    assert (dense["ratio_to_dense"], dense["selectivity"], dense["lines_over_dense"]) == (
        "1.0",
        "1.0",
        "0.0",
    )
    assert (window["setting"], float(window["selectivity"])) == (
        "last 2048 tokens",
        pytest.approx(2048 / 2304),
    )
    assert float(window["ratio_to_dense"]) != 1
    assert [each["asked_sparsity"] for each in (gate, question, quest)] == ["0.7", "0.6", "0.8"]
    assert {each["setting"] for each in (gate, question, quest)} == {"20 % of keys"}
    assert (gate["run"], gate["seed"], gate["best_untrained"]) == ("artifacts", "0", "quest")
    ratio = float(gate["score"]) / float(dense["score"])
    assert float(gate["ratio_to_dense"]) == pytest.approx(ratio)
