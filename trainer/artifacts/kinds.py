"""The kinds of artifacts, each described once."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of artifacts; ``name`` is also that of its folder in a run.

    ``title`` heads its model card, ``method`` is its name in the rows of an evaluation,
    ``command`` trains it, and ``module`` is the ``module:class`` that loads it. ``precedence`` is
    its place among the kinds that route new tokens, of which a run uses the first; None: it routes
    none. ``expected``: an evaluation says that a run has none.
    """

    name: str
    title: str
    method: str
    command: str
    module: str
    precedence: int | None = None
    expected: bool = True

    def load(self, path: Any) -> Any:
        """Loads an artifact of this kind from a folder or a Hub id."""
        module, cls = self.module.split(":")
        return getattr(import_module(f"msattn.trainer.methods.{module}"), cls).load(path)


_ALL = (
    Kind(
        name="gate",
        title="SeerAttention gates: scores of key blocks for each query block",
        method="gate",
        command="train-gate",
        module="gate.attn_gate:Gate",
    ),
    Kind(
        name="kmeans",
        title="Spherical k-means of keys: the buckets that sparse decoding selects from",
        method="k-means",
        command="fit-kmeans",
        module="classifier.kmeans:KMeans",
        precedence=2,
    ),
    Kind(
        name="qmodel",
        title="SAAP query classifiers: scores of key buckets for each query",
        method="classifier",
        command="train-qmodel",
        module="classifier.qmodel:QModel",
        precedence=0,
    ),
    Kind(
        name="decode_gate",
        title="SeerAttention decode gates: scores of key blocks for each query",
        method="decode gate",
        command="train-gate gate.phase=decode",
        module="gate.decode_gate:DecodeGate",
        precedence=1,
        expected=False,
    ),
)
KINDS = {kind.name: kind for kind in _ALL}
_ROUTERS = {kind.name: kind.precedence for kind in _ALL if kind.precedence is not None}
ROUTER_KINDS = tuple(sorted(_ROUTERS, key=_ROUTERS.__getitem__))
