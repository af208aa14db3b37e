"""``eval=harness``: tasks of lm_eval on the attached model. Tests that run tasks need the extra ``harness``."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from msattn import cli
from msattn.trainer.evaluate.harness import main_metric


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two tasks over a local file, in the working directory."""
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"text": f"The river ran past mill {i}. " * 8, "choices": ["the river", "xqj"]} for i in range(5)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{text}}\nQuestion: What ran?\nAnswer:",
    }
    answer = {
        "task": "answer",
        "output_type": "generate_until",
        "doc_to_target": "a train",
        "generation_kwargs": {"until": ["?"], "max_gen_toks": 4, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    choice = {
        "task": "choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    for task in (answer, choice):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(common | task))
    return folder


def run(*arguments: str) -> int:
    common = ["eval", "eval=harness", "tracker=none", "device=cpu", "eval.baselines=[random]"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*common, *arguments])
    return int(ended.value.code or 0)


def test_dense_and_sparse_on_the_same_samples(tasks: Path) -> None:
    assert run("eval.harness.tasks=[answer,choice]", f"eval.harness.include_path={tasks}", "eval.harness.limit=3") == 0
    found = json.loads(Path("outputs/tiny/base/eval/results.json").read_text())["rows"]
    rows = {(row["method"], row["extra"]["benchmark"]): row for row in found}
    assert len(rows) == len(found)
    dense = rows["dense", "choice"]
    assert (dense["score"], dense["score_name"], dense["samples"], dense["sparsity"]) == (1.0, "acc", 3, 0)
    assert dense["interval"] == [1.0, 1.0]
    assert rows["dense", "answer"]["score"] == 0.0
    assert rows["random", "choice"]["sparsity"] > 0.3
    assert {"gate", "classifier", "k-means"} <= {method for method, _ in rows}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval.harness.tasks=[nowhere]"], "eval.harness.tasks=nowhere: no such task of lm_eval"),
        (["eval.harness.tasks=[answer]", "chat=true"], "chat: the tokenizer has no chat template"),
    ],
)
def test_mistakes_of_tasks(arguments: list[str], message: str, tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"eval.harness.include_path={tasks}", *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_samples_that_are_too_long(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tasks / "rows.jsonl").write_text(json.dumps({"text": "The river ran past the mill. " * 900, "choices": ["a", "b"]}))
    for task in ("answer", "choice"):
        assert run(f"eval.harness.include_path={tasks}", f"eval.harness.tasks=[{task}]") == 2
        assert "eval.harness: a sample has" in " ".join(capsys.readouterr().err.split())


def test_damaged_tasks(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tasks / "rows.jsonl").unlink()
    assert run(f"eval.harness.include_path={tasks}", "eval.harness.tasks=[answer]") == 2
    assert "msattn: eval.harness.tasks=answer: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "eval.harness.tasks=[]: one or more tasks of lm_eval"),
        (
            ["eval.harness.tasks=[a]", "eval.harness.include_path=nowhere"],
            "eval.harness.include_path=nowhere: a folder",
        ),
        (["eval.harness.tasks=[a]", "eval.harness.limit=0"], "eval.harness.limit=0"),
        (["eval.harness.tasks=[a]"], "eval=harness: needs lm_eval; pip install 'msattn[harness]'"),
    ],
)
def test_mistakes_without_lm_eval(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    assert run(*arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_first_metric_with_a_number_counts() -> None:
    result: dict[str, Any] = {"alias": "x", "sample_len": 3, "acc_stderr,none": 0.1, "em,none": "N/A", "f1,strict": 0.5}
    assert main_metric(result) == ("f1", 0.5)
