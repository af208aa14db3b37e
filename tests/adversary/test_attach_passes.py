"""Hostile tensors and other arguments of a pass of an attached model."""

import copy
import math
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests.adversary.attached import EVERYTHING, VOCABULARY, attached, model, same
from tests.adversary.passes import PHASES, Inputs, alone, inputs_of, run, with_id
from tests.adversary.tries import Tries

pytestmark = [pytest.mark.area("inputs of attached models"), pytest.mark.filterwarnings("ignore")]


@cache
def expected_of(phase: str) -> Tensor:
    return tokens_of(run(model(), inputs_of(phase)), inputs_of(phase))


def tokens_of(found: Tensor, inputs: Inputs) -> Tensor:
    """Returns the logits of the tokens that are not padding."""
    return found[inputs["attention_mask"][:, -inputs["input_ids"].shape[1] :] > 0]


def equal(found: Tensor, expected: Tensor | None, phase: str) -> bool:
    """Returns whether the results of a pass agree; those at padding need not."""
    if expected is None or found.shape != expected.shape or not found.numel():
        return False
    inputs = inputs_of(phase)
    padded = found.shape[:2] == inputs["input_ids"].shape
    return same(found, expected) or (padded and same(tokens_of(found, inputs), tokens_of(expected, inputs)))


IDS = {f"id {n} at {at}": with_id(n, *at) for n in (-1, -100, VOCABULARY, 2**31, 2**40, -(2**63)) for at in ((0, 0), (1, -1))}
DTYPES = {
    str(dtype): (lambda x, dtype=dtype: x.to(dtype))
    for dtype in (
        torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint64, torch.float16, torch.bfloat16, torch.float32,
        torch.float64, torch.bool, torch.complex64,
    )
}  # fmt: skip
SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "one row": lambda x: x[:1],
    "one row as a vector": lambda x: x[0],
    "three rows": lambda x: torch.cat([x, x[:1]]),
    "no row": lambda x: x[:0],
    "no token": lambda x: x[:, :0],
    "nothing": lambda x: x[:0, :0],
    "a number": lambda x: x[0, 0],
    "3D": lambda x: x[None],
    "3D at the end": lambda x: x[..., None],
    "4D": lambda x: x[:, None, None],
    "flat": lambda x: x.flatten(),
    "transposed": lambda x: x.T,
    "one column less": lambda x: x[:, 1:],
    "one column more": lambda x: torch.cat([x, x[:, -1:]], dim=1),
    "first column": lambda x: x[:, :1],
    "expanded": lambda x: x[:1].expand(2, -1),
    "not contiguous": lambda x: x.T.contiguous().T,
    "with gradients": lambda x: x.float().requires_grad_(),
}
CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda x: x.tolist(),
    "tuple of rows": tuple,
    "list of rows": list,
    "numpy": lambda x: x.numpy(),
    "string": str,
    "number": lambda x: 3,
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
    "twos": lambda x: 2 * x,
    "negative": lambda x: -x,
    "halves": lambda x: 0.5 * x,
    "NaN": lambda x: torch.where(x > 0, 1.0, math.nan),
    "additive": lambda x: torch.where(x > 0, 0.0, -math.inf),
    "starts": lambda x: (x == 0).sum(-1).int(),
    "starts as long": lambda x: (x == 0).sum(-1),
    "causal": lambda x: torch.ones(2, 1, x.shape[1], x.shape[1]).tril(),
    "none": lambda x: None,
}
POSITIONS: dict[str, Callable[[Tensor], Any]] = {
    "negative": lambda x: x - 1000,
    "far": lambda x: x + 10**6,
    "huge": lambda x: x + 2**62,
    "descending": lambda x: x.flip(1),
    "equal": torch.zeros_like,
    "from 0": lambda x: torch.arange(x.shape[1]).expand(2, -1),
    "every other": lambda x: 2 * x,
    "packed": lambda x: x % 7,
    "halves": lambda x: x + 0.5,
    "NaN": lambda x: x * math.nan,
    "none": lambda x: None,
}
EMBEDDINGS: dict[str, Callable[[Tensor], Any]] = {
    "right": lambda x: x,
    "narrow": lambda x: x[..., :-1],
    "wide": lambda x: torch.cat([x, x], dim=-1),
    "double": lambda x: x.double(),
    "half": lambda x: x.half(),
    "ids": lambda x: x[..., 0].long(),
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
        before = {**inputs, "input_ids": None, name: model().get_input_embeddings()(inputs["input_ids"]).detach()}
    try:
        return {**before, name: DAMAGES[name][label](before[name])}
    except (ValueError, IndexError, RuntimeError):
        return None


def refusable(base: Any, inputs: Inputs, phase: str) -> Tensor:
    """Returns the logits of a pass. After a refusal the undamaged pass must serve the same cache."""
    try:
        return run(base, inputs)
    except ValueError:
        whole = {**inputs_of(phase), **({"past_key_values": inputs["past_key_values"]} if phase != "prompt" else {})}
        assert same(tokens_of(run(base, whole), whole), expected_of(phase)), "the refused pass changed the cache"
        raise


def test_tensors_of_a_pass(tries: Tries, steps: Callable[[str], None]) -> None:
    """Each tensor with other values, types and shapes, in a prompt, after cached tokens, and as a single token."""
    for phase, (name, label) in tries.chosen(
        product(PHASES, [(name, label) for name, all in DAMAGES.items() for label in all])
    ):
        steps(phase)
        inputs, copied = damaged(inputs_of(phase), name, label), damaged(inputs_of(phase), name, label)
        if inputs is None or copied is None:
            continue
        expected = alone(partial(run, inputs=copied))
        call = partial(attached, EVERYTHING, partial(refusable, inputs=inputs, phase=phase))
        right = partial(equal, expected=expected, phase=phase)
        tries.python(f"{phase}: {name} {label}", call, right, refusal=ValueError)  # also transformers' and the kernels'


OTHERS: dict[str, tuple[Any, ...]] = {
    "use_cache": ("no", 0, None, False),
    "output_attentions": (True, "yes", 1),
    "output_hidden_states": (True, False),
    "return_dict": (False, "no"),
    "logits_to_keep": (1, 2, torch.tensor([0])),
    "labels": (None,),
    "cache_position": (torch.tensor([10**6]), "0", -1, torch.zeros(3)),
    "head_mask": (torch.zeros(4), "none"),
    "past_key_value": (DynamicCache(), "cache"),
    "msattn_tap": (None, "tap"),
    "msattn_pages": (None, "pages"),
    "cache": (None, "cache", DynamicCache()),
    "kv_start": (torch.tensor([3, 3]), 3),
    "unknown": (1, None),
}


def test_other_arguments_of_a_pass(tries: Tries, steps: Callable[[str], None]) -> None:
    cases = [(name, value) for name, values in OTHERS.items() for value in values]
    for phase, (name, value) in tries.chosen(product(PHASES, cases)):
        steps(phase)

        def call(base: Any, phase: str = phase, name: str = name, value: Any = value) -> Tensor:
            with torch.no_grad():
                found = base(**inputs_of(phase), **{name: copy.deepcopy(value)})
            return found[0] if isinstance(found, tuple) and name == "return_dict" else found.logits

        expected = alone(call)
        tries.python(
            f"{phase}: {name}={value!r:.40}",
            partial(attached, EVERYTHING, call),
            lambda found, e=expected, phase=phase: equal(found, e, phase),
        )
