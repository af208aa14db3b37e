"""Schemas of the configuration: frozen dataclasses of pydantic.

A field states type, accepted values, default and help once. Types are strict: ``'1'`` is no number
and 1 is not true. Only integers may stand for text, and for other numbers.
"""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)

from annotated_types import Interval, MinLen
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    Strict,
    ValidationError,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass

from msattn.trainer.config.values import DTYPES, UNPRINTABLE, nearest, power_of_two, shown
from msattn.trainer.errors import UserError

Config = TypeVar("Config")


def _number(value: Any) -> Any:
    """Returns numbers of other libraries, such as NumPy's, as Python's; raises ValueError for other
    values, also tensors.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError("no number")
    return int(value) if isinstance(value, Integral) else float(value)


def _text(value: Any) -> Any:
    """Returns an integer as text; raises ValueError for control characters."""
    if isinstance(value, str) and UNPRINTABLE.search(value):
        raise ValueError("control characters")
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _power_of_two(value: int) -> int:
    if not power_of_two(value):
        raise ValueError("no power of two")
    return value


@dataclass(frozen=True)
class OneOf:
    """Annotates text that is one of ``choices``, which ``--help`` and the shell's completion
    show.
    """

    choices: Collection[str]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return AfterValidator(self._check).__get_pydantic_core_schema__(source, handler)

    def _check(self, value: str) -> str:
        if value not in self.choices:
            raise ValueError("another choice")
        return value


@dataclass(frozen=True)
class Instance:
    """Annotates objects of the annotated types, which messages call ``words``."""

    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        def check(value: Any) -> Any:
            if not isinstance(value, source):
                raise ValueError("another type")
            return value

        return PlainValidator(check).__get_pydantic_core_schema__(Any, handler)


Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict(), BeforeValidator(_text)]
Int = Annotated[int, Strict(), BeforeValidator(_number)]
Number = Annotated[float, Strict(), BeforeValidator(_number)]
Count = Annotated[Int, Interval(ge=1, le=10**6)]
CountOrZero = Annotated[Int, Interval(ge=0, le=10**6)]
Samples = Annotated[Int, Interval(ge=1, le=10**4)]
Steps = Annotated[Int, Interval(ge=1, le=10**7)]
Tokens = Annotated[Int, Interval(ge=1, le=10**9)]
TokensOrZero = Annotated[Int, Interval(ge=0, le=10**9)]
Share = Annotated[Number, Interval(ge=0, le=1)]
Sparsity = Annotated[Number, Interval(ge=0, lt=1)]
ShareOfKeys = Annotated[Number, Interval(ge=0.001, le=0.5)]
Seed = Annotated[Int, Interval(ge=0, le=2**32 - 1)]
BlockSize = Annotated[Int, Interval(ge=16, le=128), AfterValidator(_power_of_two)]
# For type checkers every sequence; pydantic makes lists of tuples, ranges and arrays.
Layers = Sequence[int] if TYPE_CHECKING else list[CountOrZero]
DType = Annotated[Text, OneOf(DTYPES)]
DTYPE = "auto (bfloat16 on CUDA, float32 on CPU), float32, float16 or bfloat16"


def key(text: str, *, default: Any = dataclasses.MISSING) -> Any:
    """Returns a dataclass field with the ``text`` of ``--help`` and its default, of which each
    instance gets a copy.
    """
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata={"help": text})
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass_transform(frozen_default=True, field_specifiers=(key, dataclasses.field))
def schema(prefix: str = "", *, kw_only: bool = False) -> Callable[[type[Config]], type[Config]]:
    """Makes a class a frozen dataclass that checks its values; their keys in error messages begin
    with ``prefix``.

    The dataclass raises UserError for an unknown key, a missing value, or one of another type or
    out of range.
    """

    def decorate(cls: type[Config]) -> type[Config]:
        made: Any = pydantic_dataclass(
            frozen=True, kw_only=kw_only, config=ConfigDict(extra="forbid")
        )(cls)
        helped = [
            f"{item.name} : {item.metadata['help']}"
            for item in fields(made)
            if "help" in item.metadata
        ]
        made.__doc__ = "\n".join(
            [f"{inspect.cleandoc(cls.__doc__ or '')}\n", "Attributes", "----------", *helped]
        )
        signature = inspect.signature(made)  # without annotations, whose validators fill a screen
        plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
        made.__signature__ = signature.replace(parameters=plain)
        validated = made.__init__

        def init(self: Any, /, *args: Any, **keys: Any) -> None:
            try:
                validated(self, *args, **keys)
            except ValidationError as error:
                names = [item.name for item in fields(made)]
                raise UserError(
                    one_line(error, made, dict(zip(names, args, strict=False)) | keys, prefix)
                ) from error

        made.__init__ = init
        return made

    return decorate


def one_line(
    error: ValidationError, kind: Any, values: Any, prefix: str = "", known: Collection[str] = ()
) -> str:
    """Returns the first error that pydantic found as one line with the key, its value and the
    accepted values.

    ``kind`` is the dataclass that ``values`` do not fit. An unknown key is compared with ``known``,
    by default its keys.
    """
    first = error.errors(include_url=False)[0]
    names = [item.name for item in fields(kind)]  # positional arguments have numbers
    path = [
        each if isinstance(each, str) else names[each] if each < len(names) else str(each)
        for each in first["loc"]
    ]
    value = first["input"]
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, UserError):
        return str(raised)
    for depth, part in enumerate(path):
        if not is_dataclass(kind):  # an item of a list, or a type of a union
            path, value = path[:depth], values
            break
        accepts = {item.name: item.type for item in fields(kind)}
        known = known or [prefix + ".".join([*path[:depth], name]) for name in accepts]
        kind = accepts.get(part)
        values = values.get(part) if isinstance(values, Mapping) else getattr(values, part, None)
    name = prefix + ".".join(path)
    match first["type"]:
        case "missing":
            return f"{name}=???: a value is needed"
        case "unexpected_keyword_argument":
            return f"unknown key {shown(name)}{nearest(name, known)}"
        case "dataclass_type":
            return f"{name}={shown(value)}: this is a section; set its keys as in section.key=value"
    base, choices = kind.__origin__ if get_origin(kind) is Annotated else kind, choices_of(kind)
    is_item = isinstance(value, int | float) or value in choices
    written = f"; written as {name}=[{value}]" if get_origin(base) is list and is_item else ""
    if choices:
        value = (
            next((each for each in value if each not in choices), value)
            if isinstance(value, list)
            else value
        )
    # for tensors and modules
    text = repr(value) if "\n" not in repr(value) else type(value).__name__
    wrong = value if len(choices) > 1 else text
    return (
        f"{name}={shown(wrong)}: expected {accepted(kind)}{written or nearest(str(value), choices)}"
    )


def choices_of(kind: Any) -> tuple[str, ...]:
    """Returns the choices of an annotation, or of the items of an annotated list; none if they are
    not enumerated.
    """
    choices = [
        mark.choices for mark in getattr(kind, "__metadata__", ()) if isinstance(mark, OneOf)
    ]
    return (
        tuple(choices[0])
        if choices
        else tuple(each for inner in get_args(kind) for each in choices_of(inner))
    )


def accepted(kind: Any) -> str:
    """Returns the values that an annotation accepts, in words."""
    if get_origin(kind) in (Union, UnionType):
        return ", or ".join(map(accepted, get_args(kind)))
    base, marks = (
        (kind.__origin__, kind.__metadata__) if get_origin(kind) is Annotated else (kind, ())
    )
    if get_origin(base) is list:
        some = "one or more" if any(isinstance(mark, MinLen) for mark in marks) else "a list"
        return (
            f"{some} of {accepted(get_args(base)[0])}"
            if choices_of(base)
            else f"{some}, each {accepted(get_args(base)[0])}"
        )
    names = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        dict: "a mapping",
        NoneType: "null",
    }
    text = names.get(get_origin(base) or base, "text without control characters")
    for mark in marks:
        if isinstance(mark, OneOf):
            text = ", ".join(mark.choices)
        elif isinstance(mark, Instance):
            text = mark.words
        elif isinstance(mark, Interval):
            low = ("[", mark.ge) if mark.gt is None else ("(", mark.gt)
            high = ("]", mark.le) if mark.lt is None else (")", mark.lt)
            text += f" in {low[0]}{_bound(low[1])}, {_bound(high[1])}{high[0]}"
        elif isinstance(mark, AfterValidator) and mark.func is _power_of_two:
            text = text.replace("an integer", "a power of two")
    return text


def _bound(number: Any) -> str:
    short = f"{number:g}".replace("e+0", "e")
    return short if float(short) == number else str(number)
