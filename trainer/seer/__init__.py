"""SeerAttention: gates that score key blocks, policies that select blocks by these scores, and the training of gates.

Import :class:`~msattn.trainer.seer.gate.Gate`, :class:`~msattn.trainer.seer.decode_gate.DecodeGate` and
:class:`~msattn.trainer.seer.select.Selection`. Never imports ``saap``.
"""
