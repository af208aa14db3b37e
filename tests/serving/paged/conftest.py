"""Fixtures of the tests of paged serving."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    """Keeps the collector, which the end of a manager calls twice, from looking at what is older than the test."""
    gc.freeze()
    yield
    gc.unfreeze()
