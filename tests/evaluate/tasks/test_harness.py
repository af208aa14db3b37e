"""``eval=harness``: tasks of lm_eval, read from local files, on the attached model."""

import json
import math
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from msattn.trainer import models
from msattn.trainer.config import EvalRunConfig, HarnessConfig, ModelConfig
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.run import evaluate
from msattn.trainer.evaluate.tasks.harness import main_metric
from msattn.trainer.evaluate.tasks.harness_tasks import load_samples
from msattn.trainer.models.loading import Loaded
from tests.ending import saved
from tests.evaluate.harness_tasks import GENERATED, log_likelihood, write_task
from tests.evaluate.runs import config

POSITIONS = 256  # of the model of config()
TEXT = "the river ran past an old mill and nobody knew where it came from "
CHOSEN = {
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
MADE = """
from datasets import Dataset
from transformers import AutoTokenizer


def rows(max_seq_lengths=(64,), tokenizer=None, **_):
    words = AutoTokenizer.from_pretrained(tokenizer)
    text = words("the river ran past an old mill " * 100).input_ids
    made = [{"input": words.decode(text[:length]),
    "max_length": length} for length in max_seq_lengths for _ in range(3)]
    return {"test": Dataset.from_list(made)}


def scored(doc, results):
    return {"64": -1.0} | {str(doc["max_length"]): doc["max_length"] / 1000}


def mean(values):
    found = [value for value in values if value != -1]
    return sum(found) / len(found) if found else -1


def one_length(max_seq_lengths, **_):
    return {"test": Dataset.from_list([{"input": f"{max_seq_lengths} the river"}])}


def score_of_one(doc, results):
    return {"acc": float(doc["input"].startswith("1k"))}
"""


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return models.load(config(Path("unused"), "unused").model, device="cpu")


def settings(folder: Path, *tasks: str, **harness: Any) -> EvalRunConfig:
    harness = {"sparsities": [0.0, 0.8], **harness}
    asked = HarnessConfig(tasks=list(tasks), include_path=str(folder), **harness)
    return config(
        folder.parent / "outputs", "unused", tasks=["harness"], baselines=["random"], harness=asked
    )


def measure(cfg: EvalRunConfig) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Returns the rows by method, setting and benchmark, with the length after a slash."""
    rows = json.loads((evaluate(cfg) / "results.json").read_text())["rows"]
    names = [
        "/".join(str(row["extra"][key]) for key in ("benchmark", "length") if key in row["extra"])
        for row in rows
    ]
    found = {
        (row["method"], row["setting"], name): row for row, name in zip(rows, names, strict=True)
    }
    assert len(found) == len(rows)
    return found


@pytest.mark.slow
def test_dense_and_sparse_on_the_same_samples(
    folder: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Dense scores are those of a plain model, and the few-shot examples of a sample are the same
    for each method.
    """
    words, model = loaded.tokenizer, loaded.model
    asked = [TEXT * 8 + f"number {number}:" for number in range(4)]
    answers = []
    for text in asked:
        ids = torch.tensor([words(text).input_ids])
        output: Any = model.generate(ids, max_new_tokens=4, do_sample=False)  # pyrefly: ignore[not-callable]
        answers.append(str(words.decode(output[0, ids.shape[1] :], skip_special_tokens=True)))
    rows = [
        {"text": text, "target": answer}
        for text, answer in zip(asked, [*answers[:3], "never"], strict=True)
    ]
    write_task(folder, "answer", rows, **GENERATED)
    choices = [" river", " zebra quartz", " 17"]
    rows = []
    for text in asked:
        start = len(words(text).input_ids)
        scores = [
            log_likelihood(loaded, words(text + choice).input_ids, start) for choice in choices
        ]
        rows.append(
            {
                "text": text,
                "choices": [choice.strip() for choice in choices],
                "target": scores.index(max(scores)),
            }
        )
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, folder / "choice.parquet")
    parquet = {
        "dataset_path": "parquet",
        "dataset_kwargs": {"data_files": {"test": str(folder / "choice.parquet")}},
    }
    write_task(folder, "choice", **CHOSEN, **parquet)
    shots = [{"text": f"mill {number}", "target": "x"} for number in range(12)]
    write_task(folder, "few", shots, **GENERATED, fewshot_split="test", num_fewshot=3)

    from lm_eval import evaluator

    seen: dict[str, list[Any]] = {}
    plain = evaluator.evaluate

    def recorded(lm: Any, tasks: Any, **options: Any) -> Any:
        found = plain(lm, tasks, **options)
        for name, samples in found["samples"].items():
            seen.setdefault(name, []).append([sample["prompt_hash"] for sample in samples])
        return found

    monkeypatch.setattr(evaluator, "evaluate", recorded)
    found = measure(settings(folder, "answer", "choice", "few", limit=4))
    assert {name: len(prompts) for name, prompts in seen.items()} == {
        "answer": 3,
        "choice": 3,
        "few": 3,
    }
    assert all(prompts[0] == prompts[1] == prompts[2] for prompts in seen.values())
    assert len(set(seen["few"][0])) == 4
    dense = found["dense", "", "answer"]
    assert (dense["score"], dense["score_name"], dense["samples"], dense["sparsity"]) == (
        0.75,
        "exact_match",
        4,
        0,
    )
    assert dense["interval"][0] < 0.75 < dense["interval"][1]
    assert "length" not in dense["extra"]
    assert found["dense", "", "choice"]["score"] == 1
    for name in ("answer", "choice", "few"):
        full, sparse = (found["random", f"sparsity {share}", name] for share in ("0", "0.8"))
        assert (full["sparsity"], full["score"]) == (0, found["dense", "", name]["score"])
        assert sparse["latency_s"] > 0
    assert found["random", "sparsity 0.8", "choice"]["sparsity"] > 0.4
    assert found["random", "sparsity 0.8", "few"]["sparsity"] < 0.4  # each task's own share
    assert "it/s]" not in capfd.readouterr().err.replace("examples/s]", "")


