"""SeerAttention: gates that score key blocks, policies that select blocks by these scores, and the training of gates.

Import :class:`~msattn.trainer.seer.gate.Gate` and :class:`~msattn.trainer.seer.select.Selection`. Never imports ``saap``.
"""
