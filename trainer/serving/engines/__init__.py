"""Engines that serve an attached model beside its own ``generate``.

``generate_batch`` is transformers' continuous batching, ``http`` a server over it, and ``vllm`` an attention backend of vLLM.

Import from the modules.
"""
