"""Fixtures of the tests of data."""

import pytest
from transformers import PreTrainedTokenizerFast

from msattn.trainer.embedded import EMBEDDED_MODEL
from msattn.trainer.recipes.teachers.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """The embedded model's tokenizer."""
    return load_tokenizer(EMBEDDED_MODEL)