def made_task(folder: Path) -> None:
    """A task that makes its prompts and reports by length, as lm_eval's RULER does."""
    (folder / "made.py").write_text(MADE)
    keys: dict[str, Any] = {"dataset_path": "", "doc_to_text": "{{input}}", "doc_to_target": "x"}
    keys |= GENERATED | {"generation_kwargs": {"until": [], "max_gen_toks": 2, "do_sample": False}}
    metrics = [
        {"metric": name, "aggregation": "!function made.mean", "higher_is_better": True}
        for name in ("64", "128")
    ]
    functions = {
        "custom_dataset": "!function made.rows",
        "process_results": "!function made.scored",
        "metric_list": metrics,
    }
    write_task(folder, "made", **keys | functions)
    metrics = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    functions = {
        "custom_dataset": "!function made.one_length",
        "process_results": "!function made.score_of_one",
    }
    write_task(folder, "babilong_one", **keys | functions | {"metric_list": metrics})


@pytest.mark.slow
def test_bins_and_probes(folder: Path) -> None:
    """Samples that record a length are grouped by it, as LongBench-E's are; routings read each
    number of buckets.
    """
    rows = [{"text": TEXT * 8, "target": "x", "length": length} for length in (90, 5, 50, 99, 49)]
    write_task(folder, "binned", rows, **GENERATED)
    write_task(folder, "plain", [{"text": TEXT, "target": "x"}], **GENERATED)
    cfg = settings(folder, "binned", "plain", bins=[50, 99], probes=[0, 2], sparsities=[0.8])
    presets = replace(cfg.model.presets, num_buckets=8)  # large ones, in which a query finds keys
    found = measure(
        replace(
            cfg,
            model=replace(cfg.model, presets=presets),
            eval=replace(cfg.eval, routers=["random"]),
        )
    )
    sizes = {"binned, 0 to 50": 2, "binned, 50 to 99": 2, "binned, 99 and more": 1, "plain": 1}
    for method, setting in (
        ("dense", ""),
        ("random", "sparsity 0.8"),
        ("window only", "0 probes"),
        ("random buckets", "2 probes"),
    ):
        assert {name: found[method, setting, name]["samples"] for name in sizes} == sizes
    window = found["window only", "0 probes", "binned, 0 to 50"]["selectivity"]
    assert window < found["random buckets", "2 probes", "binned, 0 to 50"]["selectivity"] < 1
    with pytest.raises(
        UserError, match=r"eval\.harness\.bins=\[8, 4\]: expected increasing numbers"
    ):
        HarnessConfig(tasks=["plain"], bins=[8, 4])


