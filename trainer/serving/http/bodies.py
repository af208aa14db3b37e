"""The bodies of requests: what is accepted, and errors that name what is not."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from msattn.trainer.config.text_files import is_unicode
from msattn.trainer.config.values import shown
from msattn.trainer.serving.http.errors import ApiError, bad_value

MAX_STOP = 16  # stop strings
MAX_STOP_LENGTH = 1000  # characters of one

Number = Annotated[float, Field(allow_inf_nan=False)]
Zero = Annotated[Number, Field(ge=0, le=0)]
One = Annotated[int, Field(ge=1, le=1)]
Count = Annotated[int, Field(ge=1)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


@dataclass(frozen=True)
class PromptParameter:
    """Text, messages or tokens; ``param`` is the parameter that they came in."""

    param: str
    text: str | None = None
    messages: list[dict[str, str]] | None = None
    tokens: list[int] | None = None


def _read_prompt(given: Any) -> PromptParameter:
    """Returns the prompt of a completion: text, tokens, or a list of one of these."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        (given,) = given
    if given in ("", []):
        raise ValueError("it is empty; give some text")
    if isinstance(given, str):
        return PromptParameter("prompt", text=given)
    if isinstance(given, list) and all(type(token) is int and token >= 0 for token in given):
        return PromptParameter("prompt", tokens=given)
    raise ValueError("accepted is one text, or one list of tokens")


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_list(stop: Any) -> Any:
    return [] if stop is None else [stop] if isinstance(stop, str) else stop


class Strict(BaseModel):
    """An object without unknown keys, whose values are not converted to other types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """Options of a stream; ``include_usage`` adds an object with the numbers of tokens at its end."""

    include_usage: bool | None = False


class TextPart(Strict):
    """A part of a message; only text is accepted."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """A message of a conversation. ``developer`` is OpenAI's later name of ``system``."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_as_parts)]

    def plain(self) -> dict[str, str]:
        """Returns the message as chat templates take it."""
        content = "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class Body(Strict):
    """Parameters that both kinds of requests have. Those without a use are accepted with the values that ask for nothing."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    stop: Annotated[list[StopString], Field(max_length=MAX_STOP), BeforeValidator(_as_list)] = []
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    n: One | None = 1
    presence_penalty: Zero | None = 0
    frequency_penalty: Zero | None = 0


class CompletionBody(Body):
    """The body of ``/v1/completions``. A prompt may be a list of one prompt."""

    prompt: Annotated[Any, PlainValidator(_read_prompt)]
    best_of: One | None = 1
    echo: Literal[False] | None = False


class ChatBody(Body):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: Literal[False] | None = False


@dataclass(frozen=True)
class Call:
    """The parameters of a request. ``max_tokens``, ``temperature`` and ``top_p`` are None if the server's defaults apply."""

    prompt: PromptParameter
    chat: bool
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    stop: list[str]
    stream: bool
    include_usage: bool


def read_call(data: bytes, *, chat: bool, model: str) -> Call:
    """Returns what the body ``data`` asks for.

    Parameters
    ----------
    chat : the request is one to ``/v1/chat/completions``.
    model : the name of the model that is served.

    Raises
    ------
    ApiError : the body is not JSON in UTF-8, asks for another model, or a parameter is unknown, unsupported, missing, of
        another type or out of range; the message names it.
    """
    parsed = _parse(data)
    name = parsed.get("model")
    if isinstance(name, str) and name != model:
        raise ApiError(
            404, f"model={shown(name)}: no such model; this server has {model}", param="model", code="model_not_found"
        )
    try:
        body: Any = (ChatBody if chat else CompletionBody).model_validate(parsed)
    except ValidationError as error:
        raise _named(error) from error
    if body.seed is not None and body.temperature != 0:
        raise bad_value(
            "seed",
            "seed: one stream of random numbers serves all requests; leave it out, or give temperature=0, which needs none",
        )
    if body.stream_options is not None and not body.stream:
        raise bad_value("stream_options", "stream_options: accepted only with stream=true")
    max_tokens = body.max_tokens
    if chat and body.max_completion_tokens is not None:
        if max_tokens is not None:
            raise bad_value("max_tokens", "max_tokens: max_completion_tokens is given too; give one of the two")
        max_tokens = body.max_completion_tokens
    return Call(
        prompt=PromptParameter("messages", messages=[each.plain() for each in body.messages]) if chat else body.prompt,
        chat=chat,
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stop=body.stop,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
    )


def _parse(data: bytes) -> dict[str, Any]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_value(None, "the body is not UTF-8") from error
    try:
        parsed = json.loads(text)
        is_text = _is_unicode(parsed)
    except (ValueError, RecursionError) as error:  # a ValueError also for a number of thousands of digits
        raise bad_value(None, "the body is not JSON, or nested too deeply") from error
    if not isinstance(parsed, dict):
        raise bad_value(None, "the body is not a JSON object")
    if not is_text:
        raise bad_value(None, "the body holds half of a surrogate pair, which is no text")
    return parsed


def _is_unicode(value: Any) -> bool:
    """Returns False if a text in ``value`` has a code point that UTF-8 lacks, which JSON can write as an escape."""
    if isinstance(value, str):
        return is_unicode(value)
    if isinstance(value, dict):
        return all(map(_is_unicode, [*value, *value.values()]))
    return all(map(_is_unicode, value)) if isinstance(value, list) else True


def _named(error: ValidationError) -> ApiError:
    """Returns the error for the first parameter that is not accepted."""
    first = error.errors(include_url=False)[0]
    where = shown(".".join(map(str, first["loc"])))
    if first["type"] == "extra_forbidden":
        return bad_value(where, f"{where}: this parameter is not supported; leave it out", code="unsupported_parameter")
    if first["type"] == "missing":
        return bad_value(where, f"{where}: this parameter is missing", code="missing_parameter")
    value = f"={json.dumps(first['input'])}" if isinstance(first["input"], bool | int | float | None) else ""
    reason = first["msg"].removeprefix("Value error, ")
    return bad_value(where, f"{shown(where + value)}: {reason[0].lower()}{reason[1:]}")
