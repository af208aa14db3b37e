"""Tensors of any strides give the results of contiguous ones, or are refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves, tree_map_only, tree_map_with_path

from msattn.kernels.types import Backend
from tests.kernels.cases.every import CASES
from tests.kernels.shared import BACKENDS

Choice = Callable[[str, Tensor], bool]


def in_order(x: Tensor, *order: int) -> Tensor:
    """Holds ``x`` with its dimensions in an order that is its own inverse."""
    return x.permute(order).contiguous().permute(order)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second": lambda x: torch.stack([x, x], -1)[..., 0],
    "columns": lambda x: in_order(x, *reversed(range(x.dim()))),
    "token-major": lambda x: in_order(x, 0, 2, 1, 3) if x.dim() == 4 else x,
}


def run(function: str, given: Any, backend: Backend, way: str, choice: Choice) -> list[Tensor]:
    """Returns the results of a function, and its arguments after it, with the tensors of a choice
    held in another way.
    """

    def hold(path: Any, x: Any) -> Any:
        name = keystr(path).replace("['", "").replace("']", "")
        return WAYS[way](x) if isinstance(x, Tensor) and choice(name, x) else x

    own = tree_map_with_path(hold, tree_map_only(Tensor, torch.clone, given))
    result = CASES[function].function(**own, backend=backend)
    return [x for x in tree_leaves((result, own)) if isinstance(x, Tensor)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * ("strides" in cases.slow))
        for name, cases in CASES.items()
        if "backend" in cases.parameters
    ],
)
def test_tensors_of_any_strides(name: str, backend: Backend, steady_device: str) -> None:
    """Also of those that a function writes to."""
    given = CASES[name].arguments(steady_device)
    want = run(name, given, backend, "columns", lambda *_: False)
    refused = set[str]()

    def accepted(each: str, x: Tensor) -> bool:
        if x.dim() != 1 and each not in CASES[name].contiguous:
            return True
        refused.add(each)
        return False

    for way in WAYS:
        choice = accepted if way != "token-major" else lambda each, x: x.dim() == 4
        found = run(name, given, backend, way, choice)
        torch.testing.assert_close(found, want, equal_nan=True)
    for only in refused:
        message = only
        try:
            found = run(
                name, given, backend, "every second", lambda each, _, only=only: each == only
            )
            torch.testing.assert_close(found, want, equal_nan=True)
        except ValueError as error:
            message = str(error)
        assert message.startswith(only)
