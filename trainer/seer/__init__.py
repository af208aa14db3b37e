"""SeerAttention: gates that score key blocks, policies that select them, and their training.

Import :class:`~msattn.trainer.seer.gate.Gate` and :class:`~msattn.trainer.seer.select.Selection`. Never imports ``saap``.
"""
