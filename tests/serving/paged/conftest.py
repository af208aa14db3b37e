"""Fixtures of the tests of paged serving."""

import gc
from collections.abc import Iterator

import pytest
import transformers

from msattn.trainer.serving.paged import TRANSFORMERS_NEEDED

OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < TRANSFORMERS_NEEDED


@pytest.fixture(autouse=True)
def _new_transformers() -> None:
    """Skips the test where msattn refuses continuous batching, as on machines for GPU tests with an older transformers."""
    if OLD:
        pytest.skip(f"needs transformers {'.'.join(map(str, TRANSFORMERS_NEEDED))}, {transformers.__version__} is installed")


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    """Keeps the collector, which the end of a manager calls twice, from looking at what is older than the test."""
    gc.freeze()
    yield
    gc.unfreeze()
