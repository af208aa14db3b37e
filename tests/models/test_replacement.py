"""Replacement of methods of a model."""

import copy

import pytest
from torch import nn

from msattn.trainer.errors import UserError
from msattn.trainer.models.replacement import replaced


def test_the_collector_may_end_replacements_in_any_order() -> None:
    """As it does when a model is dropped while it is enabled."""
    module = nn.Identity()
    outer, inner = replaced(module, lambda x: x + 1), replaced(module, str, name="extra_repr")
    outer.__enter__()
    inner.__enter__()
    assert module(1) == 2
    with pytest.raises(UserError, match="attached"):
        copy.deepcopy(module)
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert module(1) == 1
