"""Serving an attached model.

``attach`` is the public function, with the options in ``options``. ``build`` builds a ``Sparse``
from the options of ``attach`` or vLLM: ``loading`` loads and checks artifacts. ``sparse`` computes
attention over contiguous caches and ``paged`` over pages. ``dispatch`` decides whether attention is
dense, over blocks or (``routed``) over buckets; ``statistics`` counts what is read. ``cache`` holds
keys, values and buckets; ``hooks`` prepare it for a pass, and ``inputs`` checks the inputs of the
pass. ``steps`` decodes single tokens as CUDA graphs (``graphs``) with the ``fused`` modules of the
decoder. ``engines`` holds the engines other than ``generate``.

Import from the modules.
"""
