"""The options of :func:`msattn.attach`, which explains them: types, checks, and vLLM's keys.

Options that the configuration also has are inherited from it.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator

from msattn.trainer.config.commands import BudgetOptions, ReadOptions
from msattn.trainer.config.schema import Flag, Instance, Sparsity, schema
from msattn.trainer.config.select import SelectConfig
from msattn.trainer.config.values import require
from msattn.trainer.methods.buckets import Router
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.selection import Selection

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
class AttachOptions(BudgetOptions):
    """Artifacts that are attached to a model, and how they are served."""

    gate: Annotated[Gate | str | Path | None, Instance(GATE)] = None
    select: Annotated[Selection | SelectConfig | Mapping | str | None, Instance(SELECT)] = None
    sparsity: Sparsity | None = None
    qmodel: Annotated[Router | str | Path | None, Instance(QMODEL)] = None
    independent: Switch = False
    strict: Switch = False
    cuda_graphs: Switch = True
    measure_recall: Switch = False
    measure_time: Switch = False

    def __post_init__(self) -> None:
        self.check_budget()


# options that vLLM and config.json also take: what is attached, and what is read
ARTIFACT_KEYS = (
    "gate",
    "select",
    "sparsity",
    "qmodel",
    *(item.name for item in fields(ReadOptions)),
)


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
