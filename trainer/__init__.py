"""Models, data, training, artifacts, evaluation and serving. Imports ``kernels``, which never
imports ``trainer``.
"""
