"""Serving an attached model.

``attach`` is the public function, with the options in ``options``. ``build`` builds a ``Sparse``
from the options of ``attach`` or vLLM, and loads and checks artifacts. ``attend`` computes
attention over a ``key_store``, whose keys are ``contiguous`` or ``paged``; ``dispatch`` decides
whether it is dense, over blocks or over buckets, and ``statistics`` counts what is read.
``hooks`` prepare the cache for a pass, and ``input_checks`` checks the inputs of the pass.
``graphs`` runs passes as CUDA graphs. ``engines`` holds the engines other than ``generate``.

Import from the modules.
"""
