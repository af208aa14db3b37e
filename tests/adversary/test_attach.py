"""Hostile arguments of attach and enable."""

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import product
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

import msattn
from msattn.trainer.config.policies import TopK
from msattn.trainer.methods.budgets import KeyThresholds
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.gate.attn_gate import Gate, GateScores
from msattn.trainer.methods.selection import Selection
from msattn.trainer.methods.untrained.scores.quest import Quest
from tests.adversary.attached import (
    BLOCK,
    BUCKETS,
    GATE,
    LAYERS,
    ROUTED,
    ROUTER,
    SELECTED,
    attached,
    gate,
    logits,
    same,
)
from tests.adversary.tries import Tries, spread
from tests.factory import random_partition, tiny_model
from tests.methods.gate.random_gates import random_decode_gate

NUMBERS = (-1, 0, 1, 0.5, 2.5, 2**31, 10**30, math.nan, math.inf)
FORMS: dict[str, Callable[[Any], Any]] = {
    "str": str,
    "bytes": lambda x: str(x).encode(),
    "list": lambda x: [x],
    "tuple": lambda x: (x,),
    "set": lambda x: {x},
    "dict": lambda x: {"value": x},
    "bool": bool,
    "float": float,
    "complex": complex,
    "Fraction": Fraction,
    "Decimal": Decimal,
    "np.int64": np.int64,
    "np.float32": np.float32,
    "np.array": np.array,
    "torch.tensor": torch.tensor,
    "torch vector": lambda x: torch.tensor([x]),
}


@torch.no_grad()
def with_nan(module: Module) -> Module:
    """Sets the first value of each weight to NaN."""
    for weight in module.state_dict().values():
        weight.view(-1)[0] = math.nan
    return module


DECODE_GATE = random_decode_gate()
DECODE_GATE.thresholds = KeyThresholds([0.1, 0.5], [2.0, 1.0])
GATED: dict[str, Any] = {"qmodel": DECODE_GATE, "recent": 5, "dense_below": 0}
OBJECTS: dict[str, Any] = {
    "empty string": "",
    "word": "many",
    "NUL": "\0",
    "empty list": [],
    "empty dict": {},
    "object": object(),
    "np.bool": np.bool_(True),
    "gate": GATE,
    "kmeans": ROUTER,
    "gate of one layer": gate(num_hidden_layers=1),
    "gate of more heads": gate(num_attention_heads=8, num_key_value_heads=4),
    "gate of NaN": with_nan(gate()),
    "kmeans of more heads": random_partition(heads=4),
    "kmeans of other layers": random_partition(layers=(0, 7)),
    "kmeans without buckets": random_partition(0),
    "kmeans without layers": random_partition(layers=()),
    "kmeans of a layer twice": random_partition(layers=(0, 0)),
    "kmeans with fewer layers than centroids": KMeans(ROUTER.centroids, [0]),
    "kmeans in half precision": KMeans(ROUTER.centroids.half(), [0, 1]),
    "kmeans of one tensor": KMeans(ROUTER.centroids[0, 0, :, :, None], [0, 1]),
    "kmeans of NaN": with_nan(random_partition()),
    "classifier": QModel(ROUTER, 2, 8).eval(),
    "classifier of more heads": QModel(random_partition(heads=4), 4, 8).eval(),
    "decode gate": DECODE_GATE,
    "decode gate of one layer": random_decode_gate(num_hidden_layers=1),
    "decode gate of more heads": random_decode_gate(num_attention_heads=8, num_key_value_heads=4),
    "decode gate of NaN": with_nan(random_decode_gate()),
    "class of gates": Gate,
    "selection": Selection(TopK(sparsity=0.5), Quest(BLOCK)),
    "selection of one policy": Selection([TopK(sparsity=0.5)], Quest(BLOCK)),
    "selection by another gate": Selection(
        TopK(sparsity=0.5), GateScores(gate(num_hidden_layers=1))
    ),
    "selection without a policy": Selection(None, Quest(BLOCK)),  # pyrefly: ignore[bad-argument-type]
    "selection without scores": Selection(TopK(sparsity=0.5), None),  # pyrefly: ignore[bad-argument-type]
    "model": tiny_model(),
}
SWITCHES = ("strict", "cuda_graphs", "measure_recall", "measure_time")
CONTEXTS: dict[str, dict[str, Any]] = {  # the options beside the argument that is tried
    "gate": {},
    "select": {},
    "sparsity": SELECTED,
    "qmodel": {"probes": 2, "recent": 5},
    "probes": ROUTED,
    "recent": ROUTED,
    "sink": ROUTED,
    "dense_layers": ROUTED,
    "keys": GATED,
    "threshold": GATED,
    **{name: {**SELECTED, **ROUTED} for name in ("dense_below", "independent", *SWITCHES)},
}


