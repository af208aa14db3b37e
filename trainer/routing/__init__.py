"""Routing: the choice of the keys that a decoded token reads, as far as ``saap`` and ``seer`` share it.

``buckets`` chooses buckets by their scores, ``pages`` those of neighbouring keys, ``calibrate`` by a share of the keys;
``probing`` does so without a cache. Import from the modules. They know no gate, k-means or classifier.
"""
