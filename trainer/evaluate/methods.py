"""The methods that an evaluation compares: trained artifacts and training-free baselines."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from msattn.kernels.common.densities import bucket_densities, dense_buckets
from msattn.trainer import artifacts
from msattn.trainer.attach import attach
from msattn.trainer.config import CalibratedConfig, EvalRunConfig, MultiscaleConfig, SelectConfig, SparsityConfig
from msattn.trainer.config.select import own_keys
from msattn.trainer.errors import UserError
from msattn.trainer.methods.buckets import serving, top_buckets
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from msattn.trainer.methods.key_thresholds import most_probes, threshold_at
from msattn.trainer.methods.pages import PageRouter, far_probabilities
from msattn.trainer.methods.selection import Multiscale, Scorer, Selection
from msattn.trainer.serving.loading import LOADERS, AnyRouter
from msattn.trainer.serving.reads import serving_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from msattn.trainer.attach import Sparse
    from msattn.trainer.methods.gate.attn_gate import Gate
    from msattn.trainer.models.loading import Loaded

# Tasks that read block selections, and those that read bucket routings.
BLOCK_TASKS = {"perplexity", "recall", "needle", "documents", "ruler", "harness", "prompts", "latency", "throughput"}
ROUTED_TASKS = {"recall", "needle", "ruler", "harness", "prompts", "analysis", "decoding", "throughput"}
COMMANDS = {  # by kind of artifact that they create
    "gate": "train-gate",
    "kmeans": "fit-kmeans",
    "qmodel": "train-qmodel",
    "decode_gate": "train-gate gate.phase=decode",
}
CALIBRATED = QModel | DecodeGate  # routers that predict attention, so that they read shares of the keys


@dataclass(frozen=True)
class BlockSelectionMethod:
    """Sparse prefill: ``select`` names the block scores and the policy that turns them into blocks to read.

    ``scorer`` and ``thresholds`` are measured on training text (:mod:`msattn.trainer.evaluate.calibration`): the spans of the A
    shape, and thresholds for the calibrated policy. The artifact of a gate has its own.
    """

    name: str
    select: SelectConfig
    gate: "Gate | None" = None
    scorer: Scorer | None = None
    thresholds: dict[str, Any] | None = None

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
        measures = {"measure_recall": measure_recall, "measure_time": measure_time}
        if self.scorer is not None:
            return attach(model, select=self.selection(select), **measures)  # reads prompts of every length sparsely
        return attach(model, gate=self.gate, select=replace(select, dense_below=0), **measures)

    def selection(self, select: SelectConfig) -> Selection:
        """Returns the selection by ``select``, one of :meth:`settings`."""
        thresholds = self.thresholds if isinstance(select, CalibratedConfig) else None
        return Selection.from_config(select, self.gate, scorer=self.scorer, thresholds=thresholds)


def key_share_label(share: float) -> str:
    """Returns the setting of rows that read about a share of the visible keys."""
    return f"about {100 * share:.3g} % of keys"


@dataclass(frozen=True)
class BucketRoutingMethod:
    """Sparse decoding: ``bucket_decode`` reads the dense window and the buckets that ``router`` chooses.

    Tasks that measure a single setting take ``probes``, a number of buckets, or ``keys``, a mean share of the keys. A setting
    is one of the two: an integer is a number of buckets, a float a share of the keys. With ``by_share``, the numbers
    of probes that read about some shares of the keys, every task measures these instead of other numbers. With ``independent``
    each query head reads buckets of its own, which serving shares within a query group.
    """

    name: str
    router: AnyRouter
    probes: int
    recent: int
    sink: int
    dense_layers: tuple[int, ...]
    by_share: dict[float, int] | None = None
    keys: float | None = None
    independent: bool = False

    @classmethod
    def configured(cls, name: str, router: AnyRouter, cfg: EvalRunConfig) -> "BucketRoutingMethod":
        """Returns the method with the configured numbers, else those that the router's artifact records."""
        defaults = serving(cfg.model.presets, router.num_buckets)
        keys = cfg.keys if isinstance(router, CALIBRATED) else None
        return cls(name, router, **serving_numbers(router, cfg.routing, defaults), keys=keys)

    def name_at(self, setting: int | float) -> str:
        """Returns the name of the rows in a setting."""
        return self.name + ", calibrated" * isinstance(setting, float) + ", independent" * self.independent

    def own_settings(self) -> list[tuple[str, int | float]]:
        """Returns the setting of tasks that measure a single one."""
        return self.settings([self.probes]) if self.keys is None else self.settings([], [self.keys])

    def settings(self, probes: list[int], keys: Sequence[float] = ()) -> list[tuple[str, int | float]]:
        """Returns ``(label, setting)`` for each number of probes and, if the router predicts attention, each share of the keys.

        Raises
        ------
        UserError : there are fewer buckets than probes.
        """
        for count in probes:
            if count > self.router.num_buckets:
                raise UserError(f"probes={count}: {self.name} has {self.router.num_buckets} buckets for each key/value head")
        shares = keys if isinstance(self.router, CALIBRATED) else ()
        counts = probes if self.by_share is None else [count for count in probes if count == 0]
        return [
            *((f"{count} probe" + "s" * (count != 1), count) for count in counts),
            *((key_share_label(share), count) for share, count in (self.by_share or {}).items()),
            *((f"{100 * share:g} % of far keys", float(share)) for share in shares),
        ]

    def buckets(self, scores: Tensor, setting: int | float, sizes: Tensor | None = None) -> Tensor:
        """Returns the buckets that queries with bucket ``scores [n, H, C]`` read in a setting, int32 ``[n, H, L]``; -1 is none.

        ``sizes [n, H, C]`` are the numbers of keys, which a share of the keys needs.
        """
        if not isinstance(setting, float):
            return self.router.choose(scores, setting) if isinstance(self.router, PageRouter) else top_buckets(scores, setting)
        assert isinstance(self.router, CALIBRATED)
        assert self.router.thresholds is not None
        assert sizes is not None
        threshold, most = threshold_at(self.router.thresholds, setting), most_probes(setting, self.router.num_buckets)
        scores = far_probabilities(scores) if isinstance(self.router, PageRouter) else scores
        return dense_buckets(bucket_densities(scores, sizes), threshold, most)

    def reads(self, setting: int | float) -> dict[str, Any]:
        """Returns the arguments of ``msattn.attach`` that say which keys are read in a setting."""
        window = {"recent": self.recent, "sink": self.sink, "dense_layers": self.dense_layers}
        return {**window, "keys" if isinstance(setting, float) else "probes": setting}

    def attach(
        self, model: "PreTrainedModel", setting: int | float, *, dense_below: int = 0
    ) -> AbstractContextManager["Sparse"]:
        """Attaches the routing to ``model``, by default so that it decodes sparsely after prompts of every length."""
        options = self.reads(setting)
        return attach(model, qmodel=self.router, dense_below=dense_below, independent=self.independent, **options)


