"""The decision how a pass is computed: by lengths, by what a selection or a router needs, and by
what is known of the keys.
"""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from msattn.trainer.methods.blocks import AlwaysRead
from msattn.trainer.serving.dispatch import BY_CHOICE, FALLBACK, Dispatch

ALWAYS = AlwaysRead(dense_queries=8)
GATE, UNTRAINED = (SimpleNamespace(gate=gate, always=ALWAYS) for gate in ("a gate", None))
ROUTED = SimpleNamespace(layers={1})


def dispatch(selection: Any = None, routed: Any = None, shortest: int = 100) -> Dispatch:
    return Dispatch(
        selection, routed, dense_below=50, shortest_routed=lambda batch: shortest * batch
    )


@pytest.mark.parametrize(
    ("selection", "queries", "keys", "given", "decision"),
    [
        (None, 64, 64, {}, (None, None)),
        (GATE, 49, 49, {}, (None, BY_CHOICE)),  # shorter than the break-even length
        (GATE, 50, 50, {}, (GATE, None)),
        (GATE, 8, 64, {}, (None, BY_CHOICE)),  # every row of it reads all blocks
        (GATE, 9, 64, {}, (GATE, None)),
        # the last queries are those of the prompt, not of a chunk
        (GATE, 8, 64, {"ends": False}, (GATE, None)),
        (GATE, 64, 80, {"known": False}, (None, FALLBACK)),
        # a choice is not reported as a fallback
        (GATE, 8, 64, {"known": False}, (None, BY_CHOICE)),
        # its scores need no keys before RoPE
        (UNTRAINED, 64, 80, {"known": False}, (UNTRAINED, None)),
    ],
)
def test_the_decision_for_a_prompt(
    selection: Any,
    queries: int,
    keys: int,
    given: dict[str, bool],
    decision: tuple[Any, str | None],
) -> None:
    assert dispatch(selection=selection).decide_prompt(queries, keys, **given) == decision


@pytest.mark.parametrize(
    ("routed", "layer", "keys", "batch", "known", "decision"),
    [
        (None, 1, 500, 1, True, (None, None)),
        (ROUTED, 0, 500, 1, True, (None, None)),  # not a routed layer
        (ROUTED, 1, 99, 1, True, (None, BY_CHOICE)),
        (ROUTED, 1, 100, 1, True, (ROUTED, None)),
        (ROUTED, 1, 199, 2, True, (None, BY_CHOICE)),  # the break-even length is that of the batch
        (ROUTED, 1, 200, 2, True, (ROUTED, None)),
        (ROUTED, 1, None, 2, True, (ROUTED, None)),  # lengths that only the device knows
        (ROUTED, 1, 500, 1, False, (None, FALLBACK)),
        (ROUTED, 1, 99, 1, False, (None, BY_CHOICE)),
    ],
)
def test_the_decision_for_new_tokens(
    routed: Any,
    layer: int,
    keys: int | None,
    batch: int,
    known: bool,
    decision: tuple[Any, str | None],
) -> None:
    assert dispatch(routed=routed).decide_tokens(layer, keys, batch, known=known) == decision


@pytest.mark.parametrize(
    ("queries", "keys", "with_router", "without"),
    [
        (1, 1, True, True),
        (1, 9, False, False),
        (2, 9, False, True),
        (32, 99, False, True),
        (33, 99, True, True),
    ],
)
def test_more_tokens_than_read_buckets_are_a_prompt(
    queries: int, keys: int, with_router: bool, without: bool
) -> None:
    assert dispatch(routed=ROUTED).is_prompt(queries, keys) is with_router
    assert dispatch(selection=GATE).is_prompt(queries, keys) is without


def test_the_tokens_that_are_dense_before_buckets_are_read() -> None:
    routed = dispatch(routed=ROUTED)
    for keys, batch, more in ((90, 1, 10), (100, 1, 0), (300, 2, 0), (90, 3, 210)):
        assert routed.tokens_until_routed(keys, batch) == more
    for never in (dispatch(selection=GATE), dispatch(routed=SimpleNamespace(layers=frozenset()))):
        assert never.tokens_until_routed(10**9, 1) == sys.maxsize


def test_sequences_that_are_too_short_for_buckets() -> None:
    lengths, padding = torch.tensor([199, 200], dtype=torch.int32), torch.tensor([50, 0])
    for shortest, keys, given, expected in (
        (100, lengths, None, [True, False]),
        (100, 240, padding, [True, False]),
        (2**40, lengths, None, [True, True]),
    ):
        found = dispatch(routed=ROUTED, shortest=shortest).short_sequences(2, keys, given)
        assert found is not None
        assert found.tolist() == expected
    assert dispatch(routed=ROUTED, shortest=0).short_sequences(2, lengths) is None, (
        "nothing is compared on the device"
    )
