"""Methods by their names in results."""

from msattn.trainer.config.select import BASELINES, ROUTERS
from msattn.trainer.evaluate.row import WINDOW
from msattn.trainer.methods.base import DENSE, Method
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.gate.attn_gate import GateScores, QuestionScores
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from msattn.trainer.methods.untrained import untrained_router, untrained_scorer

KINDS = [
    GateScores,
    QuestionScores,
    QModel,
    KMeans,
    DecodeGate,
    *(untrained_scorer(name) for name in BASELINES),
]
KINDS += [untrained_router(name) for name in ROUTERS]
METHODS = {each.name: each for each in (DENSE, WINDOW, *(kind.method for kind in KINDS))}


def named(text: str | Method) -> Method:
    """Returns the method with this name in results."""
    name, *variants = str(text).split(", ")
    name, _, source = name.partition(" (")
    return METHODS.get(name, Method(name)).of(*variants, source=source.rstrip(")"))
