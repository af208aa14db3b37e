"""Values that operations and the configuration accept.

This module imports nothing, so that the configuration can use it without importing PyTorch.
"""

ZOOMS = (1, 2, 4, 8)
POOLINGS = ("avg", "max", "min")
