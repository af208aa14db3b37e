"""Code shared by several operations.

Argument checks, Triton primitives, operator registration, split heuristics, block and bucket lists,
counts for statistics. These modules import no operation.
"""
