"""Keys and values in one tensor for each layer, as the caches of ``generate`` hold them.

``buffer`` and ``layers`` implement the layers of such a cache; ``install`` puts them into a
transformers cache. ``keys`` computes attention over them.

Import from the modules.
"""
