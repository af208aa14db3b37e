"""The options of :func:`msattn.attach`, each defined once: signature, help, checks and vLLM's keys
are derived from here.

Options that the configuration also has are inherited from it.
"""

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from pydantic import BeforeValidator

from msattn.trainer.config.commands import BudgetOptions, ReadOptions
from msattn.trainer.config.schema import Flag, Instance, Sparsity, key, schema
from msattn.trainer.config.select import SelectConfig
from msattn.trainer.config.values import nearest, require
from msattn.trainer.methods.buckets import Router
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.selection import Selection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

P = ParamSpec("P")
R = TypeVar("R")
GATE = "a gate of phase prefill, or the folder or Hub id of one"
SELECT = "a name, a dictionary, a SelectConfig or a Selection"
QMODEL = (
    "a query classifier, a decode gate, a k-means or another Router, its name, or the folder "
    "or Hub id of an artifact"
)
Switch = Annotated[
    Flag, BeforeValidator(lambda value: bool(value) if isinstance(value, np.bool_) else value)
]


@schema(kw_only=True)
class ArtifactOptions(ReadOptions):
    """The options that vLLM and ``config.json`` also take: what is attached, and what is read."""

    gate: Annotated[Gate | str | Path | None, Instance(GATE)] = key(
        "a loaded gate, its folder, the folder of its run (``outputs/tiny/base``), a Hub id, or "
        "``embedded`` (the gate that "
        "ships with the package, for the embedded model). Prompts read the blocks that ``select`` "
        "chooses from its scores.",
        default=None,
    )
    select: Annotated[Selection | SelectConfig | Mapping | str | None, Instance(SELECT)] = key(
        "how blocks are selected: a policy (``topk``), training-free scores (``quest``, which "
        "need no gate), the keys of a "
        ":class:`SelectConfig`, or an object. With a gate, None means ``calibrated``, as on the "
        "command line, or ``topk`` if "
        "the gate has no calibrated thresholds. A ``Selection`` object applies to prompts of "
        "every length.",
        default=None,
    )
    sparsity: Sparsity | None = key(
        "share of the visible blocks that is not read, for policies with this key; None: the "
        "value of ``select``, 0.5 by "
        "default.",
        default=None,
    )
    qmodel: Annotated[Router | str | Path | None, Instance(QMODEL)] = key(
        "the decoding router: a query classifier, a decode gate or a k-means, given like "
        "``gate``, or a training-free router "
        "by name (``quest``; a folder of that name is ``./quest``) or as an object. New tokens "
        "read the dense window and "
        "``probes`` buckets, or blocks of decode gates.",
        default=None,
    )


@schema(kw_only=True)
class AttachOptions(BudgetOptions, ArtifactOptions):
    """Artifacts that are attached to a model, and how they are served."""

    independent: Switch = key(
        "each query head reads its own buckets. By default a query group shares them, so that "
        "memory is read once for all "
        "heads of the group.",
        default=False,
    )
    strict: Switch = key(
        "refuse artifacts that were made for different weights of the same shape, e.g. before "
        "quantization or fine-tuning. By "
        "default these cause a warning. The adapters of PEFT models are not compared.",
        default=False,
    )
    cuda_graphs: Switch = key(
        "decode with CUDA graphs on a GPU. Passes that cannot be captured run without graphs, "
        "with a warning that says why. "
        "Prompts of small models run as graphs from the third prompt of a length on.",
        default=True,
    )
    measure_recall: Switch = key(
        "also measure the attention mass that is read, at the cost of a dense pass.", default=False
    )
    measure_time: Switch = key(
        "also measure the time of selection and of attention on the device.", default=False
    )

    def __post_init__(self) -> None:
        self.check_budget()


OPTIONS = {
    item.name: item
    for item in sorted(fields(AttachOptions), key=lambda item: hasattr(ReadOptions, item.name))
}
ARTIFACT_KEYS = tuple(name for name in OPTIONS if hasattr(ArtifactOptions, name))


def artifact_options(given: Any, where: str) -> AttachOptions:
    """Returns the options of artifacts given by a file or an engine; ``where`` begins the UserError
    for unknown names.
    """
    require(
        isinstance(given, Mapping),
        where,
        given,
        f"expected a mapping with {', '.join(ARTIFACT_KEYS)}",
    )
    for name in given:
        require(name in ARTIFACT_KEYS, where, name, f"expected {', '.join(ARTIFACT_KEYS)}")
    return AttachOptions(**given)


def takes(
    options: Callable[P, AttachOptions],
) -> Callable[
    ["Callable[[PreTrainedModel, AttachOptions], R]"],
    "Callable[Concatenate[PreTrainedModel, P], R]",
]:
    """Gives a function of a model and ``options`` the fields of ``options`` as keyword arguments,
    in signature and help.
    """

    def decorate(
        function: "Callable[[PreTrainedModel, AttachOptions], R]",
    ) -> "Callable[Concatenate[PreTrainedModel, P], R]":
        @wraps(function)
        def call(model: "PreTrainedModel", *args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs.keys() - OPTIONS.keys():
                raise TypeError(
                    f"{name}: {function.__name__} has no such option{nearest(name, OPTIONS)}"
                )
            return function(model, options(*args, **kwargs))

        signature = inspect.signature(function)
        keywords = (
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=item.default)
            for name, item in OPTIONS.items()
        )
        vars(call)["__signature__"] = signature.replace(
            parameters=[signature.parameters["model"], *keywords]
        )
        helped = (
            f"{name} : {item.metadata['help'].replace('null', 'None')}"
            for name, item in OPTIONS.items()
        )
        listed = "\n".join(textwrap.fill(each, 100, subsequent_indent="    ") for each in helped)
        call.__doc__ = inspect.cleandoc(function.__doc__ or "").replace(
            "**options : :class:`AttachOptions`.", listed
        )
        return call

    return decorate
