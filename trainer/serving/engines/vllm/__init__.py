"""Sparse attention inside vLLM, as an attention backend of its name.

``plugin`` registers the backend with vLLM, ``cpu`` lets vLLM's CPU platform find it, ``engine``
reads what is served from the configuration of the engine and checks it, and ``backend`` computes
attention over vLLM's pages, which ``metadata`` describes, with the operations and the state of
``msattn.trainer.serving.paged``. ``memory`` counts this state, and ``received`` computes that of
keys from another engine.

Import from the modules. ``backend``, ``metadata``, ``memory`` and ``received`` need vLLM to be
installed.
"""
