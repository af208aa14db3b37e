"""Methods without training. A file is a method, under its name in ``select.scores`` and ``eval.routers``.

It defines ``scorer``, a class of block scores for prompts, or ``router``, a class that chooses keys for new tokens, or both; a
file that is added here is known everywhere (``SCORES`` and ``ROUTERS`` of :mod:`msattn.trainer.config.select`).
"""

from importlib import import_module
from types import ModuleType


def untrained_method(name: str) -> ModuleType:
    """Returns the module of a method, with its ``scorer`` and ``router``."""
    return import_module(f"{__name__}.{name}")
