"""SeerAttention: gates that score key blocks, and their training.

Import :class:`~msattn.trainer.methods.gate.attn_gate.Gate`,
:class:`~msattn.trainer.methods.gate.decode_gate.DecodeGate` and
:class:`~msattn.trainer.methods.selection.Selection`. Never imports ``classifier``.
"""
