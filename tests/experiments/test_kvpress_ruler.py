"""Table of kvpress's answers to RULER's prompts, and the greedy decoding around its presses,
without kvpress.
"""

import csv
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvpress_ruler
import pytest
import torch

from msattn.trainer.errors import UserError
from msattn.trainer.models.tap import CACHE
from tests.factory import random_tokens, tiny_model


class Decoded:
    """A tokenizer whose text is the numbers of its tokens."""

    def decode(self, tokens: list[int], **options: Any) -> str:
        return " ".join(map(str, tokens))


def prompt(task: str, *answers: str, one_suffices: bool = False) -> dict[str, Any]:
    sample = {"prompt": "x", "begun": "", "answers": list(answers), "one_suffices": one_suffices}
    return {
        "task": task,
        "length": 64,
        "new_tokens": 8,
        "ids": random_tokens(1, 30)[0].tolist(),
        "sample": sample,
    }


def test_answers_are_those_of_generate() -> None:
    model, asked = tiny_model(initializer_range=0.3).eval(), prompt("vt", "never")
    ids = torch.tensor([asked["ids"]])
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **options)[0, 30:].tolist()  # pyrefly: ignore[not-callable]
    with torch.inference_mode():
        found = kvpress_ruler._answered(model, Decoded(), None, asked)
        assert (found["tokens"], found["kept"]) == (expected, 1.0)
        third = prompt("vt", str(expected[2]), "never", one_suffices=True)
        assert (
            kvpress_ruler._answered(model, Decoded(), None, third)["tokens"]
            == expected[: expected.index(expected[2]) + 1]
        )


def test_the_share_that_is_kept_is_counted_in_the_cache() -> None:
    model, asked = tiny_model(), prompt("vt", "never")

    @contextmanager
    def press(model: Any) -> Any:
        """Removes half of the keys of the first layer, and masks as many of the second one."""
        hooks = [
            layer.self_attn.register_forward_hook(remove, with_kwargs=True)
            for layer in model.model.layers
        ]
        yield
        for hook in hooks:
            hook.remove()

    def remove(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        layer = kwargs[CACHE].layers[module.layer_idx]
        heads = module.config.num_key_value_heads
        if module.layer_idx:
            module.masked_key_indices = [torch.zeros(heads * 10)] * 3
        else:
            layer.keys, layer.values = layer.keys[:, :, :19], layer.values[:, :, :19]

    with torch.inference_mode():
        assert kvpress_ruler._answered(model, Decoded(), press, asked)["kept"] == pytest.approx(
            (19 + 19) / (2 * 29)
        )


def test_the_table_has_the_columns_of_an_evaluation(tmp_path: Path) -> None:
    prompts = [
        prompt("vt", "12", "34"),
        prompt("vt", "5"),
        prompt("qa_1", "ab", "b", one_suffices=True),
        prompt("qa_1", "c"),
    ]
    texts = {("dense", 1.0): ["12 34", "5", "AB", ""], ("SnapKV", 0.1): ["34", "5", "", ""]}
    lines = [
        {
            "press": press,
            "share": share,
            "prompt": number,
            "text": text,
            "tokens": [],
            "kept": share,
            "seconds": 2.0,
        }
        for (press, share), given in texts.items()
        for number, text in enumerate(given)
    ]
    for name, part in (("prompts", prompts), ("one", lines[::2]), ("two", lines[1::2])):
        (tmp_path / name).write_text("".join(json.dumps(each) + "\n" for each in part))
    kvpress_ruler.write_rows(
        tmp_path / "prompts", tmp_path / "table.csv", [tmp_path / "one", tmp_path / "two"]
    )
    dense, snap = csv.DictReader((tmp_path / "table.csv").open())
    assert (dense["method"], dense["score"], dense["vt"], dense["qa_1"]) == (
        "dense",
        "0.75",
        "1.0",
        "0.5",
    )
    assert (snap["method"], snap["setting"], snap["length"]) == (
        "kvpress SnapKV",
        "10 % of keys",
        "64",
    )
    assert [float(snap[name]) for name in ("vt", "qa_1", "score", "selectivity", "latency_s")] == [
        0.75,
        0,
        0.375,
        0.1,
        2,
    ]
    assert (
        float(snap["ratio_low"]) < float(snap["ratio_to_dense"]) == 0.5 < float(snap["ratio_high"])
    )
    with pytest.raises(UserError, match=r"dense at 1 of the keys: 2 of 4 answers are missing"):
        kvpress_ruler.write_rows(
            tmp_path / "prompts", tmp_path / "table.csv", [tmp_path / "one", tmp_path / "one"]
        )
