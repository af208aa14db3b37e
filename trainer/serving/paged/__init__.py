"""Serving an attached model with transformers' continuous batching, whose cache is paged.

``batching`` lets a model's ``generate_batch`` and ``init_continuous_batching`` start a manager, ``passes`` describes a forward
pass over the pages of many sequences, ``state`` holds what belongs to the slots of the cache (buckets, pooled keys), and
``attention`` computes each layer.

A page holds ``page_size`` keys and values of one layer. A block table has the number of each page of a sequence; a slot is a
position of the physical cache. A block is one of a gate, 64 keys.

Import from the modules. They may import ``seer``, ``saap`` and ``routing``.
"""
