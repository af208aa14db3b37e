"""Multi-token attention for Llama models, and a retrieval task that it is compared on.

Import :func:`~msattn.trainer.mta.attention.convert`, and :func:`~msattn.trainer.mta.train_mta.load` for the results of
``msattn train-mta``.
"""
