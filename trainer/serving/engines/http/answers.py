"""The JSON objects that are sent: answers and errors, in OpenAI's form."""

import json
import time
import uuid
from typing import Any


class ApiError(Exception):
    """A refused or failed request.

    The message is one sentence, which names the parameter, its value and what is accepted. ``code`` is a word that programs
    compare.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer: a server that is full or ends may take the request a second later."""
        return {"Retry-After": "1"} if self.status in (429, 503) else {}


class AnswerForm:
    """Objects of one answer, which share an id; ``chat`` ones are those of ``/v1/chat/completions``."""

    def __init__(self, model: str, *, chat: bool) -> None:
        self._chat = chat
        name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._common = {"id": name, "created": int(time.time()), "model": model}

    def whole(self, text: str, reason: str, usage: dict[str, int]) -> dict[str, Any]:
        """Returns the answer to a request without a stream."""
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        kind = "chat.completion" if self._chat else "text_completion"
        return {"object": kind, **self._common, "choices": [_choice(content, reason)], "usage": usage}

    def piece(self, text: str | None, reason: str | None = None) -> dict[str, Any]:
        """Returns an object of a stream. ``text=None`` begins a chat, or ends an answer if there is a ``reason``."""
        start = {"role": "assistant", "content": ""} if reason is None else {}
        chat = {"delta": start if text is None else {"content": text}}
        return self._part([_choice(chat if self._chat else {"text": text or ""}, reason)])

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        """Returns the last object of a stream with ``include_usage``."""
        return self._part([]) | {"usage": usage}

    def _part(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"object": "chat.completion.chunk" if self._chat else "text_completion", **self._common, "choices": choices}


def _choice(content: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": 0, **content, "finish_reason": reason, "logprobs": None}


def event(data: dict[str, Any] | str) -> bytes:
    """Returns a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n".encode()
