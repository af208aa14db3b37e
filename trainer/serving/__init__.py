"""Serving an attached model.

``attach`` is the public function and ``options`` its options. ``build`` makes a ``Sparse`` of what it or vLLM gets: ``loading``
loads and checks artifacts. ``sparse`` computes attention over contiguous
caches and ``paged`` over pages: dense, over blocks or, with ``routed``, over buckets, as ``dispatch`` decides; ``statistics``
counts what they read. ``cache`` holds keys, values and buckets; ``hooks`` prepare it for a pass, and ``inputs`` checks what the
pass is given. ``steps`` decodes single tokens as CUDA graphs (``graphs``), over the ``fused`` modules of the decoder.
``engines`` are those beside ``generate``.

Import from the modules.
"""
