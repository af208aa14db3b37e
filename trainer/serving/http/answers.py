"""The JSON objects of answers, in OpenAI's form."""

import json
import time
import uuid
from typing import Any


class AnswerForm:
    """Objects of one answer, which share an id.

    Parameters
    ----------
    model : the name of the model.
    chat : the answer is that of ``/v1/chat/completions``.
    """

    def __init__(self, model: str, *, chat: bool) -> None:
        self._chat = chat
        self._common = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, text: str, reason: str, usage: dict[str, int]) -> dict[str, Any]:
        """Returns the answer to a request without a stream."""
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, **content, "finish_reason": reason, "logprobs": None}
        return {
            "object": "chat.completion" if self._chat else "text_completion",
            **self._common,
            "choices": [choice],
            "usage": usage,
        }

    def piece(self, text: str | None, reason: str | None = None) -> dict[str, Any]:
        """Returns an object of a stream. ``text=None`` begins a chat, or ends an answer if there is a ``reason``."""
        if self._chat:
            start = {"role": "assistant", "content": ""} if reason is None else {}
            content: dict[str, Any] = {"delta": start if text is None else {"content": text}}
        else:
            content = {"text": text or ""}
        return self._chunk([{"index": 0, **content, "finish_reason": reason, "logprobs": None}])

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        """Returns the last object of a stream with ``include_usage``."""
        return self._chunk([]) | {"usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"object": "chat.completion.chunk" if self._chat else "text_completion", **self._common, "choices": choices}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Returns the numbers of tokens."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def event(data: dict[str, Any] | str) -> bytes:
    """Returns a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n".encode()
