"""Fixtures of the tests of data."""

import pytest
from transformers import PreTrainedTokenizerFast

from tests.factory import embedded_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """The embedded model's tokenizer."""
    return embedded_tokenizer()
