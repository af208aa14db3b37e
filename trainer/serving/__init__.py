"""Serving an attached model: the KV cache with key buckets, and the dispatch to sparse or dense attention.

Import from the modules. They may import ``seer`` and ``saap``; :mod:`msattn.trainer.attach` imports them.
"""
