"""Comparison of gates with methods without training: its parts, paired differences and table, and a
run that continues.
"""

import csv
from pathlib import Path
from typing import Any

import pytest
from comparison import main, parts_of, with_differences, write_rows

from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.row import EvalRow, Setting
from msattn.trainer.methods.base import DENSE, Method
from tests.data.texts import TEXT, write
from tests.factory import tiny_model
from tests.sparse import gate_for, save

GATE, QUEST, SLASH = Method("gate", trained=True), Method("quest"), Method("vertical_slash")
ORACLE = Method("oracle", servable=False)


def row(
    method: Method, scores: list[float], setting: str = "sparsity 0.8", task: str = "ruler"
) -> EvalRow:
    extra: dict[str, Any] = {"length": 512, "scores": {"vt": scores}, "losses": scores}
    score = sum(scores) / len(scores)
    return EvalRow(
        task, method, Setting(setting), score, "x", ratio_to_dense=1 + score, extra=extra
    )


def test_gates_are_compared_with_the_best_method_without_training() -> None:
    rows = [
        ("", row(DENSE, [1.0, 1.0], "")),
        ("topk", row(GATE, [0.5, 0.7])),
        ("topk", row(QUEST, [0.1, 0.3])),
        ("topk", row(SLASH, [0.4, 0.6])),
        ("topk", row(ORACLE, [0.9, 0.9])),
        ("calibrated", row(QUEST, [0.8, 0.8])),
        ("topk", row(QUEST, [0.9, 0.9], "sparsity 0.9")),
        ("topk", row(GATE, [2.0, 2.0], task="perplexity")),
        ("topk", row(QUEST, [1.9, 1.9], task="perplexity")),
        ("topk", row(SLASH, [2.5, 2.5], task="perplexity")),
    ]
    found = [each.extra for _, each in with_differences(rows)]
    assert (found[1]["best_untrained"], found[1]["over_best"]) == (
        "vertical_slash",
        pytest.approx(0.1),
    )
    assert found[1]["over_best_interval"] == pytest.approx((0.1, 0.1))
    assert found[7]["best_untrained"] == "quest", "less perplexity is better"
    assert found[7]["over_best"] == pytest.approx(0.105, abs=1e-3)
    assert all("over_best" not in each for number, each in enumerate(found) if number not in (1, 7))


def test_the_table_holds_all_runs_of_the_folder(tmp_path: Path) -> None:
    for model, score in (("one", 0.5), ("two", 0.7), ("one", 0.6)):
        write_rows(
            tmp_path,
            f"{model}-512",
            model,
            [("", row(DENSE, [score], "")), ("topk", row(GATE, [score]))],
        )
    lines = [*csv.DictReader((tmp_path / "comparison.csv").open())]
    found = [(each["model"], each["select"], each["method"], each["score"]) for each in lines]
    assert found[:2] == [("one", "", "dense", "0.6"), ("one", "topk", "gate", "0.6")]
    assert found[2:] == [("two", "", "dense", "0.7"), ("two", "topk", "gate", "0.7")]


def test_parts_of_a_comparison(tmp_path: Path) -> None:
    model = tiny_model()
    gate = save(tmp_path / "mass", model, gate_for(model))
    dense, sparse = parts_of(
        tmp_path, [512, 1024], [gate], ["quest"], ["model=tiny", "select.block_size=16"]
    )
    tasks = "perplexity", "ruler"
    assert [part.name for part in dense] == [
        f"dense-{task}-{length}" for task in tasks for length in (512, 1024)
    ]
    methods = "gate-mass", "gate_question-mass", "quest"
    assert [part.name for part in sparse] == [
        f"{policy}-{name}-{task}-{length}"
        for policy in ("calibrated", "topk")
        for name in methods
        for task in tasks
        for length in (512, 1024)
    ]
    with pytest.raises(UserError, match=r"^select\.block_size=64: the gate's blocks have 16; "):
        parts_of(tmp_path, [512], [gate], ["quest"], ["model=tiny"])
    assert parts_of(tmp_path, [512], [gate], [], ["model=tiny"]), "no other sizes"


@pytest.mark.slow
def test_a_comparison_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.txt").write_text("Other words are what a model trains on. " * 400)
    (tmp_path / "test.txt").write_text(TEXT)
    question = {
        "input": TEXT,
        "instructions": ["What?"] * 2,
        "outputs": ["so", "no"],
        "evaluation": "f1",
    }
    leval = write(tmp_path / "mill.jsonl", question)
    arguments = f"""
        {tmp_path}/out --seeds --lengths 400 --gates trainer/embedded/artifacts/gate --baselines
        quest --processes 1 model=tiny model.path=embedded data=text data.path={tmp_path}/train.txt
        data.heldout_path={tmp_path}/test.txt data.cache={tmp_path}/cache
        eval.perplexity.num_chunks=2 eval.perplexity.sparsities=[0.5] eval.leval.path={leval}
        eval.leval.sparsities=[0.5] eval.ruler.tasks=[fwe] eval.ruler.samples=2
        eval.ruler.sparsities=[0.5] device=cpu
    """.split()
    main(arguments)
    table = (tmp_path / "out" / "comparison.csv").read_text()
    lines = [*csv.DictReader(table.splitlines())]
    assert len(lines) == 3 + 2 * 3 * 3
    assert {each["best_untrained"] for each in lines} == {"", "quest"}
    compared = {(each["method"], each["seed"]) for each in lines if each["best_untrained"]}
    assert compared == {("gate", "0"), ("gate_question", "0")}
    kept = sorted(
        (tmp_path / "out/tiny-400/topk-quest-leval-400").glob("*.safetensors"),
        key=lambda path: path.stat().st_mtime_ns,
    )
    for part in kept[-2:]:  # as if it was killed in this task
        part.unlink()
    (tmp_path / "out" / "comparison.csv").unlink()
    main(arguments)
    assert "topk-quest-leval-400: 1 rows" in capsys.readouterr().out
    again = [*csv.DictReader((tmp_path / "out" / "comparison.csv").open())]
    kept_columns = [key for key in lines[0] if "_s" not in key and "_mb" not in key]
    assert [[each[key] for key in kept_columns] for each in again] == [
        [each[key] for key in kept_columns] for each in lines
    ]
