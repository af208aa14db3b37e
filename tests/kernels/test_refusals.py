"""Invalid arguments of all functions of kernels, each by the message that names it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from msattn.kernels.flash_decode.score_mod import alibi, sliding_window, softcap
from msattn.kernels.types import PagedKeys
from tests.kernels.cases.every import CASES
from tests.kernels.cases.records import HALF, INF, INT, NAN, Arguments, zeros

ANY: dict[str, list[Any]] = {  # invalid values of arguments that several functions have
    "backend": ["cuda"],
    "scale": [-1.0, 0.0, NAN],
    "softcap": [0.0, -1.0, NAN, INF],
    "kv_start": [zeros(3, dtype=INT), zeros(1)],
    "kv_len": [zeros(1), zeros(3, dtype=INT)],
    "block_size": [48],
    "key_block_size": [48],
    "splits": [0],
}
GIVEN = {name: cases.arguments("cpu") for name, cases in CASES.items()}
IN_BFLOAT16 = {
    name: tree_map_only(Tensor, lambda x: x.bfloat16() if x.is_floating_point() else x, GIVEN[name])
    | {key: GIVEN[name][key] for key in cases.full_precision}
    for name, cases in CASES.items()
    if "backend" in cases.parameters
}


def refusals() -> Iterator[tuple[str, Arguments, str]]:
    """Yields functions, refused changes of their arguments, and messages."""
    for name, cases in CASES.items():
        for change, message in cases.refused:
            yield name, change, message
        for each in [x for x in ANY if x in cases.parameters]:
            for x in ANY[each]:
                yield (
                    name,
                    {each: x},
                    f"{each} is {x.dtype}" if isinstance(x, Tensor) else f"{each}={x!r}",
                )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    refusals(),
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_refuses(name: str, change: Arguments, message: str) -> None:
    """Checks read shapes and types; the torch backend also refuses values."""
    given = GIVEN[name]
    of_cache = "cache" in given and change.keys() <= {*PagedKeys._fields}
    changed = {"cache": given["cache"]._replace(**change)} if of_cache else change
    with pytest.raises(ValueError, match=message):
        CASES[name].function(**given | changed)


@pytest.mark.parametrize("name", CASES)
def test_accepts_what_the_refused_arguments_are_changes_of(name: str) -> None:
    CASES[name].function(**GIVEN[name])


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are interpreted without a CUDA device only"
)
@pytest.mark.parametrize(
    "name",
    [
        name
        for name, given in IN_BFLOAT16.items()
        if torch.bfloat16 in {getattr(x, "dtype", None) for x in tree_leaves(given)}
    ],
)
def test_interpreted_kernels_refuse_bfloat16(name: str) -> None:
    """Triton's interpreter has no arithmetic for it: products were wrong by up to 1e9."""
    with pytest.raises(
        ValueError,
        match=r"dtype=torch.bfloat16: Triton's interpreter .* use float32, float16 or "
        r"backend='torch'",
    ):
        CASES[name].function(**IN_BFLOAT16[name], backend="triton")
    CASES[name].function(**IN_BFLOAT16[name], backend="torch")


def test_score_modifications_refuse_bad_parameters() -> None:
    for limit in (0.0, -1.0, INF, NAN):
        with pytest.raises(ValueError, match="limit="):
            softcap(limit)
    for width in (0, 2.5):
        with pytest.raises(ValueError, match="width="):
            sliding_window(width)  # type: ignore[arg-type]
    for slopes in (zeros(4, dtype=HALF), zeros(2, 2)):
        with pytest.raises(ValueError, match="slopes is"):
            alibi(slopes)
