"""Multi-token attention: convolved and head-mixed scores in place of a Llama layer's attention.

Import :func:`~msattn.trainer.mta.attention.convert`.
"""
