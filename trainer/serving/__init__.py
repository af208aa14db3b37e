"""Serving an attached model.

``buffer`` and ``cache_layers`` hold keys, values and buckets, ``pooled_keys`` what gates need of cached keys, and ``cache``
puts them into a cache of transformers. ``sparse`` dispatches each attention to blocks, to buckets (``routed``, which decodes by
``bucket_attention``) or to dense kernels, and ``statistics`` counts what they read. ``steps`` decodes single tokens as CUDA
graphs, over the ``fused`` modules of the decoder. ``paged`` serves continuous batching. ``build`` makes a ``Sparse`` of what
:func:`attach` or vLLM is given: ``arguments`` checks it, ``loading`` loads artifacts, ``reads`` says how much new tokens read.
``inputs`` checks what the attached model is given.

Import from the modules. They may import ``seer`` and ``saap``; :mod:`msattn.trainer.attach` imports them.
"""
