"""Loading of artifacts of any kind, and of the routers of decoding."""

from pathlib import Path

from msattn.trainer import artifacts
from msattn.trainer.errors import UserError
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from msattn.trainer.methods.untrained.base import UntrainedBlocks
from msattn.trainer.methods.untrained.random import RandomBuckets

AnyRouter = QModel | KMeans | DecodeGate | RandomBuckets | UntrainedBlocks
LOADERS = {"gate": Gate.load, "kmeans": KMeans.load, "qmodel": QModel.load, "decode_gate": DecodeGate.load}


def load(path: str | Path) -> Gate | KMeans | QModel | DecodeGate:
    """Loads an artifact of any kind, on the CPU.

    Parameters
    ----------
    path : folder of an artifact, or the id of a Hub repository.

    Raises
    ------
    UserError : the artifact is missing, damaged or of another format version.
    """
    return LOADERS[artifacts.read_kind(path)](path)


def load_router(path: str | Path) -> QModel | KMeans | DecodeGate:
    """Loads a query classifier or, in a folder without one, decode gates, or else a k-means, which routes by itself."""
    artifact = load(artifacts.find(path, "qmodel", "decode_gate", "kmeans"))
    if isinstance(artifact, Gate):
        raise UserError(f"qmodel={path}: this is a gate for prefill; accepted is a qmodel, a decode_gate or a kmeans artifact")
    return artifact
