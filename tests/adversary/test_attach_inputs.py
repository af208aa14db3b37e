"""Hostile tensors of passes, and conversations that leave and enter attach."""

import copy
import math
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests.adversary.attached import (
    EVERY_BLOCK,
    EVERY_BUCKET,
    EVERYTHING,
    LENGTH,
    PHASES,
    VOCABULARY,
    Inputs,
    alone,
    attached,
    inputs_of,
    model,
    run,
    same,
    with_id,
)
from tests.adversary.tries import Tries, spread
from tests.factory import random_partition, random_tokens

pytestmark = pytest.mark.filterwarnings("ignore")


@cache
def expected_of(phase: str) -> Tensor:
    return tokens_of(run(model(), inputs_of(phase)), inputs_of(phase))


def tokens_of(found: Tensor, inputs: Inputs) -> Tensor:
    """Returns the logits of the tokens that are not padding."""
    return found[inputs["attention_mask"][:, -inputs["input_ids"].shape[1] :] > 0]


def equal(found: Tensor, expected: Tensor | None, phase: str) -> bool:
    """Returns True if the results of a pass agree; those at padding need not."""
    if expected is None or found.shape != expected.shape or not found.numel():
        return False
    inputs = inputs_of(phase)
    padded = found.shape[:2] == inputs["input_ids"].shape
    return same(found, expected) or (
        padded and same(tokens_of(found, inputs), tokens_of(expected, inputs))
    )


