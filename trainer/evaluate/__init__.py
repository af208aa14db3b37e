"""Evaluation of a model's artifacts: the compared methods, the tasks (``tasks/``, one file each),
and the ``report/``.

Import :func:`~msattn.trainer.evaluate.run.evaluate`, the job of ``msattn eval``; tasks import
neither it nor the report.
"""
