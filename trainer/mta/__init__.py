"""Multi-token attention for Llama models, and a retrieval task to compare it on.

Import :func:`~msattn.trainer.mta.attention.convert`; for results of ``msattn train-mta``,
:func:`~msattn.trainer.mta.train_mta.load`.
"""