IDS = {
    f"id {n} at {at}": with_id(n, *at) for n in (-1, VOCABULARY, 2**40) for at in ((0, 0), (1, -1))
}
DTYPES = {
    str(dtype): (lambda x, dtype=dtype: x.to(dtype))
    for dtype in (
        torch.uint8, torch.int32, torch.uint64, torch.bfloat16, torch.float64, torch.bool,
        torch.complex64,
    )
}  # fmt: skip
SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "one row": lambda x: x[:1],
    "three rows": lambda x: torch.cat([x, x[:1]]),
    "no row": lambda x: x[:0],
    "no token": lambda x: x[:, :0],
    "a number": lambda x: x[0, 0],
    "3D": lambda x: x[None],
    "flat": lambda x: x.flatten(),
    "one column less": lambda x: x[:, 1:],
    "one column more": lambda x: torch.cat([x, x[:, -1:]], dim=1),
    "expanded": lambda x: x[:1].expand(2, -1),
    "not contiguous": lambda x: x.T.contiguous().T,
    "with gradients": lambda x: x.float().requires_grad_(),
}
CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda x: x.tolist(),
    "tuple of rows": tuple,
    "numpy": lambda x: x.numpy(),
    "dict": lambda x: {"input_ids": x},
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 1.0, 0, torch.qint8),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "model": lambda x: model(),
}
MASKS: dict[str, Callable[[Tensor], Any]] = {
    "zeros": torch.zeros_like,
    "a row of zeros": lambda x: x * torch.tensor([[0], [1]]),
    "right padding": lambda x: x.flip(1),
    "a hole": lambda x: x.scatter(1, torch.tensor([[x.shape[1] // 2]] * 2), 0),
    "negative": lambda x: -x,
    "halves": lambda x: 0.5 * x,
    "NaN": lambda x: torch.where(x > 0, 1.0, math.nan),
    "additive": lambda x: torch.where(x > 0, 0.0, -math.inf),
    "starts": lambda x: (x == 0).sum(-1).int(),
    "causal": lambda x: torch.ones(2, 1, x.shape[1], x.shape[1]).tril(),
    "none": lambda x: None,
}
POSITIONS: dict[str, Callable[[Tensor], Any]] = {
    "negative": lambda x: x - 1000,
    "far": lambda x: x + 10**6,
    "descending": lambda x: x.flip(1),
    "equal": torch.zeros_like,
    "from 0": lambda x: torch.arange(x.shape[1]).expand(2, -1),
    "packed": lambda x: x % 7,
    "halves": lambda x: x + 0.5,
    "NaN": lambda x: x * math.nan,
    "none": lambda x: None,
}
EMBEDDINGS: dict[str, Callable[[Tensor], Any]] = {
    "right": lambda x: x,
    "narrow": lambda x: x[..., :-1],
    "double": lambda x: x.double(),
    "half": lambda x: x.half(),
    "batch of ids": lambda x: x.long(),
}
DAMAGES: dict[str, dict[str, Callable[[Tensor], Any]]] = {
    "input_ids": IDS | DTYPES | SHAPES | CONTAINERS | {"none": lambda x: None},
    "attention_mask": MASKS | DTYPES | SHAPES | CONTAINERS,
    "position_ids": POSITIONS | DTYPES | SHAPES | CONTAINERS,
    "inputs_embeds": EMBEDDINGS | DTYPES | SHAPES | CONTAINERS,
}


def damaged(inputs: Inputs, name: str, label: str) -> Inputs | None:
    """Returns ``inputs`` with a damage; None if a tensor of this shape cannot have it."""
    before = inputs
    if name == "inputs_embeds":
        before = {
            **inputs,
            "input_ids": None,
            name: model().get_input_embeddings()(inputs["input_ids"]).detach(),
        }
    try:
        return {**before, name: DAMAGES[name][label](before[name])}
    except (ValueError, IndexError, RuntimeError):
        return None


def refusable(base: Any, inputs: Inputs, phase: str) -> Tensor:
    """Returns the logits of a pass. After a refusal the undamaged pass must serve the same
    cache.
    """
    try:
        return run(base, inputs)
    except ValueError:
        whole = {
            **inputs_of(phase),
            **({"past_key_values": inputs["past_key_values"]} if phase != "prompt" else {}),
        }
        assert same(tokens_of(run(base, whole), whole), expected_of(phase)), (
            "the refused pass changed the cache"
        )
        raise


@pytest.mark.slow
def test_tensors_of_a_pass(tries: Tries, steps: Callable[[str], None]) -> None:
    """Each tensor with other values, types and shapes; a prompt, a chunk after cached tokens, or a
    single token.
    """
    for (name, label), phase in spread(
        [(name, label) for name, all in DAMAGES.items() for label in all], PHASES
    ):
        steps(phase)
        inputs = damaged(inputs_of(phase), name, label)
        copied = damaged(inputs_of(phase), name, label)
        if inputs is None or copied is None:
            continue
        expected = alone(partial(run, inputs=copied))
        call = partial(attached, EVERYTHING, partial(refusable, inputs=inputs, phase=phase))
        right = partial(equal, expected=expected, phase=phase)
        # also transformers' and the kernels'
        tries.python(f"{phase}: {name} {label}", call, right, refusal=ValueError)


CONTEXTS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "blocks": EVERY_BLOCK,
    "buckets": EVERY_BUCKET,
    "both": EVERYTHING,
    "one dense layer": {**EVERYTHING, "dense_layers": (0,)},
    "short window": {**EVERY_BUCKET, "recent": 1, "sink": 0},
    "long window": {**EVERY_BUCKET, "recent": 500},
    "other partition": {**EVERYTHING, "qmodel": random_partition(seed=1)},
    "more buckets": {**EVERYTHING, "qmodel": random_partition(7), "probes": 7},
    "partition after RoPE": {**EVERYTHING, "qmodel": random_partition(rope=True)},
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
    """Returns the logits of passes over one cache, in contexts that change from turn to turn, after
    edits of the cache.
    """
    base, found = model(), []
    past: Any = DynamicCache(config=base.config)
    ids = random_tokens(4, 10 * LENGTH, seed=7)
    for context, edit, tokens in turns:
        changed = EDITS[edit](past) if past.get_seq_length() else None
        past = past if changed is None else changed
        start = past.get_seq_length()
        # the shapes of an empty cache do not matter
        past = past if start or sparse else DynamicCache(config=base.config)
        first: Any = past.layers[0] if start else None
        rows = len(first.keys) if start else 2
        options = CONTEXTS[context] if sparse else None
        use = partial(
            run, inputs={"input_ids": ids[:rows, start : start + tokens], "past_key_values": past}
        )
        found.append(use(base) if options is None else attached(options, use))
    return found


def test_one_cache_in_several_contexts(tries: Tries, steps: Callable[[str], None]) -> None:
    """Random conversations that leave and enter attach: as without attach, or refused where the
    partition is another one.
    """
    for seed in range(20):
        draw = random.Random(seed)
        turns = [
            (draw.choice([*CONTEXTS]), draw.choice([*EDITS]), draw.choice((1, 1, 7, LENGTH)))
            for _ in range(5)
        ]
        steps(draw.choice(PHASES))
        expected = alone(lambda _, turns=turns: conversation(turns, sparse=False))
        mixed = sum(
            name in ("other partition", "more buckets", "partition after RoPE")
            for name, _, _ in turns
        )

        def right(found: list[Tensor], expected: Any = expected) -> bool:
            return all(map(same, found, expected))

        accepted = False if expected is None else None if mixed else True
        call = partial(conversation, turns, sparse=True)
        tries.python(turns, call, right, accepted=accepted, refusal=ValueError)  # the edits' own
