"""The tokens that end a text, wherever a model's files name them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from msattn.trainer.commands.answers import Clock, generate_greedily
from msattn.trainer.config import DataConfig, ModelConfig
from msattn.trainer.data import chunks
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.compared import Compared
from msattn.trainer.evaluate.tasks.answers import Question, answer
from msattn.trainer.models import Loaded, describe, load
from msattn.trainer.models.ends import end_tokens
from tests.ending import END, first_unique, saved
from tests.models.gguf_files import gguf_model, write_gguf

TEMPLATE = "{% for m in messages %}t1 {{ m.content }} <|im_end|>\nt2 {% endfor %}"
IDS = torch.tensor([[3, 5, 7]])


@pytest.mark.parametrize(
    ("named", "expected", "eos"),
    [
        (
            {"config": 5, "generation": [6, 7], "template": TEMPLATE, "eos": "t9"},
            [5, 6, 7, 9, END],
            "t9",
        ),
        ({"config": 5}, [5], "t5"),
        ({"generation": 6, "config": [5, -1]}, [5, 6], "t6"),
        ({"template": TEMPLATE}, [END], "<|im_end|>"),
        ({"template": "{% for m in messages %}{{ m.content }}\n{% endfor %}"}, [], None),
        # ordinary text
        ({"template": "{% for m in messages %}{{ m.content }} t3{% endfor %}"}, [], None),
        ({"template": "{{ raise_exception('no answers') }}", "eos": "t9"}, [9], "t9"),
        ({}, [], None),
    ],
)
def test_a_model_ends_at_all_that_its_files_name(
    tmp_path: Path, named: dict[str, Any], expected: list[int], eos: str
) -> None:
    loaded = saved(tmp_path, **named)
    assert end_tokens(loaded.model) == expected
    assert loaded.tokenizer.eos_token == eos
    # commands chunk text before weights
    described = describe(ModelConfig(name="small", path=str(tmp_path)), device="cpu")
    assert described.tokenizer.eos_token == eos


def load_gguf(folder: Path, **metadata: Any) -> Loaded:
    path = write_gguf(folder / "small.gguf", gguf_model(), **metadata)
    return load(ModelConfig(name="small", path=str(path)), device="cpu", dtype="float32")


@pytest.mark.parametrize("key", ["eos", "eot", "eom"])
def test_a_gguf_file_with_one_end_token(tmp_path: Path, key: str) -> None:
    """An end of a turn alone was none."""
    metadata = {
        "tokenizer__ggml__eos_token_id": None,
        f"tokenizer__ggml__{key}_token_id": 263,
        "tokenizer__chat_template": "",
    }
    loaded = load_gguf(tmp_path, **metadata)
    assert end_tokens(loaded.model) == [263]
    assert loaded.tokenizer.eos_token == "<|unused|>"


def test_a_gguf_file_ends_where_its_chat_template_does(tmp_path: Path) -> None:
    loaded = load_gguf(
        tmp_path, tokenizer__ggml__eos_token_id=263, tokenizer__ggml__eot_token_id=2**32 - 1
    )
    assert end_tokens(loaded.model) == [262, 263]


def test_generation_and_evaluation_end_at_a_token_of_the_configuration(tmp_path: Path) -> None:
    """The generation configuration and the tokenizer name others."""

    def generated(loaded: Loaded) -> list[int]:
        generate_greedily(loaded, IDS, 24, clock := Clock())
        return clock.tokens

    def answered(loaded: Loaded) -> list[int]:
        (dense,) = Compared([], []).cases(loaded.model, [])
        return answer(loaded, [Question(IDS, 24)], dense, lambda: None).tokens[0]

    endless = saved(tmp_path)
    whole = generated(endless)
    assert whole == answered(endless)
    assert len(whole) == 24
    end = first_unique(whole)
    ending = saved(tmp_path, config=end, generation=[127], eos="t126")
    assert generated(ending) == whole[: whole.index(end) + 1]
    assert answered(ending) == whole[: whole.index(end)]


def test_text_for_a_tokenizer_without_an_end(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("t1 t2 t3 " * 50)
    data = DataConfig("text", path=str(text), heldout_path=str(text), seq_len=10)
    assert len(chunks(data, saved(tmp_path / "ends", config=5).tokenizer, seed=0)) == 15
    with pytest.raises(
        UserError,
        match=r"^data: the model has no end-of-text token; set eos_token_id in its config.json$",
    ):
        chunks(data, saved(tmp_path / "endless").tokenizer, seed=0)
