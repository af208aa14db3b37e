"""The KV caches of an attached model, with what it keeps of their tokens.

``buffer``, ``pooled_keys`` and ``layers`` are the layers of a contiguous cache; ``install`` puts them into one of transformers.
``pages`` is the state of a paged cache, which belongs to its slots, and ``passes`` describes a forward pass over pages. A page
holds ``page_size`` keys and values of one layer, and a block table the numbers of the pages of a sequence; a block is one of a
gate, 64 keys.

Import from the modules. Nothing here imports another part of ``serving``.
"""