def integer(value: Any, low: int, high: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= high


def number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


ACCEPTED: dict[str, Callable[[Any], bool]] = {  # what must be served; all else must be refused
    "gate": lambda x: x is GATE,
    "select": lambda x: x is OBJECTS["selection"],
    "sparsity": lambda x: number(x) and 0 <= x < 1,
    "qmodel": lambda x: any(x is OBJECTS[name] for name in ("kmeans", "classifier", "decode gate")),
    "probes": lambda x: integer(x, 0, BUCKETS),
    "recent": lambda x: integer(x, 1, 10**9),
    "sink": lambda x: integer(x, 0, 10**9),
    "dense_layers": lambda x: (
        isinstance(x, list | tuple | range) and all(integer(each, 0, LAYERS - 1) for each in x)
    ),
    "keys": lambda x: (
        number(x)
        and (0.1 <= x <= 0.5 or (BLOCK <= x <= BLOCK * DECODE_GATE.num_buckets and x == int(x)))
    ),
    "threshold": lambda x: number(x) and 0 < x < 1,
    "dense_below": lambda x: integer(x, 0, 10**9),
    **dict.fromkeys(("independent", *SWITCHES), lambda x: isinstance(x, bool | np.bool_)),
}


def hostile_values() -> dict[str, Any]:
    """Returns numbers, a number in each form, and objects of other kinds, by name."""
    values: dict[str, Any] = {str(value): value for value in NUMBERS}
    for (name, form), value in product(FORMS.items(), (1, 0.5)):
        values[f"{name} {value}"] = form(value)
    return values | OBJECTS


VALUES = hostile_values()


def plain(value: Any) -> Any:
    """Returns the integer, number or list that ``value`` stands for."""
    if isinstance(value, list | tuple | range):
        return [plain(each) for each in value]
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if number(value) else value


def test_arguments(tries: Tries) -> None:
    """Hostile arguments are refused, or served as the plain value is. Switches do not change the
    result.
    """
    numbers = product(CONTEXTS, map(str, NUMBERS))
    objects = product(("gate", "select", "qmodel"), OBJECTS)
    others = ((name, label) for label, name in spread(VALUES, CONTEXTS))
    for name, label in (*numbers, *objects, *others):
        value, context = VALUES[label], CONTEXTS[name]
        accepted, call = ACCEPTED[name](value), partial(attached, {**context, name: value}, logits)
        reference = context if name in SWITCHES else {**context, name: plain(value)}

        def right(found: Tensor, reference: dict[str, Any] = reference) -> bool:
            return same(found, attached(reference, logits))

        tries.python(f"{name}: {label}", call, right, accepted=accepted)


def test_models(tries: Tries) -> None:
    """Everything that is no causal language model with weights."""
    values = {name: value for name, value in VALUES.items() if name != "model"}
    with torch.device("meta"):
        values["meta"] = tiny_model()
    values |= {"none": None, "mistral with a window": tiny_model("mistral", sliding_window=8)}
    calls: dict[str, Callable[[Any], Any]] = {
        "attach": lambda value: msattn.attach(value, select="quest").__enter__(),
        "enable": lambda value: msattn.enable(value, select="quest"),
        "disable": msattn.disable,
    }
    for name, call in spread(values, calls):
        tries.python(f"{call}: {name}", partial(calls[call], values[name]))
