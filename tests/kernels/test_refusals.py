"""Invalid arguments of all functions of kernels, each by the message that names it."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from msattn.kernels.flash_decode.score_mod import alibi, sliding_window, softcap
from msattn.kernels.types import PagedKeys
from tests.kernels.cases.every import CASES
from tests.kernels.cases.records import HALF, INF, INT, NAN, zeros

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
WITHOUT_BFLOAT16 = ("apply_sinks", "best_blocks", "block_softmax", "paged_bucket_sizes")
# of any dtype of the others
FULL_PRECISION = (
    "lses", "centroids", "pooled_k", "query_weight", "key_weight", "inv_freq", "k_scale",
)  # fmt: skip
GIVEN = {name: cases.arguments("cpu") for name, cases in CASES.items()}


def refusals() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields functions, refused changes of their arguments, and messages."""
    for name, cases in CASES.items():
        for change, message in cases.refused:
            yield name, change, message
        for each in [x for x in ANY if x in inspect.signature(cases.function).parameters]:
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
def test_refuses(name: str, change: dict[str, Any], message: str) -> None:
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
@pytest.mark.parametrize("name", [name for name in CASES if name not in WITHOUT_BFLOAT16])
def test_interpreted_kernels_refuse_bfloat16(name: str) -> None:
    """Triton's interpreter has no arithmetic for it: products were wrong by up to 1e9."""

    def half(x: Any) -> Any:
        return x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x

    given = {key: x if key in FULL_PRECISION else half(x) for key, x in GIVEN[name].items()}
    if cache := given.get("cache"):
        given["cache"] = PagedKeys(*map(half, cache))
    with pytest.raises(
        ValueError,
        match=r"dtype=torch.bfloat16: Triton's interpreter .* use float32, float16 or "
        r"backend='torch'",
    ):
        CASES[name].function(**given, backend="triton")
    CASES[name].function(**given, backend="torch")


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
