"""``eval=analysis``: properties of queries, keys and attention mass on held-out text (SAAP, arXiv 2502.08246).

Import :func:`~msattn.trainer.evaluate.tasks.analysis.task.run`.
"""
