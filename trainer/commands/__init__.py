"""Composition and launch of all commands, and the jobs of demo, doctor, bench and generate.

``compose``, ``demo`` and ``doctor`` have no heavy imports. Only ``cli.py`` imports this package.
"""