def with_independent(routings: Sequence[BucketRoutingMethod]) -> list[BucketRoutingMethod]:
    """Returns ``routings``, and after each the same with separate buckets for each query head."""
    return [replace(each, independent=independent) for each in routings for independent in (False, True)]


@dataclass(frozen=True)
class ComparedMethods:
    """The methods that each task compares with dense attention.

    Attributes
    ----------
    block_selections : methods of sparse prefill.
    bucket_routings : methods of sparse decoding.
    manifests : manifests of the artifacts, by kind.
    notes : remarks for the reader, e.g. a missing artifact and the command that creates it.
    read : the artifacts.
    """

    block_selections: list[BlockSelectionMethod]
    bucket_routings: list[BucketRoutingMethod]
    manifests: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    read: list[artifacts.Artifact] = field(default_factory=list)


def find_methods(cfg: EvalRunConfig, loaded: "Loaded", device: torch.device) -> ComparedMethods:
    """Loads the artifacts of ``cfg.artifacts`` and those of this model and name, and adds ``eval.baselines``.

    Raises
    ------
    UserError
        A given artifact is missing, or an artifact belongs to another model. Artifacts that no task reads are not looked for.
    """
    paths, notes = _artifact_paths(cfg)
    manifests: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    read: list[artifacts.Artifact] = []
    for label, (kind, path) in paths.items():
        module = LOADERS[kind](path)
        assert module.artifact is not None
        if warning := artifacts.check_model(module.artifact.manifest, loaded.fingerprint, strict=False):
            notes.append(warning)
        manifests[label] = {"path": str(path), **module.artifact.manifest}
        if isinstance(module, QModel) and module.routing_warning:
            notes.append(f"{label} {path}: {module.routing_warning}")
        read.append(module.artifact)
        found[label] = module.to(device)
    return ComparedMethods(_block_selections(cfg, found), _bucket_routings(cfg, found), manifests, notes, read)


