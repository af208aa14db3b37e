"""SeerAttention: gates that score key blocks, and their training.

A file that defines ``scorer``, a class of block scores for prompts, is named in ``GATE_SCORES`` of
:mod:`msattn.trainer.config.select`.

Import :class:`~msattn.trainer.methods.gate.attn_gate.Gate`,
:class:`~msattn.trainer.methods.gate.decode_gate.DecodeGate` and
:class:`~msattn.trainer.methods.selection.Selection`. Never imports ``classifier``.
"""

from importlib import import_module
from typing import Any

from msattn.trainer.config.select import GATE_SCORES


def scorer_class(name: str) -> Any:
    """Returns the class of the scores of gates with this name."""
    return import_module(f"{__name__}.{GATE_SCORES[name]}").scorer
