"""Hostile arguments of attach and enable, keys of a selection, calls out of order, and paths of
artifacts.
"""

import copy
import math
import pickle
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import product
from numbers import Integral, Real
from threading import Barrier
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
    SCORES,
    SELECTED,
    attached,
    check_restored,
    gate,
    logits,
    same,
)
from tests.adversary.tries import Tries, spread
from tests.factory import random_partition, random_tokens, tiny_model
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
    numbers, objects = (
        product(CONTEXTS, map(str, NUMBERS)),
        product(("gate", "select", "qmodel"), OBJECTS),
    )
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


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.deepcopy,
    "shallow copy": copy.copy,
    "pickle": pickle.dumps,
}
STEPS = ("enter", "leave", "enable", "disable", "run", *COPIES, "compile", "tokens", "wrong")


def test_calls_out_of_order(tries: Tries) -> None:
    """Random sequences of calls: attach and enable exclude each other, and results are sparse
    exactly while attached.
    """
    base, ids = tiny_model(), random_tokens(1, 200)

    def run() -> Tensor:
        with torch.no_grad():
            return base(ids).logits

    results = {False: run(), True: attached({"select": SCORES}, lambda _: run(), base)}
    for seed in range(10):
        steps, context, enabled = random.Random(seed).choices(STEPS, k=8), None, False
        for number, step in enumerate(steps):
            case, on = f"{' '.join(steps[:number])} | {step}", context is not None or enabled
            if step in ("enter", "enable", "wrong"):
                entering = msattn.attach(base, select=SCORES)
                calls: dict[str, Callable[[], Any]] = {
                    "enter": entering.__enter__,
                    "enable": lambda: msattn.enable(base, select=SCORES),
                    "wrong": lambda: msattn.enable(base, select=SCORES, probes=2),
                }
                possible = not on and step != "wrong"
                tries.python(case, calls[step], lambda sparse: True, accepted=possible)
                if possible:
                    context, enabled = (entering, False) if step == "enter" else (None, True)
            elif step == "disable":
                off = partial(msattn.disable, base)
                tries.python(case, off, lambda nothing: True, accepted=enabled)
                enabled = False
            elif step == "leave":
                if context is not None:
                    context.__exit__(None, None, None)
                    context = None
            elif step in COPIES:
                twin = partial(COPIES[step], base)
                tries.python(case, twin, lambda found: True, accepted=not on)
            else:
                tries.python(
                    case, run, lambda found, on=on: torch.equal(found, results[on]), accepted=True
                )
        if context is not None:
            context.__exit__(None, None, None)
        if enabled:
            msattn.disable(base)
        check_restored(base)


def test_threads_that_attach_at_once(tries: Tries) -> None:
    """Exactly one of several threads attaches the model, the others are refused, and it is restored
    afterwards.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for case in range(3):
            base, start, done = tiny_model(), Barrier(4), Barrier(4)

            def attach(base: Any = base, start: Barrier = start, done: Barrier = done) -> str:
                start.wait()
                try:
                    with msattn.attach(base, select=SCORES):
                        done.wait()
                        return "attached"
                except msattn.UserError:
                    done.wait()
                    return "refused"

            with ThreadPoolExecutor(4) as pool:
                ends = sorted(future.result() for future in [pool.submit(attach) for _ in range(4)])
            fault = None if ends == ["attached", "refused", "refused", "refused"] else str(ends)
            tries.record(f"threads, round {case}", fault)
            check_restored(base)
    finally:
        sys.setswitchinterval(interval)
