"""Request bodies: accepted parameters, and errors that name rejected ones."""

import json
import re
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from msattn.trainer.config.values import shown
from msattn.trainer.serving.engines.http.answers import ApiError
from msattn.trainer.serving.engines.http.sampling import MAX_LOGPROBS

MAX_CHOICES = 16  # answers to one request
MAX_STOP = 16  # stop strings
MAX_STOP_LENGTH = 1000  # characters of one
EMPTY = (None, "", [], {})  # values of parameters that count as left out
# values allowed in a body besides a value per prompt token; each takes up to hundreds of bytes of
# memory
OTHER_VALUES = 1000
# a string, or a sign of one more value
STRING_OR_MORE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|([,\[{])', re.DOTALL)

Finite = Annotated[float, Field(allow_inf_nan=False)]
Penalty = Annotated[Finite, Field(ge=-2, le=2)]
Token = Annotated[int, Field(ge=0)]
Bias = Annotated[Finite, Field(ge=-100, le=100)]
One = Annotated[int, Field(ge=1, le=1)]
Count = Annotated[int, Field(ge=1)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


def _one_prompt(given: Any) -> str | list[int]:
    """Returns the prompt of a completion: text, tokens, or a list of one of these."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        (given,) = given
    if given in ("", []):
        raise ValueError("it is empty; give some text")
    if isinstance(given, str) or (
        isinstance(given, list) and all(type(token) is int and token >= 0 for token in given)
    ):
        return given
    raise ValueError("expected one text, or one list of tokens")


def _as_list(stop: Any) -> Any:
    return [] if stop in EMPTY else [stop] if isinstance(stop, str) else stop


def _none_if_empty(given: Any) -> Any:
    return None if given in EMPTY else given


class NotAccepted(ValueError):
    """The reason why a parameter is not accepted, with a code for programs."""

    def __init__(self, reason: str, code: str) -> None:
        super().__init__(reason)
        self.code = code


def _no_value(given: Any) -> Any:
    if given not in EMPTY:
        raise NotAccepted("this parameter is not supported; leave it out", "unsupported_parameter")
    return given


class Strict(BaseModel):
    """An object whose values are not converted to other types, and whose unknown keys have no
    value: null or empty.
    """

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, Annotated[Any, PlainValidator(_no_value)]]  # pyrefly: ignore[bad-override-mutable-attribute]


class StreamOptions(Strict):
    """Options of a stream; ``include_usage`` adds an object with the numbers of tokens at its
    end.
    """

    include_usage: bool | None = False


class TextPart(Strict):
    """A part of a message; only text is accepted."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """A message of a conversation. ``developer`` is OpenAI's later name of ``system``."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], Field(default=None, fail_fast=True, validate_default=True)]

    @field_validator("content", mode="before")
    @classmethod
    def _as_parts(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role") != "assistant":
            raise NotAccepted("this parameter is missing", "missing_parameter")
        return (
            []
            if content is None
            else [{"type": "text", "text": content}]
            if isinstance(content, str)
            else content
        )

    def plain(self) -> dict[str, str]:
        """Returns the message as chat templates take it."""
        content = "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class JsonSchema(Strict):
    """A JSON schema of answers. ``name``, ``description`` and ``strict`` have no effect; answers
    always follow the schema.
    """

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of answers: any text, a JSON object, or what a JSON schema describes."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JsonSchema | None, BeforeValidator(_none_if_empty)] = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is for type=json_schema, which needs it")
        return self


class Body(Strict):
    """Parameters of both kinds of requests. Unsupported ones are accepted only with values that
    have no effect.
    """

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    stop: Annotated[list[StopString], Field(max_length=MAX_STOP), BeforeValidator(_as_list)] = []
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # 0 and -1: all
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = 0
    frequency_penalty: Penalty | None = 0
    logit_bias: dict[Token, Bias] | None = None
    response_format: Annotated[ResponseFormat | None, BeforeValidator(_none_if_empty)] = None
    ignore_eos: bool | None = False
    store: Literal[False] | None = False

    @field_validator("ignore_eos")
    @classmethod
    def _not_with_a_schema(cls, ignored: bool | None, info: ValidationInfo) -> bool | None:
        form = info.data.get("response_format")
        if ignored and form is not None and form.type != "text":
            raise ValueError(
                "an answer ends where its response_format does; leave one of the two out"
            )
        return ignored

    @field_validator("stream_options")
    @classmethod
    def _only_in_streams(
        cls, options: StreamOptions | None, info: ValidationInfo
    ) -> StreamOptions | None:
        if options is not None and options.include_usage and not info.data.get("stream"):
            raise ValueError("accepted only with stream=true")
        return options

    @property
    def new_tokens(self) -> int | None:
        """The greatest number of new tokens; None stands for the server's default."""
        return self.max_tokens

    @property
    def number_of_logprobs(self) -> int | None:
        """The number of most likely tokens whose log-probabilities are returned per token; None
        without log-probabilities.
        """
        raise NotImplementedError

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema that answers follow; None for any text."""
        form = self.response_format
        if form is None or form.type == "text":
            return None
        return {"type": "object"} if form.json_schema is None else form.json_schema.schema_

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionBody(Body):
    """The body of ``/v1/completions``. A prompt may be a list of one prompt."""

    prompt: Annotated[str | list[int], PlainValidator(_one_prompt)]
    best_of: One | None = 1
    echo: Literal[False] | None = False
    logprobs: Alternatives | None = None

    @property
    def number_of_logprobs(self) -> int | None:
        return self.logprobs


class ChatBody(Body):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Alternatives | None = None

    @field_validator("max_completion_tokens")
    @classmethod
    def _only_one_limit(cls, tokens: int | None, info: ValidationInfo) -> int | None:
        if tokens is not None and info.data.get("max_tokens") is not None:
            raise ValueError("max_tokens is given too; give one of the two")
        return tokens

    @field_validator("top_logprobs")
    @classmethod
    def _only_with_logprobs(cls, number: int | None, info: ValidationInfo) -> int | None:
        if number and not info.data.get("logprobs"):
            raise ValueError("accepted only with logprobs=true")
        return number

    @property
    def new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def number_of_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def read_body(data: bytes | bytearray, kind: type[Body], model: str, longest: int) -> Body:
    """Returns the parsed body ``data``.

    Raises ApiError if it is not JSON in UTF-8, has more values than a list of ``longest`` tokens
    needs, or asks for another ``model``; or if a parameter, which the message names, is unknown,
    unsupported, missing, of the wrong type or out of range.
    """
    most = longest + OTHER_VALUES
    more = (match for match in STRING_OR_MORE.finditer(data) if match.lastindex)
    if next(islice(more, most, None), None) is not None:
        message = f"the body: more than {most} values exceed the {longest} tokens of a request"
        raise ApiError(400, message, code="context_length_exceeded")
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise _named(error) from error
    if body.model != model:
        message = f"model={shown(body.model)}: no such model; this server has {model}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return body


def _named(error: ValidationError) -> ApiError:
    """Returns the error for the first parameter that is not accepted."""
    first = error.errors(include_url=False)[0]
    where = shown(".".join(map(str, first["loc"]))) or None
    if first["type"] == "missing":
        message, code = f"{where}: this parameter is missing", "missing_parameter"
    else:
        value = (
            f"={json.dumps(first['input'])}"
            if isinstance(first["input"], bool | int | float | None)
            else ""
        )
        reason = first["msg"].removeprefix("Value error, ")
        message = f"{shown((where or 'the body') + value)}: {reason[0].lower()}{reason[1:]}"
        code = getattr(first.get("ctx", {}).get("error"), "code", None)
    return ApiError(400, message, param=where, code=code)
