"""The decision how a pass is computed: by lengths, by what a selection or a router needs, and by what is known of the keys."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from msattn.trainer.methods.blocks import AlwaysRead
from msattn.trainer.serving.dispatch import Dispatch, Way

ALWAYS = AlwaysRead(dense_queries=8)
GATE, UNTRAINED = (SimpleNamespace(gate=gate, always=ALWAYS) for gate in ("a gate", None))
ROUTED = SimpleNamespace(layers={1}, routed_from=lambda batch: 100 * batch)


def dispatch(selection: Any = None, routed: Any = None) -> Dispatch:
    return Dispatch(selection, routed, dense_below=50)


@pytest.mark.parametrize(
    ("selection", "queries", "keys", "given", "way"),
    [
        (None, 64, 64, {}, Way.DENSE),
        (GATE, 49, 49, {}, Way.DENSE_BY_CHOICE),  # shorter than the break-even length
        (GATE, 50, 50, {}, Way.BLOCKS),
        (GATE, 8, 64, {}, Way.DENSE_BY_CHOICE),  # every row of it reads all blocks
        (GATE, 9, 64, {}, Way.BLOCKS),
        (GATE, 8, 64, {"ends": False}, Way.BLOCKS),  # the last queries are those of the prompt, not of a chunk
        (GATE, 64, 80, {"known": False}, Way.DENSE_FALLBACK),
        (GATE, 8, 64, {"known": False}, Way.DENSE_BY_CHOICE),  # a choice is not reported as a fallback
        (UNTRAINED, 64, 80, {"known": False}, Way.BLOCKS),  # its scores need no keys before RoPE
    ],
)
def test_the_way_of_a_prompt(selection: Any, queries: int, keys: int, given: dict[str, bool], way: Way) -> None:
    assert dispatch(selection=selection).of_prompt(queries, keys, **given) is way


@pytest.mark.parametrize(
    ("routed", "layer", "keys", "batch", "known", "way"),
    [
        (None, 1, 500, 1, True, Way.DENSE),
        (ROUTED, 0, 500, 1, True, Way.DENSE),  # not a routed layer
        (ROUTED, 1, 99, 1, True, Way.DENSE_BY_CHOICE),
        (ROUTED, 1, 100, 1, True, Way.BUCKETS),
        (ROUTED, 1, 199, 2, True, Way.DENSE_BY_CHOICE),  # the break-even length is that of the batch
        (ROUTED, 1, 200, 2, True, Way.BUCKETS),
        (ROUTED, 1, None, 2, True, Way.BUCKETS),  # lengths that only the device knows
        (ROUTED, 1, 500, 1, False, Way.DENSE_FALLBACK),
        (ROUTED, 1, 99, 1, False, Way.DENSE_BY_CHOICE),
    ],
)
def test_the_way_of_new_tokens(routed: Any, layer: int, keys: int | None, batch: int, known: bool, way: Way) -> None:
    assert dispatch(routed=routed).of_tokens(layer, keys, batch, known=known) is way


@pytest.mark.parametrize(
    ("queries", "keys", "with_router", "without"),
    [(1, 1, True, True), (1, 9, False, False), (2, 9, False, True), (32, 99, False, True), (33, 99, True, True)],
)
def test_more_tokens_than_read_buckets_are_a_prompt(queries: int, keys: int, with_router: bool, without: bool) -> None:
    assert dispatch(routed=ROUTED).is_prompt(queries, keys) is with_router
    assert dispatch(selection=GATE).is_prompt(queries, keys) is without


def test_the_length_from_which_new_tokens_read_buckets() -> None:
    assert (dispatch(routed=ROUTED).routed_from(3), dispatch(selection=GATE).routed_from(3)) == (300, sys.maxsize)
