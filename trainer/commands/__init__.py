"""Composition of every command, and those that neither train nor evaluate.

These are demo, doctor, bench and generate. ``compose``, ``demo`` and ``doctor`` have no heavy imports. Only ``cli.py`` imports
this package.
"""
