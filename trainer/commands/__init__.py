"""Commands that neither train nor evaluate (demo, doctor, bench, generate), and the composition of every command.

``compose``, ``demo`` and ``doctor`` import nothing heavy. Only ``cli.py`` imports from here.
"""
