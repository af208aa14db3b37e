"""The JSON objects of responses: answers and errors, in OpenAI's format."""

import codecs
import json
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple


class TokenString(NamedTuple):
    """A token as text and as bytes in UTF-8, which may be a part of a character; None if they are
    not known.

    A special token has a name as its text, but no text in answers.
    """

    text: str
    data: bytes | None
    special: bool

    @property
    def name(self) -> str:
        """The text, or as in OpenAI's completions the bytes of a part of a character, which no
        other token shares.
        """
        if self.data in (None, self.text.encode()):
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data or b"")


class ApiError(Exception):
    """A refused or failed request.

    The message is one sentence, which names the parameter, its value and the accepted values.
    ``code`` is for programs.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer; if the server is full or stopping, they tell the client to retry
        after a second.
        """
        return {"Retry-After": "1"} if self.status in (429, 503) else {}


class Logprobs(NamedTuple):
    """The log-probability of a new token by the model's own distribution, and the likeliest tokens
    with theirs.
    """

    token: int
    value: float
    best: list[tuple[int, float]]


class AnswerForm:
    """Objects of the answers to one request, which share an id; ``chat`` ones are those of
    ``/v1/chat/completions``.

    ``decode`` returns a token's text and bytes.
    """

    def __init__(self, model: str, decode: Callable[[int], TokenString], *, chat: bool) -> None:
        self._chat, self._decode = chat, decode
        name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._common = {"id": name, "created": int(time.time()), "model": model}
        # characters of the tokens of each answer so far
        self._offsets: dict[int, int] = defaultdict(int)
        # of each answer's bytes
        self._characters = defaultdict(partial(codecs.getincrementaldecoder("utf-8"), "replace"))

    def whole(
        self, answers: Iterable[tuple[str, list[Logprobs], str]], usage: dict[str, int]
    ) -> dict[str, Any]:
        """Returns the answer to a request without a stream, from text, log-probabilities and reason
        of each answer.
        """
        choices = []
        for number, (text, logprobs, reason) in enumerate(answers):
            content = (
                {"message": {"role": "assistant", "content": text}}
                if self._chat
                else {"text": text}
            )
            choices.append(self._choice(number, content, logprobs, reason))
        kind = "chat.completion" if self._chat else "text_completion"
        return {"object": kind, **self._common, "choices": choices, "usage": usage}

    def piece(
        self,
        number: int,
        text: str | None,
        logprobs: list[Logprobs] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        """Returns an object of a stream. ``text=None`` begins a chat, or ends an answer if there is
        a ``reason``.
        """
        start = {"role": "assistant", "content": ""} if reason is None else {}
        chat = {"delta": start if text is None else {"content": text}}
        return self._part(
            [
                self._choice(
                    number, chat if self._chat else {"text": text or ""}, logprobs or [], reason
                )
            ]
        )

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        """Returns the last object of a stream with ``include_usage``."""
        return self._part([]) | {"usage": usage}

    def _part(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            **self._common,
            "choices": choices,
        }

    def _choice(
        self, number: int, content: dict[str, Any], logprobs: list[Logprobs], reason: str | None
    ) -> dict[str, Any]:
        form = self._of_chat(logprobs) if self._chat else self._of_text(number, logprobs)
        return {
            "index": number,
            **content,
            "finish_reason": reason,
            "logprobs": form if logprobs else None,
        }

    def _of_chat(self, logprobs: list[Logprobs]) -> dict[str, Any]:
        def entry(token: int, value: float) -> dict[str, Any]:
            text, data, _ = self._decode(token)
            return {"token": text, "logprob": value, "bytes": None if data is None else [*data]}

        tokens = [
            entry(each.token, each.value) | {"top_logprobs": [entry(*best) for best in each.best]}
            for each in logprobs
        ]
        return {"content": tokens, "refusal": None}

    def _of_text(self, number: int, logprobs: list[Logprobs]) -> dict[str, Any]:
        def name(token: int) -> str:
            return self._decode(token).name

        tokens = [self._decode(each.token) for each in logprobs]
        shown = (b"" if each.special else each.data or each.text.encode() for each in tokens)
        lengths = (len(self._characters[number].decode(data)) for data in shown)
        *offsets, self._offsets[number] = accumulate(lengths, initial=self._offsets[number])
        best = [
            {name(token): value for token, value in (*each.best, (each.token, each.value))}
            for each in logprobs
        ]
        names, values = [each.name for each in tokens], [each.value for each in logprobs]
        return {
            "tokens": names,
            "token_logprobs": values,
            "top_logprobs": best,
            "text_offset": offsets,
        }


def event(data: dict[str, Any] | str) -> bytes:
    """Returns a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n".encode()
