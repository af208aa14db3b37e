"""Methods without training. A file of ``scores`` or ``routers`` is a method, known everywhere by
the file's name.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msattn.trainer.methods.untrained.base import UntrainedRouter, UntrainedScorer


def untrained_scorer(name: str) -> "type[UntrainedScorer]":
    """Returns the class of the block scores with this name."""
    return import_module(f"{__name__}.scores.{name}").scorer


def untrained_router(name: str) -> "type[UntrainedRouter]":
    """Returns the class of the router with this name."""
    return import_module(f"{__name__}.routers.{name}").router
