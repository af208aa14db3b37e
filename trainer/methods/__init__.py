"""The choice of blocks and buckets: what all methods share, those without training, and in folders those that are trained.

Blocks of prompts: ``selection``, ``policies``, ``blocks``, ``thresholds``. Keys of new tokens: ``buckets``, ``key_blocks``,
``budgets``, ``key_thresholds``. Import from the modules.
"""
