"""The KV caches of an attached model, with the additional state of their tokens.

``buffer``, ``pooled_keys`` and ``layers`` implement the layers of a contiguous cache; ``install``
puts them into a transformers cache. ``pages`` is the state of a paged cache, which belongs to its
slots, and ``passes`` describes a forward pass over pages. A page holds ``page_size`` keys and
values of one layer; a block table lists the pages of a sequence. "Block" otherwise means a gate's
block of 64 keys.

Import from the modules. Nothing here imports another part of ``serving``.
"""
