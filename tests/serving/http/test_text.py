"""Text of tokens in pieces, and stop strings."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from msattn.trainer.models import EMBEDDED
from msattn.trainer.serving.engines.http import text as module
from msattn.trainer.serving.engines.http.answers import AnswerForm, ApiError, Logprobs
from msattn.trainer.serving.engines.http.bodies import CompletionBody
from msattn.trainer.serving.engines.http.text import (
    AnswerText,
    PromptEncoder,
    StopStrings,
    TokenText,
    token_text,
)
from tests.factory import save_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EMBEDDED)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("words")
    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@given(
    tokens=st.lists(st.integers(0, 4095), max_size=40),
    sizes=st.lists(st.integers(1, 5), min_size=40, max_size=40),
)
def test_pieces_are_the_text_of_all_tokens(
    tokenizer: Any, tokens: list[int], sizes: list[int]
) -> None:
    """Random tokens of bytes are often no UTF-8."""
    text, pieces, rest = TokenText(tokenizer), [], list(tokens)
    for size in sizes:
        pieces.append(text.push(rest[:size]))
        rest = rest[size:]
    pieces.append(text.push([], last=True))
    assert "".join(pieces) == tokenizer.decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def test_a_character_of_several_tokens_comes_whole(tokenizer: Any) -> None:
    tokens = tokenizer("x \U0001f980 y").input_ids
    text = TokenText(tokenizer)
    pieces = [text.push([token]) for token in tokens]
    assert "".join(pieces) == "x \U0001f980 y"
    assert not any("\ufffd" in piece for piece in pieces)


@given(tokens=st.lists(st.integers(0, 3), max_size=12))
def test_special_tokens_leave_the_spaces_around_them(words: Any, tokens: list[int]) -> None:
    """A tokenizer of words puts a space before each but the first; t0 is special and has no
    text.
    """
    text = TokenText(words)
    pieces = [text.push([token]) for token in tokens]
    assert "".join(pieces) == words.decode(tokens, skip_special_tokens=True)


@given(
    text=st.text("ab", max_size=30),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 3), min_size=30, max_size=30),
)
def test_text_ends_before_the_first_stop_string(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    """Pieces are cut anywhere, and nothing is passed on that a stop string takes back."""
    stops, passed, rest = StopStrings(stop), "", text
    for cut in cuts:
        passed += stops.push(rest[:cut])
        rest = rest[cut:]
        if stops.found:
            break
    else:
        passed += stops.push("", last=True)
    assert text.startswith(passed)
    assert not any(each in passed for each in stop)
    assert stops.found == any(each in text for each in stop)
    assert (
        any(text.startswith(each, len(passed)) for each in stop) if stops.found else passed == text
    )


@given(
    pieces=st.lists(st.tuples(st.text("ab", max_size=3), st.booleans()), max_size=10),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_are_found_across_hidden_text(
    pieces: list[tuple[str, bool]], stop: list[str]
) -> None:
    stops, passed, seen = StopStrings(stop), "", ""
    for piece, hidden in pieces:
        passed += stops.push(piece, hidden=hidden)
        seen += piece
        if stops.found:
            break
    else:
        passed += stops.push("", last=True)
    whole = "".join(piece for piece, _ in pieces)
    assert stops.found == any(each in whole for each in stop)
    end = (
        min(place for each in stop if (place := seen.find(each)) >= 0)
        if stops.found
        else len(whole)
    )
    visible = "".join(
        letter.upper() if hidden else letter for piece, hidden in pieces for letter in piece
    )[:end]
    assert passed == "".join(letter for letter in visible if letter.islower())


def test_stop_strings_may_name_special_tokens(words: Any) -> None:
    """They have no text in an answer, and clients of chat models give them as stop strings."""
    for stop in (["t0"], ["t2t0"], ["t0 t3"]):
        text = AnswerText(words, stop)
        passed = "".join(text.push(token) for token in (1, 2, 0, 3) if not text.stopped)
        assert (text.stopped, passed) == (True, "t1 " if stop == ["t2t0"] else "t1 t2"), stop


def test_parts_of_a_character_keep_their_bytes(tokenizer: Any) -> None:
    letters = {
        "<unk>": 0,
        "a": 1,
        "b": 2,
        **{f"<0x{value:02X}>": 3 + value for value in range(256)},
    }
    fallback = Tokenizer(BPE(letters, [], unk_token="<unk>", byte_fallback=True))
    fallback.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    for each, text in (
        (tokenizer, "x \U0001f980 y"),
        (PreTrainedTokenizerFast(tokenizer_object=fallback), "a\U0001f980b"),
    ):
        tokens = [
            token_text(each, token) for token in each(text, add_special_tokens=False).input_ids
        ]
        assert b"".join(token.data or b"" for token in tokens) == text.encode()
        assert sum(token.name.startswith("bytes:\\x") for token in tokens) == 4
        assert len({token.name for token in tokens}) == len(tokens)


def test_offsets_count_characters_of_several_tokens_once(tokenizer: Any) -> None:
    text = "x \U0001f980 y"
    form = AnswerForm("tiny", partial(token_text, tokenizer), chat=False)
    logprobs = [Logprobs(token, -1.0, []) for token in tokenizer(text).input_ids]
    found = form.piece(0, text, logprobs)["choices"][0]["logprobs"]
    assert found["tokens"][-1] == " y"
    assert text[found["text_offset"][-1] :] == " y"


def test_offsets_leave_out_special_tokens(tokenizer: Any) -> None:
    """The answer has no text of them; one may stand inside a character."""
    start, space, first, *rest = tokenizer("x \U0001f980 y").input_ids
    tokens = [start, tokenizer.eos_token_id, space, first, tokenizer.eos_token_id, *rest]
    form = AnswerForm("tiny", partial(token_text, tokenizer), chat=False)
    found = form.piece(0, "", [Logprobs(token, -1.0, []) for token in tokens])["choices"][0][
        "logprobs"
    ]
    assert found["text_offset"] == [0, 1, 1, *[2] * 5, 3]


def encoded(tokenizer: Any, prompt: str, longest: int = 100) -> list[int]:
    encoder = PromptEncoder(tokenizer, longest=longest, vocabulary=4096, new_tokens=1)
    return encoder.encode(CompletionBody(model="tiny", prompt=prompt))[0]


def test_a_text_that_begins_with_bos_gets_no_second_one(words: Any) -> None:
    """Texts for models are often kept with their first token. Only a tokenizer that adds one
    doubles it.
    """
    words.bos_token = "t1"
    assert encoded(words, "t1 t1 t2") == [1, 1, 2]
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="t1 $A", special_tokens=[("t1", 1)]
    )
    assert encoded(words, "t2 t1") == [1, 2, 1]
    assert encoded(words, "t1 t2") == [1, 2]
    assert encoded(words, "t1 t1 t2") == [1, 1, 2]


def test_a_long_text_is_counted_in_parts(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused without being encoded whole; one that fits has the tokens of the whole text."""
    monkeypatch.setattr(module, "LONG_TEXT", 30)
    monkeypatch.setattr(module, "PART", 7)
    text = "def main(arguments):\n    return arguments" * 3
    whole = tokenizer(text).input_ids
    assert encoded(tokenizer, text, len(whole) + 1) == whole
    with pytest.raises(
        ApiError, match=f"prompt: {len(text)} characters exceed the 9 tokens of a request"
    ):
        encoded(tokenizer, text, 9)
