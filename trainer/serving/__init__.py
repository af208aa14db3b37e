"""Serving an attached model: the KV cache that keeps its keys in buckets.

Import from the modules. :mod:`msattn.trainer.attach` stands above this folder.
"""
