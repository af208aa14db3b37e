"""Keys and values in one tensor for each layer, as the caches of ``generate`` hold them.

``buffer``, ``pooled_keys`` and ``layers`` implement the layers of such a cache; ``install`` puts
them into a transformers cache.

Import from the modules. Nothing here imports another part of ``serving``.
"""
