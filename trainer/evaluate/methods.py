"""The methods that an evaluation compares: trained artifacts and training-free baselines."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from msattn.trainer import artifacts, data
from msattn.trainer.attach import LOADERS, attach, serving_numbers
from msattn.trainer.config import CalibratedConfig, EvalRunConfig, MultiscaleConfig, SelectConfig, SparsityConfig
from msattn.trainer.config.select import own_keys
from msattn.trainer.data.overlap import check_heldout
from msattn.trainer.errors import UserError
from msattn.trainer.models.families import check_length
from msattn.trainer.saap.kmeans import KMeans
from msattn.trainer.saap.qmodel import QModel
from msattn.trainer.saap.routing import serving
from msattn.trainer.seer.a_shape import measure_spans
from msattn.trainer.seer.calibrate import CALIBRATION_CHUNKS, calibrate
from msattn.trainer.seer.select import Multiscale, Scorer, Selection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from msattn.trainer.attach import Sparse
    from msattn.trainer.models.loading import Loaded
    from msattn.trainer.seer.gate import Gate

Router = KMeans | QModel
COMMANDS = {"gate": "train-gate", "kmeans": "fit-kmeans", "qmodel": "train-qmodel"}  # by kind of artifact that they create


@dataclass(frozen=True)
class BlockSelectionMethod:
    """Sparse prefill: ``select`` names the block scores and the policy that turns them into blocks to read.

    ``scorer`` and ``thresholds`` are what a baseline needs from training text: the spans of the A shape, and the thresholds of
    its scores for the calibrated policy. A gate has its own.
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


@dataclass(frozen=True)
class BucketRoutingMethod:
    """Sparse decoding: ``bucket_decode`` reads the dense window and the buckets that ``router`` chooses.

    ``probes`` is the number of buckets for tasks that measure a single one.
    """

    name: str
    router: Router
    probes: int
    recent: int
    sink: int
    dense_layers: tuple[int, ...]

    @classmethod
    def configured(cls, name: str, router: Router, cfg: EvalRunConfig) -> "BucketRoutingMethod":
        """Returns the method with the configured numbers, else those that the router's artifact records."""
        defaults = serving(cfg.model.presets, router.num_buckets)
        return cls(name, router, **serving_numbers(router, cfg.routing, defaults))

    def settings(self, probes: list[int]) -> list[tuple[str, int]]:
        """Returns ``(label, probes)`` for each number of probes; raises UserError if there are fewer buckets."""
        for count in probes:
            if count > self.router.num_buckets:
                raise UserError(f"probes={count}: {self.name} has {self.router.num_buckets} buckets for each key/value head")
        return [(f"{count} probe" + "s" * (count != 1), count) for count in probes]

    def attach(self, model: "PreTrainedModel", probes: int, *, dense_below: int = 0) -> AbstractContextManager["Sparse"]:
        """Attaches the routing to ``model``, by default so that it decodes sparsely after prompts of every length."""
        window: dict[str, Any] = {"recent": self.recent, "sink": self.sink, "dense_layers": self.dense_layers}
        return attach(model, qmodel=self.router, probes=probes, dense_below=dense_below, **window)


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
    """Loads the artifacts of ``cfg.artifacts`` and those of this model and name, and adds ``eval.baselines``.

    Raises
    ------
    UserError
        A given artifact is missing, or an artifact belongs to another model.
    """
    paths, notes = _artifact_paths(cfg)
    manifests, found = {}, {}
    for label, (kind, path) in paths.items():
        manifest = artifacts.read(path, kind=kind).manifest
        if warning := artifacts.check_model(manifest, loaded.fingerprint, strict=False):
            notes.append(warning)
        manifests[label] = {"path": str(path), **manifest}
        found[label] = LOADERS[kind](path).to(device)
    return ComparedMethods(_block_selections(cfg, found), _bucket_routings(cfg, found), manifests, notes)


def calibrate_baselines(methods: ComparedMethods, cfg: EvalRunConfig, loaded: "Loaded") -> ComparedMethods:
    """Returns ``methods`` with the spans of the A shape, and with thresholds of the baselines if ``select`` is calibrated.

    They are measured as those of a gate, on the first training chunks of ``data``, which hold no held-out text.

    Raises
    ------
    UserError : as :func:`msattn.trainer.data.training_chunks`, or ``data.seq_len`` exceeds the model's positions.
    """
    calibrated = isinstance(cfg.select, CalibratedConfig)
    needy = [each for each in methods.block_selections if each.gate is None and (calibrated or each.name == "a_shape")]
    if not needy or set(cfg.eval.tasks) <= {"analysis", "decoding"}:  # tasks without block selection
        return methods
    check_length(loaded.model.config, cfg.data.seq_len)
    check_heldout(cfg.data)
    text = replace(cfg.data, needles=cfg.model.presets.needles)  # as in the training of this model's gates
    chunks = data.chunks(text, loaded.tokenizer, seed=cfg.seed, num_chunks=CALIBRATION_CHUNKS)
    items = [chunks[i] for i in range(len(chunks))]

    def measured(method: BlockSelectionMethod) -> BlockSelectionMethod:
        if method.name == "a_shape":
            scorer: Scorer = measure_spans(loaded.model, items, method.select.block_size)
        else:
            scorer = Selection.from_config(method.select.with_policy("topk")).scorer
        return replace(method, scorer=scorer, thresholds=calibrate(scorer, loaded.model, items) if calibrated else None)

    return replace(methods, block_selections=[measured(each) if each in needy else each for each in methods.block_selections])


def _artifact_paths(cfg: EvalRunConfig) -> tuple[dict[str, tuple[str, str | Path]], list[str]]:
    """Returns ``{label: (kind, path)}`` of the artifacts to read, and a note for each kind that is missing or not of this name.

    An artifact of ``cfg.artifacts`` is compared with that of this model and name, e.g. a k-means with and without RoPE.
    """
    paths: dict[str, tuple[str, str | Path]] = {}
    notes = []
    for kind, command in COMMANDS.items():
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
        if kind not in paths:
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
    for kind, name in {"qmodel": "classifier", "kmeans": "k-means"}.items():
        for label, router in found.items():
            if label.startswith(kind):
                rope = ", RoPE" if getattr(router, "rope", False) else ""
                methods.append(BucketRoutingMethod.configured(label.replace(kind, name) + rope, router, cfg))
    return methods
