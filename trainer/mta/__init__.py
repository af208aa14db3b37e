"""Multi-token attention for Llama models, and a retrieval task that it is compared on.

Import :func:`~msattn.trainer.mta.attention.convert`.
"""
