"""The tokens that end a text, wherever a model's files name them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AddedToken, AutoTokenizer

from msattn.trainer.commands.answers import Clock, generate_greedily
from msattn.trainer.config import DataConfig, ModelConfig
from msattn.trainer.data import chunks
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.compared import Compared
from msattn.trainer.evaluate.tasks.answers import Question, answer
from msattn.trainer.models import Loaded, load
from msattn.trainer.models.ends import end_tokens
from tests.factory import save_tokenizer, tiny_model
from tests.models.gguf_files import gguf_model, write_gguf

END = 128  # the token <|im_end|>, which is no special token, as in some fine-tuned checkpoints
IDS = torch.tensor([[3, 5, 7]])
TEMPLATE = "{% for m in messages %}t1 {{ m.content }} <|im_end|>\nt2 {% endfor %}"


def saved(
    folder: Path, config: Any = None, generation: Any = None, template: str | None = None, eos: str | None = None
) -> Path:
    """Saves a small model that names these end tokens."""
    model = tiny_model(vocab_size=144)
    model.generation_config.eos_token_id = generation
    model.save_pretrained(folder)
    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=False)])
    tokenizer.eos_token, tokenizer.chat_template = eos, template
    tokenizer.save_pretrained(folder)
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {"eos_token_id": config}))
    return folder


def loaded_from(folder: Path) -> Loaded:
    return load(ModelConfig(name="small", path=str(folder)), device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("named", "expected", "eos"),
    [
        ({"config": 5, "generation": [6, 7], "template": TEMPLATE, "eos": "t9"}, [5, 6, 7, 9, END], "t9"),
        ({"config": 5}, [5], "t5"),
        ({"generation": 6, "config": [5, -1]}, [5, 6], "t6"),
        ({"template": TEMPLATE}, [END], "<|im_end|>"),
        ({"template": "{% for m in messages %}{{ m.content }}\n{% endfor %}"}, [], None),
        ({"template": "{% for m in messages %}{{ m.content }} t3{% endfor %}"}, [], None),  # ordinary text
        ({"template": "{{ raise_exception('no answers') }}", "eos": "t9"}, [9], "t9"),
        ({}, [], None),
    ],
)
def test_a_model_ends_at_all_that_its_files_name(tmp_path: Path, named: dict[str, Any], expected: list[int], eos: str) -> None:
    loaded = loaded_from(saved(tmp_path, **named))
    assert end_tokens(loaded.model) == expected
    assert loaded.tokenizer.eos_token == eos


@pytest.mark.parametrize("key", ["eos", "eot", "eom"])
def test_a_gguf_file_with_one_end_token(tmp_path: Path, key: str) -> None:
    """An end of a turn alone was none."""
    metadata = {"tokenizer__ggml__eos_token_id": None, f"tokenizer__ggml__{key}_token_id": 263, "tokenizer__chat_template": ""}
    loaded = loaded_from(write_gguf(tmp_path / "small.gguf", gguf_model(), **metadata))
    assert end_tokens(loaded.model) == [263]
    assert loaded.tokenizer.eos_token == "<|unused|>"


def test_a_gguf_file_ends_where_its_chat_template_does(tmp_path: Path) -> None:
    loaded = loaded_from(write_gguf(tmp_path / "small.gguf", gguf_model(), tokenizer__ggml__eos_token_id=263))
    assert end_tokens(loaded.model) == [262, 263]


def test_generation_and_evaluation_end_at_a_token_of_the_configuration(tmp_path: Path) -> None:
    """The generation configuration and the tokenizer name others."""

    def generated(loaded: Loaded) -> list[int]:
        generate_greedily(loaded, IDS, 24, clock := Clock())
        return clock.tokens

    def answered(loaded: Loaded) -> list[int]:
        (dense,) = Compared([], []).cases(loaded.model, [])
        return answer(loaded, [Question(IDS, 24)], dense, lambda: None).tokens[0]

    endless = loaded_from(saved(tmp_path))
    whole = generated(endless)
    assert whole == answered(endless)
    assert len(whole) == 24
    end = next(token for place, token in enumerate(whole) if place > 2 and whole.index(token) == place)
    ending = loaded_from(saved(tmp_path, config=end, generation=[127], eos="t126"))
    assert generated(ending) == whole[: whole.index(end) + 1]
    assert answered(ending) == whole[: whole.index(end)]


def test_text_for_a_tokenizer_without_an_end(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("t1 t2 t3 " * 50)
    data = DataConfig("text", path=str(text), heldout_path=str(text), seq_len=10)
    assert len(chunks(data, loaded_from(saved(tmp_path / "ends", config=5)).tokenizer, seed=0)) == 15
    with pytest.raises(UserError, match=r"^data: no end-of-text token to put between documents; set eos_token_id in"):
        chunks(data, loaded_from(saved(tmp_path / "endless")).tokenizer, seed=0)
