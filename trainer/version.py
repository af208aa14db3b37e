"""The version of the package, which ``pyproject.toml`` states too."""

__version__ = "0.2.0"
