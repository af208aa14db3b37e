"""Evaluation of a model's artifacts: one module for each task, and the report.

Import :func:`~msattn.trainer.evaluate.run.evaluate`, the job of ``msattn eval``.
"""
