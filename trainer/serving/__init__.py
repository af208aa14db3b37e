"""Serving an attached model.

``attach`` is the public function. ``build`` builds a ``Sparse`` from the options of ``attach`` or
vLLM, and loads and checks artifacts. ``attend`` computes attention over a key store, whose keys are
``contiguous`` or ``paged``; ``dispatch`` decides whether it is dense, over blocks or over buckets,
and ``statistics`` counts what is read. ``hooks`` check the inputs of a pass and prepare its cache.
``graphs`` runs passes as CUDA graphs. ``engines`` holds the engines other than ``generate``.

Import from the modules.
"""
