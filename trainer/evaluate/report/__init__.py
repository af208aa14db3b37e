"""Evaluation rows as files: JSON, CSV, figures, terminal tables and one HTML page.

Import :func:`~msattn.trainer.evaluate.report.files.write` and
:func:`~msattn.trainer.evaluate.report.context.context`.
"""
