"""``eval=analysis``: properties of queries, keys and attention mass on held-out text (SAAP, arXiv
2502.08246).
"""

from msattn.trainer.evaluate.tasks.analysis.task import TASK, check_sizes, prepare, run

__all__ = ["TASK", "check_sizes", "prepare", "run"]