def _artifact_paths(cfg: EvalRunConfig) -> tuple[dict[str, tuple[str, str | Path]], list[str]]:
    """Returns ``{label: (kind, path)}`` of the artifacts to read, and a note for each kind that is missing or not of this name.

    An artifact of ``cfg.artifacts`` is compared with that of this model and name, e.g. a k-means with and without RoPE.
    """
    paths: dict[str, tuple[str, str | Path]] = {}
    notes = []
    for kind, command in COMMANDS.items():
        if not {*cfg.eval.tasks} & (BLOCK_TASKS if kind == "gate" else ROUTED_TASKS):
            continue
        own = artifacts.artifact_folder(cfg.outputs, cfg.model.name, cfg.name, kind)
        default, given = artifacts.default_artifact(cfg, kind), getattr(cfg.artifacts, kind)
        if default == own:
            paths[kind] = (kind, own)
        if given is not None:
            both = kind in paths and artifacts.find(given, kind).resolve() != own.resolve()
            paths[f"{kind} ({'embedded' if given == 'embedded' else 'named'})" if both else kind] = (kind, given)
        elif default is not None and kind not in paths:
            paths[kind] = (kind, default)
            notes.append(f"There is no {kind} at {own}: the one that ships with msattn is measured.")
        if kind not in paths and kind != "decode_gate":  # another way to route, which few runs have
            notes.append(f"No {kind} at {own}: `msattn {command} {cfg.arguments(cfg.name)}` creates it.")
    return paths, notes


def _block_selections(cfg: EvalRunConfig, found: dict[str, Any]) -> list[BlockSelectionMethod]:
    gates = {label: module for label, module in found.items() if label.startswith("gate")}
    # Baselines select among the same blocks as the gate.
    size = next((gate.cfg.block_size for gate in gates.values()), cfg.select.block_size)
    methods = []
    for label, gate in gates.items():
        methods.append(BlockSelectionMethod(label, replace(cfg.select, scores="gate"), gate))
        if isinstance(cfg.select, CalibratedConfig) and label == "gate":  # for a comparison of the policies
            methods.append(BlockSelectionMethod(f"{label}, top-k", cfg.select.with_policy("topk", scores="gate"), gate))
    return methods + [
        BlockSelectionMethod(name, replace(cfg.select, scores=name, block_size=size)) for name in cfg.eval.baselines
    ]


def _bucket_routings(cfg: EvalRunConfig, found: dict[str, Any]) -> list[BucketRoutingMethod]:
    methods = []
    for kind, name in {"qmodel": "classifier", "decode_gate": "decode gate", "kmeans": "k-means"}.items():
        for label, router in found.items():
            if label.startswith(kind):
                rope = ", RoPE" if getattr(router, "rope", False) else ""
                methods.append(BucketRoutingMethod.configured(label.replace(kind, name) + rope, router, cfg))
    return methods
