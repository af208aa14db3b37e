"""Serving an attached model.

``attach`` is the public function; ``build`` makes a ``Sparse`` of what it or vLLM is given: ``checks`` checks it, ``loading``
loads artifacts, ``reads`` says how much new tokens read. ``sparse`` dispatches attention to blocks, to buckets (``routed``,
which decodes by ``bucket_attention``) or to dense kernels, ``paged`` does so over pages, and ``statistics`` counts what they
read. ``cache`` holds keys, values and buckets. ``steps`` decodes single tokens as CUDA graphs (``graphs``), over the ``fused``
modules of the decoder. ``inputs`` checks what the attached model is given. ``engines`` are those beside ``generate``.

Import from the modules.
"""
