"""Composition and launch of all commands, and the jobs of demo, doctor, bench, generate and serve.

``compose``, ``launch``, ``demo`` and ``doctor`` have no heavy imports. Only ``cli.py`` imports
this package.
"""
