"""Keys and values in pages, as engines for many requests hold them.

A page holds ``page_size`` keys and values of one layer; a block table lists the pages of a
sequence. "Block" otherwise means a gate's block of 64 keys. ``state`` is what is kept beside the
cache, which belongs to its slots, with the sizes of buckets in ``kept_sizes``; ``passes`` describes
a forward pass, whose groups of sequences are key stores.

Import from the modules.
"""
