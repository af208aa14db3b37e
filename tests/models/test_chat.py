"""Prompts as tokens, with and without a chat template."""

from typing import Any

import numpy as np
import pytest

from msattn.trainer.data.tasks.sequences import needle_prompt
from msattn.trainer.data.tasks.wordings import TRAINING
from msattn.trainer.errors import UserError
from msattn.trainer.models.chat import around_prompt, encode_conversation, encode_prompt
from tests.factory import TEMPLATE, embedded_tokenizer


@pytest.fixture
def tokenizer() -> Any:
    return embedded_tokenizer()


@pytest.fixture
def chat_tokenizer() -> Any:
    tokenizer = embedded_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_a_base_model_gets_the_text(tokenizer: Any) -> None:
    assert tokenizer.decode(encode_prompt(tokenizer, "Two  words", None)[0]) == "Two  words"
    assert around_prompt(tokenizer, None) == ([], [])
    with pytest.raises(UserError, match="no chat template; chat=false"):
        encode_prompt(tokenizer, "Two words", True)


def test_an_instruct_model_gets_messages(chat_tokenizer: Any) -> None:
    def text(prompt: Any, chat: bool | None) -> str:
        return chat_tokenizer.decode(encode_prompt(chat_tokenizer, prompt, chat)[0])

    assert text("Hello", None) == text("Hello", True) == "<user>Hello\n<assistant>"
    assert text("Hello", False) == "Hello"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert text(messages, False) == "<system>Be brief.\n<user>Hello\n<assistant>"
    before, after = around_prompt(chat_tokenizer, None)
    assert (chat_tokenizer.decode(before), chat_tokenizer.decode(after)) == (
        "<user>",
        "\n<assistant>",
    )
    with pytest.raises(UserError, match=r"the model's chat template refuses them \(no tools\)"):
        text([{"role": "tool", "content": "x"}], None)


def test_a_conversation_is_messages_or_turns_of_text(tokenizer: Any, chat_tokenizer: Any) -> None:
    turns = [("user", "one"), ("assistant", " two"), ("user", "three")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert tokenizer.decode(encode_conversation(tokenizer, messages, None)[0]) == "one two\n\nthree"
    assert (
        chat_tokenizer.decode(encode_conversation(chat_tokenizer, messages, False)[0])
        == "one two\n\nthree"
    )
    found = chat_tokenizer.decode(encode_conversation(chat_tokenizer, messages, None)[0])
    assert found == "<user>one\n<assistant> two\n<user>three\n<assistant>"


def test_a_needle_is_asked_for_in_a_message(chat_tokenizer: Any) -> None:
    def crop(rng: np.random.Generator, size: int) -> np.ndarray:
        words = chat_tokenizer.encode(
            "the river ran past an old mill " * 100, add_special_tokens=False
        )
        return np.asarray(words[:size])

    _, reply = around_prompt(chat_tokenizer, None)
    prompt = needle_prompt(
        np.random.default_rng(0), 200, crop, chat_tokenizer, TRAINING[0], count=1, reply=reply
    )
    text = chat_tokenizer.decode(prompt.ids)
    body, answer = text[:-6], text[-5:]
    assert len(prompt.ids) == 200
    assert answer.isdigit()
    question = body.rpartition("<assistant>")[2]
    assert body.endswith(f" Continue: {question}\n<assistant>{question}")
    assert f"{question} {answer}." in body
    asked = chat_tokenizer.decode(
        prompt.ids[-prompt.answer_tokens - prompt.question_tokens : -prompt.answer_tokens]
    )
    assert asked == f" Continue: {question}\n<assistant>{question}"
