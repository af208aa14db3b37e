"""Hostile caches of an attached model, and one cache in several contexts."""

import copy
import random
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from tests.adversary.attached import EVERY_BLOCK, EVERY_BUCKET, EVERYTHING, LENGTH, attached, model, partition, same
from tests.adversary.passes import PHASES, alone, cache_of, inputs_of, run
from tests.adversary.tries import Tries
from tests.factory import random_tokens, tiny_config

pytestmark = [pytest.mark.area("inputs of attached models"), pytest.mark.filterwarnings("ignore")]

DEVIATIONS: list[dict[str, Any]] = [
    {},
    *({"layers": n} for n in (0, 1, 3, 4)),
    *({"batch": n} for n in (0, 1, 3, 4)),
    *({"heads": n} for n in (1, 3, 4)),
    *({"size": n} for n in (8, 15, 32)),
    *({"dtype": each} for each in (torch.float16, torch.bfloat16, torch.float64, torch.int64)),
    *({"lengths": each} for each in ((0, LENGTH), (LENGTH, 0), (LENGTH, LENGTH - 1), (LENGTH - 1, LENGTH), (0, 0))),
    {"batch": 1, "heads": 1},
    {"layers": 1, "batch": 1},
    {"values": slice(0, LENGTH - 1)},
    {"device": "meta"},
]
MAKES = ("dynamic", "static", "taken over")


OBJECTS: dict[str, Callable[[], Any]] = {
    "list": list,
    "tuple of tensors": lambda: tuple((torch.zeros(2, 2, LENGTH, 16),) * 2 for _ in range(2)),
    "string": lambda: "cache",
    "number": lambda: 3,
    "True": lambda: True,
    "dict": dict,
    "class": lambda: DynamicCache,
    "config": tiny_config,
    "tensor": lambda: torch.zeros(2, 2, LENGTH, 16),
    "layer": lambda: cache_of("dynamic").layers[0],
    "encoder and decoder": lambda: EncoderDecoderCache(cache_of("dynamic"), cache_of("dynamic")),
    "offloaded": lambda: DynamicCache(config=tiny_config(), offloading=True),
    "sliding": lambda: DynamicCache(config=tiny_config("mistral", sliding_window=8)),
    "no layers": DynamicCache,
    "short": lambda: StaticCache(config=tiny_config(), max_cache_len=LENGTH),
    "early": lambda: early(4),
    "layers that are None": lambda: with_layers([None, None]),
    "layers that are caches": lambda: with_layers([DynamicCache(), DynamicCache()]),
}


def early(batch: int) -> Any:
    """Returns an empty static cache whose memory is for ``batch`` sequences."""
    found = StaticCache(config=tiny_config(), max_cache_len=3 * LENGTH)
    found.early_initialization(batch, 2, 16, torch.float32, torch.device("cpu"))
    return found


def with_layers(layers: list[Any]) -> Any:
    found = DynamicCache()
    found.layers = layers
    return found


def test_caches(tries: Tries, steps: Callable[[str], None]) -> None:
    """Caches of other models, batches and types, unequal layers, and objects that are no caches."""
    makers: dict[str, Callable[[], Any]] = dict(OBJECTS)
    for make, deviation in product(MAKES, DEVIATIONS):
        makers[f"{make} {deviation}"] = partial(cache_of, make, **deviation)
    for phase, name in tries.chosen(product(("chunk", "token", "step"), makers)):
        try:
            held, copied = makers[name](), makers[name]()
        except Exception:
            continue
        if name == "static {'device': 'meta'}":
            continue  # the length of a static cache is a tensor, which has no value there
        steps(phase)
        ids = inputs_of(phase)["input_ids"]
        copied = DynamicCache() if alone(lambda _, past=copied: past.get_seq_length()) == 0 else copied  # shapes do not matter
        expected = alone(partial(run, inputs={"input_ids": ids, "past_key_values": copied}))
        call = partial(attached, EVERYTHING, partial(run, inputs={"input_ids": ids, "past_key_values": held}))
        right = lambda found, e=expected: e is not None and same(found, e)  # noqa: E731
        tries.python(f"{phase}: {name}", call, right, refusal=ValueError)  # also the kernels'


CONTEXTS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "blocks": EVERY_BLOCK,
    "buckets": EVERY_BUCKET,
    "both": EVERYTHING,
    "one dense layer": {**EVERYTHING, "dense_layers": (0,)},
    "short window": {**EVERY_BUCKET, "recent": 1, "sink": 0},
    "long window": {**EVERY_BUCKET, "recent": 500},
    "other partition": {**EVERYTHING, "qmodel": partition(seed=1)},
    "more buckets": {**EVERYTHING, "qmodel": partition(buckets=7), "probes": 7},
    "partition after RoPE": {**EVERYTHING, "qmodel": partition(rope=True)},
}
EDITS: dict[str, Callable[[Any], Any]] = {
    "none": lambda past: None,
    "crop(-5)": lambda past: past.crop(-5),
    "crop(-10**6)": lambda past: past.crop(-(10**6)),
    "crop(5)": lambda past: past.crop(5),
    "crop(0)": lambda past: past.crop(0),
    "reset": lambda past: past.reset(),
    "reorder": lambda past: past.reorder_cache(torch.arange(len(past.layers[0].keys)).flip(0)),
    "repeat": lambda past: past.batch_repeat_interleave(2),
    "select": lambda past: past.batch_select_indices(torch.arange(len(past.layers[0].keys))[-1:]),
    "copy": copy.deepcopy,
}


def conversation(turns: list[tuple[str, str, int]], sparse: bool) -> list[Tensor]:
    """Returns the logits of passes over one cache, in contexts that change from turn to turn, after edits of the cache."""
    base, found = model(), []
    past: Any = DynamicCache(config=base.config)
    ids = random_tokens(4, 10 * LENGTH, seed=7)
    for context, edit, tokens in turns:
        changed = EDITS[edit](past) if past.get_seq_length() else None
        past = past if changed is None else changed
        start = past.get_seq_length()
        past = past if start or sparse else DynamicCache(config=base.config)  # the shapes of an empty cache do not matter
        first: Any = past.layers[0] if start else None
        rows = len(first.keys) if start else 2
        options = CONTEXTS[context] if sparse else None
        use = partial(run, inputs={"input_ids": ids[:rows, start : start + tokens], "past_key_values": past})
        found.append(use(base) if options is None else attached(options, use))
    return found


def test_one_cache_in_several_contexts(tries: Tries, steps: Callable[[str], None]) -> None:
    """Random conversations that leave and enter attach: as without attach, or refused where the partition is another one."""
    for seed in tries.chosen(range(150)):
        draw = random.Random(seed)
        turns = [(draw.choice([*CONTEXTS]), draw.choice([*EDITS]), draw.choice((1, 1, 7, LENGTH))) for _ in range(5)]
        steps(draw.choice(PHASES))
        expected = alone(lambda _, turns=turns: conversation(turns, sparse=False))
        mixed = sum(name in ("other partition", "more buckets", "partition after RoPE") for name, _, _ in turns)

        def right(found: list[Tensor], expected: Any = expected) -> bool:
            return all(map(same, found, expected))

        accepted = False if expected is None else None if mixed else True
        call = partial(conversation, turns, sparse=True)
        tries.python(turns, call, right, accepted=accepted, refusal=ValueError)  # the edits' own
