"""Prompts as tokens, and new tokens as text, piece by piece, up to a stop string."""

import re
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, compress
from typing import TYPE_CHECKING, Any, cast

from msattn.trainer.errors import first_line
from msattn.trainer.serving.engines.http.answers import ApiError, TokenString
from msattn.trainer.serving.engines.http.bodies import Body, ChatBody, CompletionBody

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"  # what tokenizers decode an unfinished character to
# characters of a text whose tokens are counted in parts first, and of a part
LONG_TEXT, PART = 2**20, 2**18


class PromptEncoder:
    """Encodes the prompts of one model.

    Chat templates run in this process. Other commands fork it for each message, but a server has
    threads, and may have hundreds of gigabytes mapped; ``msattn serve`` renders a first message
    that way before it starts.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        longest: int,
        vocabulary: int,
        new_tokens: int,
    ) -> None:
        self._tokenizer = cast("Any", tokenizer)
        self._longest, self._vocabulary, self._new_tokens = longest, vocabulary, new_tokens
        self._longest_token = max(map(len, self._tokenizer.get_vocab()))

    def encode(self, body: Body) -> tuple[list[int], int]:
        """Returns the tokens of the prompt, and the number of new tokens.

        Raises ApiError if the prompt has no token, an unknown one or too many, or the chat template
        refuses the messages.
        """
        param, asked = "messages" if isinstance(body, ChatBody) else "prompt", body.new_tokens
        try:
            tokens = self._tokens(body)
        except ApiError:
            raise
        except (
            Exception
        ) as error:  # whatever a template or a tokenizer raises for a text of the client
            raise ApiError(
                400, f"{param}: the model's tokenizer refuses it ({first_line(error)})", param=param
            ) from error
        if not tokens:
            raise ApiError(
                400, f"{param}: the tokenizer returns no token for it; give some text", param=param
            )
        left = self._longest - len(tokens)
        if left < (asked or 1):
            given, lower = (
                ("", "") if asked is None else (f" and max_tokens={asked}", " or lower max_tokens")
            )
            message = (
                f"{param}: {len(tokens)} tokens{given} exceed the {self._longest} tokens of "
                f"a request; shorten the prompt"
            )
            raise ApiError(400, message + lower, param=param, code="context_length_exceeded")
        return tokens, min(self._new_tokens, left) if asked is None else asked

    def _tokens(self, body: Body) -> list[int]:
        if isinstance(body, ChatBody):
            if self._tokenizer.chat_template is None:
                message = (
                    "messages: the model has no chat template; send a prompt to /v1/completions"
                )
                raise ApiError(400, message, param="messages")
            messages = [message.plain() for message in body.messages]
            self._check_length("".join(message["content"] for message in messages), "messages")
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
            return list(self._tokenizer(text, add_special_tokens=False).input_ids)
        prompt = cast("CompletionBody", body).prompt
        if isinstance(prompt, str):
            self._check_length(prompt, "prompt")
            tokens = list(self._tokenizer(prompt).input_ids)
            bos = [self._tokenizer.bos_token_id]
            if tokens[:2] == bos * 2 and self._tokenizer("").input_ids[:1] == bos:
                del tokens[0]  # the text has brought its own
            return tokens
        if unknown := next((token for token in prompt if token >= self._vocabulary), None):
            raise ApiError(
                400,
                f"prompt: token {unknown} is outside the vocabulary ({self._vocabulary} tokens)",
                param="prompt",
            )
        return prompt

    def _check_length(self, text: str, param: str) -> None:
        """Raises ApiError for a text that is too long, before it is encoded whole: a token takes
        some 150 bytes meanwhile.

        Parts of a text have about as many tokens as the whole, so none that fits has twice as many.
        """
        fits = len(text) <= self._longest * self._longest_token
        if fits and len(text) > LONG_TEXT:
            parts = (text[start : start + PART] for start in range(0, len(text), PART))
            counts = (
                len(self._tokenizer(part, add_special_tokens=False).input_ids) for part in parts
            )
            # ends at the first that is not
            fits = all(tokens <= 2 * self._longest for tokens in accumulate(counts))
        if not fits:
            message = (
                f"{param}: {len(text)} characters exceed the {self._longest} tokens of a "
                f"request; shorten the prompt"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")


class TokenText:
    """Decodes tokens as they come: the pieces together are the text of all tokens, without special
    tokens.

    The text of a token depends on those around it: a character may take several tokens, and some
    tokenizers drop a leading space. So a piece is the difference between two texts that begin with
    the same earlier tokens.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = cast("Any", tokenizer)
        self._tokens: list[int] = []
        # the tokens from start to end are the context, whose text was returned
        self._start = self._end = 0

    def push(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Returns the text that ``tokens`` complete; with ``last`` also an unfinished character."""
        self._tokens += tokens
        text = self._decode(self._start, len(self._tokens))
        if text.endswith(INCOMPLETE) and not last:
            return ""
        piece = text[len(self._decode(self._start, self._end)) :]
        if piece:  # a context of special tokens alone would have no text
            self._start = self._end
        self._end = len(self._tokens)
        return piece

    def _decode(self, start: int, end: int) -> str:
        tokens = self._tokens[start:end]
        return (
            self._tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            if tokens
            else ""
        )


def token_text(tokenizer: "PreTrainedTokenizerBase", token: int) -> TokenString:
    """Returns the text of a token inside a text, where it keeps its leading space; of a special
    token, its name.
    """
    before = tokenizer("a", add_special_tokens=False).input_ids[-1:]
    decode = partial(cast("Any", tokenizer).decode, clean_up_tokenization_spaces=False)
    text = decode([*before, token])[len(decode(before)) :]
    special = decode([token]) != decode([token], skip_special_tokens=True)
    return TokenString(
        text, _part_of_character(tokenizer, token) if INCOMPLETE in text else text.encode(), special
    )


def _part_of_character(tokenizer: "PreTrainedTokenizerBase", token: int) -> bytes | None:
    """Returns the bytes of a token by its name, in byte-level vocabularies and those with bytes for
    rare characters.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    name = cast("Any", tokenizer).convert_ids_to_tokens(token)
    if byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", name):
        return bytes.fromhex(byte[1])
    values = {letter: value for value, letter in bytes_to_unicode().items()}
    return bytes(values[letter] for letter in name) if values.keys() >= set(name) else None


class StopStrings:
    """Passes text on up to the first of ``stop``, and keeps back what may become the beginning of
    one.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.found = False  # a stop string has come
        self._stop = stop
        self._kept, self._visible = "", list[bool]()

    def push(self, piece: str, *, hidden: bool = False, last: bool = False) -> str:
        """Returns the text that can be passed on after ``piece``; with ``last`` everything that is
        left.

        A ``hidden`` piece is not passed on, but stop strings are looked for in it too.
        """
        text, visible = self._kept + piece, self._visible + [not hidden] * len(piece)
        places = [place for place in map(text.find, self._stop) if place >= 0]
        self.found = bool(places)
        keep = 0 if last else max((_overlap(text, stop) for stop in self._stop), default=0)
        end = min(places, default=len(text) - keep)
        self._kept, self._visible = text[end:], visible[end:]
        return "".join(compress(text[:end], visible))


class AnswerText:
    """The text of an answer from its tokens, up to the first of ``stop``, in which special tokens
    stand by their names.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop: Sequence[str]) -> None:
        self._text, self._stop = TokenText(tokenizer), StopStrings(stop)
        added = cast("Any", tokenizer).added_tokens_decoder if stop else {}
        self._special = {token: str(each) for token, each in added.items() if each.special}

    @property
    def stopped(self) -> bool:
        """A stop string has come."""
        return self._stop.found

    def push(self, token: int) -> str:
        """Returns the text that can be passed on after ``token``."""
        piece = self._stop.push(self._text.push([token]))
        if token in self._special and not self.stopped:
            piece += self._stop.push(self._special[token], hidden=True)
        return piece

    def finish(self) -> str:
        """Returns the rest of the text after the last token."""
        return "" if self.stopped else self._stop.push(self._text.push([], last=True), last=True)


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
