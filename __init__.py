"""msattn: long-context language models that read only what matters.

Public API, loaded on first use so that ``import msattn`` stays instant:

- ``msattn.attach``: trained artifacts onto a running Hugging Face model, as a context manager.
- ``msattn.load``: an artifact (gate, k-means, query classifier) from a folder or the Hub, checked.
- ``msattn.__version__``.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msattn.trainer.attach import attach, load

__all__ = ["__version__", "attach", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name in ("attach", "load"):
        from msattn.trainer import attach as module

        return getattr(module, name)
    raise AttributeError(f"module 'msattn' has no attribute {name!r}")
