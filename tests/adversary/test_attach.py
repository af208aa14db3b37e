"""Hostile arguments of attach and enable, keys of a selection, calls out of order, and paths of artifacts."""

import copy
import math
import os
import pickle
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import product
from numbers import Integral, Real
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Module

import msattn
from msattn.trainer.config.select import POLICIES, keys_of
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.gate.attn_gate import Gate, GateScores
from msattn.trainer.methods.policies import TopK
from msattn.trainer.methods.selection import Selection
from msattn.trainer.methods.untrained.quest import Quest
from msattn.trainer.serving.loading import load_router
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
    model,
    partition,
    same,
)
from tests.adversary.tries import Tries
from tests.factory import random_tokens, tiny_config, tiny_model
from tests.methods.gate.test_decode_gate import random_decode_gate

pytestmark = pytest.mark.area("attach from Python")

NUMBERS = (-1, 0, 1, 0.5, 2.5, 2**31, 10**30, math.nan, math.inf)
FORMS: dict[str, Callable[[Any], Any]] = {
    "": lambda x: x,
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
def filled_with(module: Module, value: float) -> Module:
    """Sets the first value of each weight."""
    for weight in module.state_dict().values():
        weight.view(-1)[0] = value
    return module


DECODE_GATE = random_decode_gate()
DECODE_GATE.thresholds = {"shares": [0.1, 0.5], "densities": [2.0, 1.0]}
GATED: dict[str, Any] = {"qmodel": DECODE_GATE, "recent": 5, "dense_below": 0}
OBJECTS: dict[str, Any] = {
    "empty string": "",
    "word": "many",
    "NUL": "\0",
    "two lines": "one\ntwo",
    "empty list": [],
    "empty dict": {},
    "range": range(5),
    "two bytes": b"\0\1",
    "object": object(),
    "class": int,
    "function": len,
    "ellipsis": ...,
    "np.bool": np.bool_(True),
    "config": tiny_config(),
    "linear": torch.nn.Linear(2, 2),
    "gate": GATE,
    "kmeans": ROUTER,
    "gate of four layers": gate(num_hidden_layers=4),
    "gate of one layer": gate(num_hidden_layers=1),
    "gate of more heads": gate(num_attention_heads=8, num_key_value_heads=4),
    "gate of larger heads": gate(head_dim=32),
    "gate of NaN": filled_with(gate(), math.nan),
    "kmeans of more heads": partition(heads=4),
    "kmeans of larger heads": partition(size=32),
    "kmeans of other layers": partition(layers=(0, 7)),
    "kmeans of negative layers": partition(layers=(-1, 0)),
    "kmeans without buckets": partition(buckets=0),
    "kmeans without layers": partition(layers=()),
    "kmeans of a layer twice": partition(layers=(0, 0)),
    "kmeans with fewer layers than centroids": KMeans(ROUTER.centroids, [0]),
    "kmeans in half precision": KMeans(ROUTER.centroids.half(), [0, 1]),
    "kmeans of one tensor": KMeans(ROUTER.centroids[0, 0, :, :, None], [0, 1]),
    "kmeans of NaN": filled_with(partition(), math.nan),
    "kmeans of infinity": filled_with(partition(), math.inf),
    "classifier": QModel(ROUTER, 2, 8).eval(),
    "classifier of NaN": filled_with(QModel(partition(), 2, 8).eval(), math.nan),
    "classifier of more heads": QModel(partition(heads=4), 4, 8).eval(),
    "decode gate": DECODE_GATE,
    "decode gate of one layer": random_decode_gate(num_hidden_layers=1),
    "decode gate of more heads": random_decode_gate(num_attention_heads=8, num_key_value_heads=4),
    "decode gate of larger heads": random_decode_gate(head_dim=32),
    "decode gate of NaN": filled_with(random_decode_gate(), math.nan),
    "class of gates": Gate,
    "class of k-means": KMeans,
    "selection": Selection(TopK(0.5), Quest(BLOCK)),
    "selection of one policy": Selection([TopK(0.5)], Quest(BLOCK)),
    "selection of three policies": Selection([TopK(0.5)] * 3, Quest(BLOCK)),
    "selection by another gate": Selection(TopK(0.5), GateScores(gate(num_hidden_layers=1))),
    "selection without a policy": Selection(None, Quest(BLOCK)),  # pyrefly: ignore[bad-argument-type]
    "selection without scores": Selection(TopK(0.5), None),  # pyrefly: ignore[bad-argument-type]
    "selection of names": Selection("topk", "quest"),  # pyrefly: ignore[bad-argument-type]
    "model": tiny_model(),
    "class of models": type(model()),
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


def integer(value: Any, low: int, high: float = math.inf) -> bool:
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
    "dense_layers": lambda x: isinstance(x, list | tuple | range) and all(integer(each, 0, LAYERS - 1) for each in x),
    "keys": lambda x: number(x) and (0.1 <= x <= 0.5 or (BLOCK <= x <= BLOCK * DECODE_GATE.num_buckets and x == int(x))),
    "threshold": lambda x: number(x) and 0 < x < 1,
    "dense_below": lambda x: integer(x, 0),
    **dict.fromkeys(("independent", *SWITCHES), lambda x: isinstance(x, bool | np.bool_)),
}


def hostile_values() -> dict[str, Any]:
    """Returns numbers in many forms, and objects of other kinds, by name."""
    values: dict[str, Any] = {}
    for (name, form), value in product(FORMS.items(), NUMBERS):
        try:
            values[f"{name} {value}"] = form(value)
        except (ValueError, OverflowError, RuntimeError, TypeError):
            continue  # there is no such value
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
    """Each argument with each value: refused, or served as the plain value is. Switches do not change the result."""
    for name, label in tries.chosen(product(CONTEXTS, VALUES)):
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
    for name, call in tries.chosen(product(values, calls)):
        tries.python(f"{call}: {name}", partial(calls[call], values[name]))


KEYS: dict[str, Callable[[Any], bool]] = {  # accepted values of the keys of a selection
    "policy": lambda x: isinstance(x, str) and x in POLICIES,
    "scores": lambda x: isinstance(x, str) and x in ("oracle", "random", "sink_local", "mean_pool", "quest"),
    "sink_blocks": lambda x: x is None or integer(x, 0, 10**9),
    "local_blocks": lambda x: x is None or integer(x, 0, 10**9),
    "dense_queries": lambda x: integer(x, 0, 10**9),
    "dense_below": lambda x: integer(x, 0, 10**9) or (isinstance(x, str) and x == "auto"),
    "block_size": lambda x: integer(x, 16, 128) and x in (16, 32, 64, 128),
    "seed": lambda x: integer(x, 0, 2**32 - 1),
    "sparsity": lambda x: number(x) and 0 <= x < 1,
    "threshold": lambda x: number(x) and 0 <= x < 1,
    "mass": lambda x: number(x) and 0 < x <= 1,
    "tokens": lambda x: integer(x, 1, 10**9),
    "shares": lambda x: False,
}
SHARES = (
    [0.1, 0.1, 0.2], [0.1] * 5, [0.0] * 4, [-0.1, 0.5, 0.2, 0.2], [0.5] * 4, [math.nan] * 4, [0.1, 0.1, math.nan, 0.1],
    [math.inf, 0, 0, 0], ["0.1"] * 4, [True, False, False, False], [[0.1]] * 4, "0.25", {0.1, 0.2, 0.3, 0.15}, None,
    dict.fromkeys((0.1, 0.2, 0.3, 0.15)), np.full(4, 0.1), torch.full((4,), 0.1), [1j, 0, 0, 0], [torch.tensor(0.1)] * 4,
)  # fmt: skip
FOREIGN = (
    "sparsty",
    "Sparsity",
    "",
    "select",
    "self",
    "cls",
    "kind",
    "_",
    "__class__",
    "select.sparsity",
    3,
    None,
    ("sparsity",),
)


def selections() -> list[tuple[str, Any, Any]]:
    """Returns policy, key and value: keys with hostile values, misspelled keys, those of other policies and of other types."""
    drawn, names = random.Random(0), sorted(VALUES)
    policies = {name: keys_of(kind) for name, kind in POLICIES.items() if name != "calibrated"}
    cases: list[tuple[str, Any, Any]] = [
        (policy, key, VALUES[name]) for policy, keys in policies.items() for key in keys for name in drawn.sample(names, 12)
    ]
    cases += [("topk", "policy", VALUES[name]) for name in drawn.sample(names, 20)]
    cases += [("multiscale", "shares", shares) for shares in SHARES]
    return cases + [(policy, key, 0.5) for policy, keys in policies.items() for key in (*FOREIGN, *KEYS) if key not in keys]


def selection(form: str, policy: str, key: Any, value: Any) -> Any:
    """Returns a selection that describes itself in one of three ways."""
    given = {"policy": policy, **SCORES}
    if form == "mapping":
        return {**given, key: value}
    return (
        replace(msattn.SelectConfig(**given), **{key: value})
        if form == "replace"
        else msattn.SelectConfig(**{**given, key: value})
    )


def test_selections(tries: Tries) -> None:
    for form, (policy, key, value) in tries.chosen(product(("mapping", "constructor", "replace"), selections())):
        own = key in ("policy", *keys_of(POLICIES[policy]))
        if form != "mapping" and not own:
            continue  # Python's own TypeError
        accepted = own and KEYS[key](value)

        def call(form: str = form, policy: str = policy, key: Any = key, value: Any = value) -> Tensor:
            return attached({"select": selection(form, policy, key, value)}, logits)

        def right(found: Tensor, reference: Callable[..., Tensor] = call, value: Any = value) -> bool:
            return same(found, reference(form="mapping", value=plain(value)))

        tries.python(f"{form} {policy}: {key!r}={value!r:.60}", call, right, accepted=accepted)


STEPS = ("enter", "leave", "enable", "disable", "run", "copy", "pickle", "compile", "tokens", "wrong")


def test_calls_out_of_order(tries: Tries) -> None:
    """Random sequences of calls: attach and enable exclude each other, and results are sparse exactly while attached."""
    base, ids = tiny_model(), random_tokens(1, 200)

    def run() -> Tensor:
        with torch.no_grad():
            return base(ids).logits

    results = {False: run(), True: attached({"select": SCORES}, lambda _: run(), base)}
    for seed in tries.chosen(range(150)):
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
            elif step in ("copy", "pickle"):
                twin = partial(copy.deepcopy, base) if step == "copy" else partial(pickle.dumps, base)
                tries.python(case, twin, lambda found: True, accepted=not on)
            else:
                tries.python(case, run, lambda found, on=on: torch.equal(found, results[on]), accepted=True)
        if context is not None:
            context.__exit__(None, None, None)
        if enabled:
            msattn.disable(base)
        check_restored(base)


def test_threads_that_attach_at_once(tries: Tries) -> None:
    """Exactly one of several threads attaches the model, the others are refused, and it is restored afterwards."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for case in tries.chosen(range(25)):
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


LOADERS: dict[str, Callable[[Any], Any]] = {
    "load": msattn.load,
    "Gate.load": Gate.load,
    "KMeans.load": KMeans.load,
    "QModel.load": QModel.load,
    "load_router": load_router,
    "gate=": lambda path: attached({"gate": path}, logits),
    "qmodel=": lambda path: attached({"qmodel": path}, logits),
}
PATHS = (
    "", ".", "..", "/", "/dev/null", "/proc/self", "~", "~nobody-of-this-name/gate", "\0", "gate\0", "one\ntwo", "a" * 300,
    "a" * 5000, "\udcff", "C:\\gate", "file:///gate", "https://example.org/gate", "./missing", "../missing", "a/b/c", "--help",
    "*", "$HOME", "file", "empty", "dangling", "circle", "folder", "folder/manifest.json", "EMBEDDED", "embedded/gate",
)  # fmt: skip


def test_paths(tries: Tries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths that are no artifact, and values that are no paths, for every loader."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder" / "manifest.json").mkdir(parents=True)
    os.symlink("missing", tmp_path / "dangling")
    os.symlink("circle", tmp_path / "circle")
    monkeypatch.chdir(tmp_path)
    values = {name: VALUES[name] for name in random.Random(0).sample(sorted(VALUES), 30)} | {"None": None}
    values |= {f"{name:.40}": name for name in PATHS}
    values |= {f"Path({name:.40})": Path(name) for name in PATHS}
    values |= {f"bytes({name:.40})": os.fsencode(name) for name in PATHS}
    for loader, name in tries.chosen(product(LOADERS, values)):
        value = values[name]
        if loader.endswith("=") and (value is None or ACCEPTED[loader[:-1]](value)):
            continue  # an artifact, and no path
        tries.python(f"{loader}: {name}", partial(LOADERS[loader], value))
