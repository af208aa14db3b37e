"""Fixtures of the tests of paged serving."""

import gc
from collections.abc import Iterator

import pytest

from msattn.trainer.errors import UserError
from msattn.trainer.models.families import check_transformers


@pytest.fixture(autouse=True)
def _new_transformers() -> None:
    """Skips the test where msattn refuses continuous batching, as on machines for GPU tests with an
    older transformers.
    """
    try:
        check_transformers("generate_batch")
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    """Keeps the collector, which the end of a manager calls twice, from looking at what is older
    than the test.
    """
    gc.freeze()
    yield
    gc.unfreeze()
