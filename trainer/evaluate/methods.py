"""What stands side by side in a result: the artifacts that exist, and the training-free baselines they must beat."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from msattn.trainer import artifacts
from msattn.trainer.attach import attach, load
from msattn.trainer.config import EvalRunConfig, SelectConfig
from msattn.trainer.errors import UserError
from msattn.trainer.saap.kmeans import KMeans
from msattn.trainer.saap.qmodel import QModel
from msattn.trainer.seer.select import Multiscale

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from msattn.trainer.attach import Sparse
    from msattn.trainer.models.loading import Loaded
    from msattn.trainer.seer.gate import Gate

Router = KMeans | QModel
COMMANDS = {"gate": "train-gate", "kmeans": "fit-kmeans", "qmodel": "train-qmodel"}  # what makes each kind of artifact


@dataclass(frozen=True)
class Blocks:
    """Sparse prefill: blocks chosen by the scores that ``select`` names, read as its policy says."""

    name: str
    select: SelectConfig
    gate: "Gate | None" = None

    def settings(self, sparsities: list[float]) -> list[tuple[str, SelectConfig]]:
        """Each sparsity in turn; a policy that sets its own sparsity stands once, as it is configured.

        Multiscale reading has top-k beside it that reads as many tokens, all of them whole.
        """
        if self.select.policy in ("topk", "calibrated"):
            return [(f"sparsity {s:g}", replace(self.select, sparsity=s)) for s in sparsities]
        if self.select.policy == "multiscale":
            shares, cost = " ".join(f"{share:g}" for share in self.select.shares), Multiscale(self.select.shares).cost
            as_many_whole = replace(self.select, policy="topk", sparsity=1 - cost)
            return [(f"shares {shares}", self.select), (f"sparsity {1 - cost:.4g}", as_many_whole)]
        value = {"threshold": "threshold", "nucleus": "mass", "token_budget": "tokens"}[self.select.policy]
        return [(f"{self.select.policy} {getattr(self.select, value):g}", self.select)]

    def attach(
        self, model: "PreTrainedModel", select: SelectConfig, *, measure_recall: bool = False, measure_time: bool = False
    ) -> AbstractContextManager["Sparse"]:
        """Attach the selection for prompts of every length: what is measured is the sparse path."""
        always = replace(select, dense_below=0)
        return attach(model, gate=self.gate, select=always, measure_recall=measure_recall, measure_time=measure_time)


@dataclass(frozen=True)
class Routing:
    """Sparse decoding: the dense window and the buckets that ``router`` chooses, read by ``bucket_decode``."""

    name: str
    router: Router
    recent: int
    sink: int
    dense_layers: tuple[int, ...]

    def settings(self, probes: list[int]) -> list[tuple[str, int]]:
        """How many buckets a query visits; more than there are is a UserError."""
        for count in probes:
            if count > self.router.num_buckets:
                raise UserError(f"probes={count}: {self.name} has {self.router.num_buckets} buckets a key/value head")
        return [(f"{count} probe" + "s" * (count != 1), count) for count in probes]

    def attach(self, model: "PreTrainedModel", probes: int) -> AbstractContextManager["Sparse"]:
        window: dict[str, Any] = {"recent": self.recent, "sink": self.sink, "dense_layers": self.dense_layers}
        return attach(model, qmodel=self.router, probes=probes, **window)


@dataclass(frozen=True)
class Methods:
    """All that is compared.

    Attributes
    ----------
    blocks, routing : besides dense attention, which every task runs first.
    manifests : of the artifacts found, by kind.
    notes : what is missing, and the command that makes it.
    """

    blocks: list[Blocks]
    routing: list[Routing]
    manifests: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def find(cfg: EvalRunConfig, loaded: "Loaded", device: torch.device) -> Methods:
    """The artifacts that are named, or that this model has under this name; and ``eval.baselines``.

    Raises
    ------
    UserError
        If an artifact that is named is missing, or any belongs to another model.
    """
    paths, notes = _paths(cfg)
    manifests, found = {}, {}
    for label, (kind, path) in paths.items():
        manifest = artifacts.read(path, kind=kind).manifest
        artifacts.check_model(manifest, loaded.fingerprint)
        manifests[label] = {"path": str(path), **manifest}
        found[label] = load(path).to(device)
    return Methods(_blocks(cfg, found.get("gate")), _routing(cfg, found), manifests, notes)


def _paths(cfg: EvalRunConfig) -> tuple[dict[str, tuple[str, str | Path]], list[str]]:
    """``{label: (kind, path)}`` of the artifacts to read, and a note for each kind that is neither named nor there.

    A k-means that is named stands beside this name's own: with and without RoPE, say.
    """
    paths: dict[str, tuple[str, str | Path]] = {}
    notes = []
    for kind, command in COMMANDS.items():
        own, named = artifacts.artifact_folder(cfg.outputs, cfg.model.name, cfg.name, kind), getattr(cfg.artifacts, kind)
        if own.exists() and (named is None or kind == "kmeans"):
            paths[kind] = (kind, own)
        if named is not None:
            beside = kind in paths and Path(named).resolve() != own.resolve()
            paths[f"{kind} (named)" if beside else kind] = (kind, named)
        if kind not in paths:
            notes.append(f"No {kind} at {own}: `msattn {command} model={cfg.model.name} name={cfg.name}` makes one.")
    return paths, notes


def _blocks(cfg: EvalRunConfig, gate: "Gate | None") -> list[Blocks]:
    size = gate.cfg.block_size if gate else cfg.select.block_size  # baselines choose among the gate's own blocks
    fixed = (
        replace(cfg.select, policy="topk") if cfg.select.policy == "calibrated" else cfg.select
    )  # only gates carry thresholds
    trained = [Blocks("gate", replace(cfg.select, scores="gate"), gate)] if gate else []
    if gate and fixed != cfg.select:
        trained.append(Blocks("gate, top-k", replace(fixed, scores="gate"), gate))
    return trained + [Blocks(name, replace(fixed, scores=name, block_size=size)) for name in cfg.eval.baselines]


def _routing(cfg: EvalRunConfig, found: dict[str, Any]) -> list[Routing]:
    window = (cfg.recent, cfg.sink, tuple(cfg.dense_layers))
    names = {"qmodel": "classifier", "kmeans": "k-means", "kmeans (named)": "k-means (named)"}
    rope = {label: ", RoPE" if getattr(router, "rope", False) else "" for label, router in found.items()}
    return [Routing(name + rope[label], found[label], *window) for label, name in names.items() if label in found]
