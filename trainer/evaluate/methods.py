"""The methods that an evaluation compares: trained artifacts and training-free baselines."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from msattn.trainer import artifacts
from msattn.trainer.attach import attach, load
from msattn.trainer.config import EvalRunConfig, MultiscaleConfig, SelectConfig, SparsityConfig
from msattn.trainer.config.select import own_keys
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
COMMANDS = {"gate": "train-gate", "kmeans": "fit-kmeans", "qmodel": "train-qmodel"}  # by kind of artifact that they create


@dataclass(frozen=True)
class BlockSelectionMethod:
    """Sparse prefill: ``select`` names the block scores and the policy that turns them into blocks to read."""

    name: str
    select: SelectConfig
    gate: "Gate | None" = None

    def settings(self, sparsities: list[float]) -> list[tuple[str, SelectConfig]]:
        """Returns ``(label, selection)`` for each setting to measure.

        Policies with a sparsity are measured at each of ``sparsities``, other policies once, as configured. Multiscale is
        compared with top-k that reads the same number of tokens.
        """
        if isinstance(self.select, SparsityConfig):
            return [(f"sparsity {s:g}", replace(self.select, sparsity=s)) for s in sparsities]
        if isinstance(self.select, MultiscaleConfig):
            shares, cost = " ".join(f"{share:g}" for share in self.select.shares), Multiscale(self.select.shares).cost
            topk_of_equal_cost = self.select.with_policy("topk", sparsity=1 - cost)
            return [(f"shares {shares}", self.select), (f"sparsity {1 - cost:.4g}", topk_of_equal_cost)]
        (key,) = own_keys(type(self.select))
        return [(f"{self.select.policy} {getattr(self.select, key):g}", self.select)]

    def attach(
        self, model: "PreTrainedModel", select: SelectConfig, *, measure_recall: bool = False, measure_time: bool = False
    ) -> AbstractContextManager["Sparse"]:
        """Attaches the selection to ``model`` with ``dense_below=0``, so that prompts of every length use sparse attention."""
        sparse_select = replace(select, dense_below=0)
        return attach(model, gate=self.gate, select=sparse_select, measure_recall=measure_recall, measure_time=measure_time)


@dataclass(frozen=True)
class BucketRoutingMethod:
    """Sparse decoding: ``bucket_decode`` reads the dense window and the buckets that ``router`` chooses."""

    name: str
    router: Router
    recent: int
    sink: int
    dense_layers: tuple[int, ...]

    def settings(self, probes: list[int]) -> list[tuple[str, int]]:
        """Returns ``(label, probes)`` for each number of probes; raises UserError if there are fewer buckets."""
        for count in probes:
            if count > self.router.num_buckets:
                raise UserError(f"probes={count}: {self.name} has {self.router.num_buckets} buckets for each key/value head")
        return [(f"{count} probe" + "s" * (count != 1), count) for count in probes]

    def attach(self, model: "PreTrainedModel", probes: int) -> AbstractContextManager["Sparse"]:
        window: dict[str, Any] = {"recent": self.recent, "sink": self.sink, "dense_layers": self.dense_layers}
        return attach(model, qmodel=self.router, probes=probes, **window)


@dataclass(frozen=True)
class ComparedMethods:
    """The methods that each task compares with dense attention.

    Attributes
    ----------
    block_selections : methods of sparse prefill.
    bucket_routings : methods of sparse decoding.
    manifests : manifests of the artifacts, by kind.
    notes : remarks for the reader, e.g. a missing artifact and the command that creates it.
    """

    block_selections: list[BlockSelectionMethod]
    bucket_routings: list[BucketRoutingMethod]
    manifests: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def find_methods(cfg: EvalRunConfig, loaded: "Loaded", device: torch.device) -> ComparedMethods:
    """Loads the artifacts of ``cfg.artifacts``, or those of this model and name, and adds ``eval.baselines``.

    Raises
    ------
    UserError
        A given artifact is missing, or an artifact belongs to another model.
    """
    paths, notes = _artifact_paths(cfg)
    manifests, found = {}, {}
    for label, (kind, path) in paths.items():
        manifest = artifacts.read(path, kind=kind).manifest
        artifacts.check_model(manifest, loaded.fingerprint)
        manifests[label] = {"path": str(path), **manifest}
        found[label] = load(path).to(device)
    return ComparedMethods(_block_selections(cfg, found.get("gate")), _bucket_routings(cfg, found), manifests, notes)


def _artifact_paths(cfg: EvalRunConfig) -> tuple[dict[str, tuple[str, str | Path]], list[str]]:
    """Returns ``{label: (kind, path)}`` of the artifacts to read, and a note for each missing kind.

    A k-means of ``cfg.artifacts`` is compared with the k-means of this name, e.g. with and without RoPE; gates and query
    classifiers of ``cfg.artifacts`` replace those of this name.
    """
    paths: dict[str, tuple[str, str | Path]] = {}
    notes = []
    for kind, command in COMMANDS.items():
        own, given = artifacts.artifact_folder(cfg.outputs, cfg.model.name, cfg.name, kind), getattr(cfg.artifacts, kind)
        if own.exists() and (given is None or kind == "kmeans"):
            paths[kind] = (kind, own)
        if given is not None:
            both = kind in paths and Path(given).resolve() != own.resolve()
            paths[f"{kind} (named)" if both else kind] = (kind, given)
        if kind not in paths:
            notes.append(f"No {kind} at {own}: `msattn {command} model={cfg.model.name} name={cfg.name}` creates it.")
    return paths, notes


def _block_selections(cfg: EvalRunConfig, gate: "Gate | None") -> list[BlockSelectionMethod]:
    size = gate.cfg.block_size if gate else cfg.select.block_size  # baselines select among the same blocks as the gate
    # The thresholds of the calibrated policy are stored with a gate; baselines have none.
    fixed = cfg.select.with_policy("topk") if cfg.select.policy == "calibrated" else cfg.select
    trained = [BlockSelectionMethod("gate", replace(cfg.select, scores="gate"), gate)] if gate else []
    if gate and fixed != cfg.select:
        trained.append(BlockSelectionMethod("gate, top-k", replace(fixed, scores="gate"), gate))
    return trained + [BlockSelectionMethod(name, replace(fixed, scores=name, block_size=size)) for name in cfg.eval.baselines]


def _bucket_routings(cfg: EvalRunConfig, found: dict[str, Any]) -> list[BucketRoutingMethod]:
    window = (cfg.recent, cfg.sink, tuple(cfg.dense_layers))
    names = {"qmodel": "classifier", "kmeans": "k-means", "kmeans (named)": "k-means (named)"}
    rope = {label: ", RoPE" if getattr(router, "rope", False) else "" for label, router in found.items()}
    return [BucketRoutingMethod(name + rope[label], found[label], *window) for label, name in names.items() if label in found]
