"""Keys and values in one tensor for each layer, as the caches of ``generate`` hold them.

``layers`` and ``bucket_layers`` are the layers of such a cache, and key stores; ``buffers`` holds
what they keep, and ``install`` puts them into a transformers cache.

Import from the modules.
"""
