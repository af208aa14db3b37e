"""The options of :func:`msattn.attach`, each defined once: its signature, help and checks, and vLLM's keys, are read from here.

Those that the configuration has too are inherited from it.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial, wraps
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from msattn.trainer.config import ReadOptions, SelectConfig
from msattn.trainer.config.values import has_type, nearest, require
from msattn.trainer.errors import UserError
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from msattn.trainer.methods.selection import Selection
from msattn.trainer.serving.loading import AnyRouter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

P = ParamSpec("P")
R = TypeVar("R")
ACCEPTED = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    Sequence: "a sequence of integers",
    Gate: "a gate, or the folder or Hub id of one",
    Selection: "a name, a dictionary, a SelectConfig or a Selection",
    QModel: "a query classifier, a decode gate or a k-means, or the folder or Hub id of one",
}


_here = partial(field, metadata={"vllm": False})  # a field of an option that vLLM does not take


@dataclass(frozen=True, kw_only=True)
class AttachOptions(ReadOptions):
    """Artifacts that are attached to a model, and how they are served.

    Attributes
    ----------
    gate : a loaded gate, its folder, that of its run (``outputs/tiny/base``), a Hub id, or ``embedded`` (the gate that ships
        with the package, for the embedded model). Prompts read the blocks that ``select`` chooses from its scores.
    select : how blocks are selected: a policy (``topk``), the scores of a baseline (``quest``, which needs no gate), the keys
        of a :class:`SelectConfig`, or an object. None with a gate is ``calibrated``, as on the command line, or ``topk`` if the
        gate has no calibrated thresholds. A ``Selection`` object applies to prompts of every length.
    sparsity : share of the visible blocks that is not read, for policies that have it; None stands for that of ``select``,
        0.5 by default.
    qmodel : the router of decoding: a query classifier, a decode gate or a k-means, given in the same ways, or a router without
        training, such as ``QuestBlocks``. New tokens read the dense window and ``probes`` buckets, of decode gates blocks;
        there ``keys`` may be a number of keys, read in as many whole blocks as it holds.
    threshold : instead of ``probes``, the probability from which a decode gate reads a block, among those before the window.
    independent : each query head visits buckets of its own. By default a query group shares them, as memory is read once for
        all of its heads.
    strict : refuse artifacts that were made for other weights of the same shape, e.g. before quantization or fine-tuning.
        By default they are served with a warning. The adapters of PEFT models are not compared.
    cuda_graphs : decode with CUDA graphs on a GPU. What cannot be captured runs without, with a warning that says why.
    measure_recall : also measures the attention mass that is read, at the cost of a dense pass.
    measure_time : also measures the time of selection and of attention on the device.

    Raises
    ------
    UserError : an option has another type, or is a gate of the other phase.
    """

    gate: Gate | str | Path | None = None
    select: Selection | SelectConfig | Mapping[str, Any] | str | None = None
    sparsity: float | None = None
    qmodel: AnyRouter | str | Path | None = None
    dense_layers: Sequence[int] | None = None  # pyrefly: ignore[bad-override]  # YAML has lists alone
    threshold: float | None = _here(default=None)
    independent: bool = _here(default=False)
    strict: bool = _here(default=False)
    cuda_graphs: bool = _here(default=True)
    measure_recall: bool = _here(default=False)
    measure_time: bool = _here(default=False)

    def __post_init__(self) -> None:
        for name, gates, other, phase in (("gate", DecodeGate, "qmodel", "decode"), ("qmodel", Gate, "gate", "prefill")):
            if isinstance(getattr(self, name), gates):
                raise UserError(f"{name}: these are gates with gate.phase={phase}; give them as {other}=")
        for item in fields(self):
            value, kinds = getattr(self, item.name), _kinds(TYPES[item.name])
            require(_is_one_of(value, kinds), item.name, repr(value), f"accepted is {ACCEPTED[kinds[0]]}")


def _kinds(annotated: Any) -> list[Any]:
    """Returns the types of an annotation, without parameters."""
    several = get_args(annotated) if get_origin(annotated) in (Union, UnionType) else [annotated]
    return [get_origin(each) or each for each in several]


def _is_one_of(value: Any, kinds: Sequence[Any]) -> bool:
    """Returns whether ``value`` has one of some types; sequences and truth values may be those of numpy."""
    if isinstance(value, np.bool_):
        return bool in kinds
    if Sequence in kinds and value is not None:
        plain = value.tolist() if isinstance(value, np.ndarray) else value
        return isinstance(plain, range) or has_type(plain, list[int])
    return any(has_type(value, each) for each in kinds)


def _as_written(name: str) -> str:
    """Returns the type of an option as code has it, e.g. ``Gate | str | Path | None``."""
    without_modules = re.sub(r"(\w+\.)+", "", inspect.formatannotation(TYPES[name]))
    return re.sub(r"Optional\[(\w+)\]", r"\1 | None", without_modules)


TYPES = get_type_hints(AttachOptions)  # without the constraints of the configuration
READ_OPTIONS = {item.name for item in fields(ReadOptions)}
VLLM_KEYS = tuple(item.name for item in fields(AttachOptions) if item.metadata.get("vllm", True))


def takes(
    options: Callable[P, AttachOptions],
) -> "Callable[[Callable[[PreTrainedModel, AttachOptions], R]], Callable[Concatenate[PreTrainedModel, P], R]]":
    """Gives a function of a model and ``options`` the fields of these as keyword arguments.

    ``help`` shows ``__signature__`` and ``__doc__``. Both are put together here from the fields and their help, so that
    ``attach``, ``enable`` and the command line cannot differ.
    """

    def decorate(function: "Callable[[PreTrainedModel, AttachOptions], R]") -> "Callable[Concatenate[PreTrainedModel, P], R]":
        @wraps(function)
        def call(model: "PreTrainedModel", *args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs.keys() - TYPES.keys():
                raise TypeError(f"{name}: {function.__name__} has no such option{nearest(name, TYPES)}")
            return function(model, options(*args, **kwargs))

        signature, documented = inspect.signature(function), (AttachOptions, ReadOptions)
        keywords = [
            inspect.Parameter(
                item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=_as_written(item.name)
            )
            for item in sorted(fields(AttachOptions), key=lambda item: item.name in READ_OPTIONS)  # what is attached first
        ]
        parameters = [signature.parameters["model"], *keywords]
        vars(call)["__signature__"] = signature.replace(parameters=parameters)
        fields_help = [inspect.cleandoc(each.__doc__ or "").partition("---\n")[2].partition("\n\n")[0] for each in documented]
        listed = "\n".join(fields_help).replace("null", "None")  # as YAML calls it
        call.__doc__ = inspect.cleandoc(function.__doc__ or "").replace("**options : :class:`AttachOptions`.", listed)
        return call

    return decorate
