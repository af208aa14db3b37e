"""Selection of blocks and buckets: shared code, and the methods in ``untrained``, ``gate`` and
``classifier``.

Blocks of prompts: ``selection``, ``policies``, ``blocks``, ``thresholds``. Keys of new tokens:
``buckets``, ``key_blocks``, ``budgets``, ``key_thresholds``. Import from the modules.
"""