@pytest.mark.slow
def test_lengths(folder: Path) -> None:
    made_task(folder)
    found = measure(settings(folder, "made", lengths=[64, 192], limit=2))
    scores = {key: (row["score"], row["score_name"], row["samples"]) for key, row in found.items()}
    assert scores["dense", "", "made/64"] == (0.064, "score", 2)
    assert scores["dense", "", "made/192"] == (0.192, "score", 2)
    short, long = (
        found["random", "sparsity 0.8", f"made/{length}"]["sparsity"] for length in (64, 192)
    )
    assert 0 < short < long  # each length's own share
    # the task's own length
    assert measure(settings(folder, "made"))["dense", "", "made/64"]["samples"] == 3


def test_documents_longer_than_the_positions_are_read_in_windows(
    folder: Path, loaded: Loaded
) -> None:
    text = TEXT * 30
    tokens = loaded.tokenizer(text).input_ids
    assert len(tokens) > POSITIONS + 2
    keys = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    write_task(
        folder, "document", [{"text": text}], **keys, metric_list=[{"metric": "bits_per_byte"}]
    )
    start = loaded.tokenizer.bos_token_id
    line = [loaded.tokenizer.eos_token_id if start is None else start, *tokens]
    starts = range(0, len(tokens), POSITIONS)
    windows = [line[first : first + POSITIONS + 1] for first in starts[:-1]]
    found = sum(log_likelihood(loaded, window, 1) for window in windows)
    # a whole window, too
    found += log_likelihood(
        loaded, line[-POSITIONS - 1 :], POSITIONS - (len(tokens) - starts[-1]) + 1
    )
    expected = -found / math.log(2) / len(text.encode())
    row = measure(settings(folder, "document", sparsities=[0.8]))["dense", "", "document"]
    assert (row["score_name"], row["score"]) == ("bits_per_byte", pytest.approx(expected, rel=1e-5))


def script(folder: Path) -> None:
    (folder / "own").mkdir()
    (folder / "own" / "own.py").write_text("open('ran', 'w').close()\n")
    write_task(
        folder,
        "task",
        **GENERATED,
        dataset_path=str(folder / "own"),
        dataset_kwargs={"trust_remote_code": True},
    )


def no_data(folder: Path) -> None:
    write_task(folder, "task", [], **GENERATED)
    (folder / "task.jsonl").unlink()


def no_yaml(folder: Path) -> None:
    (folder / "task.yaml").write_text("task: task\ndataset_path: [json\noutput_type: x\n")


def task_of(keys: dict[str, Any], **row: Any) -> Callable[[Path], None]:
    """Returns a function that writes a task of one sample."""
    return lambda folder: write_task(folder, "task", [{"target": "x", **row}], **keys)


