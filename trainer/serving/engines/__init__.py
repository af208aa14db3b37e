"""Engines other than ``generate`` that serve an attached model.

``generate_batch`` is transformers' continuous batching, with ``batch_pages`` and ``whole_blocks``;
``http`` is a server over it, and ``vllm`` an attention backend of vLLM.

Import from the modules.
"""
