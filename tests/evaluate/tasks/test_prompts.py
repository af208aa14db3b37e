"""``eval=prompts``: the user's own prompts with expected answers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msattn.trainer import models
from msattn.trainer.config import DataConfig, SelectConfig
from msattn.trainer.config.evaluate import PromptsConfig
from msattn.trainer.data.prompts import Prompt, read_prompts
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate import calibration
from msattn.trainer.evaluate.run import evaluate
from msattn.trainer.evaluate.tasks.prompts import share_of_equal_tokens
from msattn.trainer.models.chat import encode_prompt
from tests.evaluate.runs import config, read_rows

LONG = "the river ran past an old mill and nobody knew where it came from " * 5


def write(path: Path, *entries: Any) -> str:
    path.write_text("\n".join(json.dumps(entry) for entry in entries), encoding="utf-8")
    return str(path)


def test_dense_and_sparse_answers(tmp_path: Path) -> None:
    cfg = config(tmp_path, "unused")
    loaded = models.load(cfg.model, device="cpu")
    ids = encode_prompt(loaded.tokenizer, LONG, None)
    output: Any = loaded.model.generate(ids, max_new_tokens=4, do_sample=False)  # pyrefly: ignore[not-callable]
    answer = str(loaded.tokenizer.decode(output[0, ids.shape[1] :]))
    path = write(
        tmp_path / "qa.jsonl",
        {"prompt": LONG, "answer": answer.upper()},
        {"prompt": LONG, "answer": "never <said>"},
    )
    prompts = PromptsConfig(path, max_new_tokens=4, sparsities=[0.0, 0.9])
    folder = evaluate(
        config(tmp_path, "unused", tasks=["prompts"], baselines=["random"], prompts=prompts)
    )
    rows = read_rows(folder)
    dense = rows["dense", ""]
    full = rows["random", "sparsity 0"]
    sparse = rows["random", "sparsity 0.9"]
    assert (dense["score"], dense["samples"]) == (0.5, 2)
    assert [example["correct"] for example in dense["extra"]["examples"]] == [True, False]
    assert (full["score"], full["sparsity"], full["extra"]["same_as_dense"]) == (0.5, 0, 1)
    assert sparse["sparsity"] > 0.15  # the prompt has few blocks, of which three are always read
    assert sparse["extra"]["same_as_dense"] < 1
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "never &lt;said&gt;" in page


def test_baselines_are_calibrated_at_the_length_of_the_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = PromptsConfig(write(tmp_path / "qa.jsonl", {"prompt": "one", "answer": "a"}))
    cfg = config(tmp_path, "unused", tasks=["prompts"], baselines=["quest"], prompts=prompts)
    data = DataConfig("stdlib", seq_len=4096)
    select = SelectConfig("calibrated", block_size=16)
    seen: list[int] = []
    monkeypatch.setattr(
        calibration, "calibration_chunks", lambda cfg, *_: seen.append(cfg.data.seq_len) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        evaluate(replace(cfg, data=data, select=select))
    assert seen == [1024]
    assert "calibration reads source files of Python" in capsys.readouterr().err


def test_files_and_their_mistakes(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Where?"}]
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "How?", "answer": "So."},
        {"messages": messages, "answer": "Here."},
    )
    first, second = read_prompts(path)
    assert (first, second.text) == (Prompt("How?", "So."), "Where?")
    assert second.is_answered_by("It is\n  HERE. Yes")
    assert not second.is_answered_by("there")
    assert not second.is_answered_by("hereafter"), "only whole words"
    assert not Prompt("How?", "5").is_answered_by("-5")
    halves: list[Any] = [
        {"prompt": "How?"},
        {"answer": "x"},
        {"prompt": "", "answer": "x"},
        {"prompt": "How?", "answer": "\u200b"},
        3,
    ]
    for entry in [*halves, *({"messages": messages, "answer": "x"} for messages in ([], [{}]))]:
        with pytest.raises(UserError, match=r'bad\.jsonl, line 2: each line is {"prompt"'):
            read_prompts(write(tmp_path / "bad.jsonl", {"prompt": "How?", "answer": "So."}, entry))
    (tmp_path / "lines.jsonl").write_text(
        '\ufeff{"prompt": "a\u2028b", "answer": "x"}\n', encoding="utf-8"
    )
    assert read_prompts(str(tmp_path / "lines.jsonl")) == [Prompt("a\u2028b", "x")]
    for name, text, message in (
        ("text.jsonl", "How?", "line 1: not JSON"),
        ("empty.jsonl", "\n", "the file is empty"),
        ("nowhere", None, r"eval\.prompts\.path=\S+nowhere: No such file"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=message):
            read_prompts(str(tmp_path / name))
    with pytest.raises(UserError, match=r"eval\.prompts\.path=null: expected a jsonl file"):
        evaluate(config(tmp_path, "unused", tasks=["prompts"]))


def test_prompts_longer_than_the_model(tmp_path: Path) -> None:
    prompts = PromptsConfig(write(tmp_path / "qa.jsonl", {"prompt": LONG * 5, "answer": "x"}))
    with pytest.raises(
        UserError,
        match=r"prompt 1 of .*qa\.jsonl, with \d+ tokens, and max_new_tokens=64: the model has",
    ):
        evaluate(
            config(tmp_path, "unused", tasks=["prompts"], baselines=["random"], prompts=prompts)
        )


def test_the_share_of_equal_tokens() -> None:
    assert share_of_equal_tokens([1, 2, 3], [1, 2, 4, 5]) == 0.5
    assert share_of_equal_tokens([1, 2], [1, 2, 3, 4]) == 0.5
    assert share_of_equal_tokens([7], []) == 1


def test_separate_probes_of_query_heads(tmp_path: Path) -> None:
    path = write(tmp_path / "qa.jsonl", {"prompt": LONG, "answer": "x"})
    prompts = PromptsConfig(path, max_new_tokens=4, independent=True)
    cfg = config(
        tmp_path, "unused", tasks=["prompts"], baselines=[], routers=["quest"], prompts=prompts
    )
    model = replace(cfg.model, presets=replace(cfg.model.presets, num_buckets=4, probes=1))
    folder = evaluate(replace(cfg, model=model, dense_layers=[]))
    read = {method: row["selectivity"] for (method, _), row in read_rows(folder).items()}
    assert read.keys() == {"dense", "Quest pages", "Quest pages, independent"}
    assert 0 < read["Quest pages"] < 1
    assert 0 < read["Quest pages, independent"] < 1