LONG_ANSWERS = GENERATED | {
    "generation_kwargs": {"until": [], "max_gen_toks": 9999, "do_sample": False}
}
TOO_LONG = r"eval\.harness: a sample has \d+ tokens, and %d fit the model's positions"
ANSWERS = (
    r"eval\.harness: answers of task have up to 9999 tokens, and the model has positions for 256; "
)
SCRIPT = (
    r"eval\.harness\.tasks=task: this dataset is a script, which is never run; a task in "
    r"eval\.harness\.include_path "
    r"can read its parquet files \(dataset_path: parquet\), or the Hub's parquet copy"
)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (task_of(GENERATED, text=TEXT * 30), TOO_LONG % 252 + " with the answer; extend"),
        (task_of(CHOSEN, text=TEXT * 30, choices=["a", "b"], target=0), TOO_LONG % 256),
        (task_of(LONG_ANSWERS, text=TEXT), ANSWERS),
        (script, SCRIPT),
        (no_data, r"eval\.harness\.tasks=task: Unable to find '.*task\.jsonl'"),
        (task_of(GENERATED, description="x"), r"eval\.harness\.tasks=task: .*'text' is undefined"),
        (
            task_of(GENERATED | {"process_docs": "!function gone.docs"}, text="x"),
            r"eval\.harness\.tasks=task: .*'gone'",
        ),
        (
            no_yaml,
            r"eval\.harness\.tasks=task: no such task of lm_eval, and none in .*/task\.yaml, line "
            r"3: ",
        ),
    ],
)
def test_mistakes_of_tasks(
    write: Callable[[Path], None],
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "lm_eval").mkdir()  # in place of lm_eval's own tasks, which take seconds to read
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(tmp_path / "lm_eval" / "manager.py"))
    monkeypatch.chdir(tmp_path)
    write(folder)
    with pytest.raises(UserError, match=f"^{message}") as caught:
        evaluate(settings(folder, "task"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_chat_templates(folder: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.models.huggingface import HFLM

    write_task(folder, "task", [{"text": TEXT, "target": "x"}], **GENERATED)
    cfg = replace(settings(folder, "task", sparsities=[0.8]), chat=True)
    with pytest.raises(
        UserError,
        match=r"^chat: the tokenizer has no chat template; chat=false sends prompts unchanged$",
    ):
        evaluate(cfg)
    prompts: list[str] = []
    encode = HFLM.tok_batch_encode

    def recorded(model: HFLM, strings: list[str], *arguments: Any, **options: Any) -> Any:
        prompts.extend(strings)
        return encode(model, strings, *arguments, **options)

    model = folder.parent / "model"
    loaded.model.save_pretrained(model)
    tokenizer = copy(loaded.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<reply>"
    )
    tokenizer.save_pretrained(model)
    monkeypatch.setattr(HFLM, "tok_batch_encode", recorded)
    evaluate(replace(cfg, model=ModelConfig(name="instruct", path=str(model))))
    assert prompts == [f"<user>{TEXT}<reply>"] * 2


def test_a_model_without_an_end_token_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"^eval\.harness: the model has no end-of-text token; set eos_token_id in its config",
    ):
        load_samples(settings(folder, "words"), saved(tmp_path))


def test_mistakes_without_lm_eval(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, None)
    for cfg, message in (
        (settings(folder), r"eval\.harness\.tasks=\[\]: expected one or more tasks of lm_eval"),
        (
            settings(tmp_path / "gone", "a"),
            r"eval\.harness\.include_path=.*gone: expected a folder with YAML",
        ),
        (
            settings(folder, "a", lengths=[9999999]),
            r"eval\.harness\.lengths=9999999: the model has positions",
        ),
        (settings(folder, "a"), r"eval=harness: needs lm_eval; pip install 'msattn\[harness\]'"),
    ):
        with pytest.raises(UserError, match=f"^{message}"):
            evaluate(cfg)


def test_the_main_metric() -> None:
    result: dict[str, Any] = {
        "alias": "x",
        "sample_len": 3,
        "acc_stderr,none": 0.1,
        "em,none": "N/A",
        "f1,strict": 0.5,
    }
    assert main_metric(result) == ("f1", "strict", 0.5)
    assert main_metric({"64,none": -1.0, "128,none": 0.5}, 128) == ("128", "none", 0.5)
    with pytest.raises(UserError, match=r"^eval\.harness: the task x has no metric with a number$"):
        main_metric({"alias": "x"})


def test_tasks_that_take_one_length_as_text(folder: Path) -> None:
    made_task(folder)
    cfg = settings(folder, "made", "babilong_one", lengths=[1024], sparsities=[0.8])
    architecture = {**(cfg.model.architecture or {}), "max_position_embeddings": 2048}
    found = measure(replace(cfg, model=replace(cfg.model, architecture=architecture)))
    assert found["dense", "", "babilong_one/1024"]["score"] == 1
    assert found["dense", "", "made/1024"]["score"] == 1.024
    with pytest.raises(
        UserError, match=r"^eval\.harness\.lengths=200: babilong_one accepts multiples of 1024$"
    ):
        evaluate(settings(folder, "babilong_one", lengths=[200]))
    with pytest.raises(
        UserError, match=r"^eval\.harness\.lengths=257: the model has positions for 256 tokens; "
    ):
        evaluate(settings(folder, "made", lengths=[64, 257]))
