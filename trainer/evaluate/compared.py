"""The methods that an evaluation compares: trained artifacts and training-free baselines."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from msattn.trainer import artifacts, models
from msattn.trainer.config import EvalRunConfig, SelectConfig
from msattn.trainer.config.policies import Multiscale, own_keys
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.row import WINDOW, Setting
from msattn.trainer.evaluate.task import task_of
from msattn.trainer.methods.base import CALIBRATED, DENSE, INDEPENDENT, ROPE, TOP_K, Method, Scorer
from msattn.trainer.methods.blocks import SINK_AND_LOCAL, AlwaysRead
from msattn.trainer.methods.buckets import Router
from msattn.trainer.methods.gate.attn_gate import GATE_SCORERS, Gate, GateScores
from msattn.trainer.methods.selection import Selection, always_read
from msattn.trainer.methods.thresholds import BlockThresholds
from msattn.trainer.methods.untrained import untrained_router, untrained_scorer
from msattn.trainer.models.loading import Described, Loaded
from msattn.trainer.serving.attach import Sparse, attach


class MethodSetting(NamedTuple):
    """A method in a setting; ``attach`` returns the context in which it runs."""

    method: Method
    setting: Setting
    attach: Callable[..., AbstractContextManager[Any]]


@dataclass(frozen=True)
class ComparedSelection:
    """Sparse prefill: ``select`` names the block scores and the policy that turns them into blocks
    to read.

    ``scorer`` and ``thresholds`` are measured on training text
    (:mod:`msattn.trainer.evaluate.calibration`): the spans of the A shape, and thresholds for the
    calibrated policy. The artifact of a gate has its own.
    """

    method: Method
    select: SelectConfig
    gate: Gate | None = None
    scorer: Scorer | None = None
    thresholds: BlockThresholds | None = None

    @property
    def always(self) -> AlwaysRead:
        """The blocks that every row reads; ``dense_queries`` is left out."""
        recorded = SINK_AND_LOCAL if self.gate is None else self.gate.always
        return always_read(self.select, recorded)._replace(dense_queries=0)

    def settings(self, sparsities: list[float]) -> list[tuple[Setting, SelectConfig]]:
        """Returns ``(setting, selection)`` for each setting to measure.

        Policies with a sparsity are measured at each of ``sparsities``, other policies once, as
        configured. Multiscale is compared with top-k that reads the same number of tokens.
        """
        if self.select.sparsity is not None:
            return [(Setting("sparsity", s), replace(self.select, sparsity=s)) for s in sparsities]
        if self.select.shares is not None:
            shares, cost = (
                " ".join(f"{share:g}" for share in self.select.shares),
                Multiscale(self.select.shares).cost,
            )
            topk_of_equal_cost = self.select.with_policy("topk", sparsity=1 - cost)
            return [
                (Setting(f"shares {shares}"), self.select),
                (Setting("sparsity", round(1 - cost, 4)), topk_of_equal_cost),
            ]
        (key,) = own_keys(self.select.policy)
        return [(Setting(self.select.policy, getattr(self.select, key)), self.select)]

    def cases(self, model: PreTrainedModel, sparsities: list[float]) -> list[MethodSetting]:
        settings = self.settings(sparsities)
        return [
            MethodSetting(self.method, label, partial(self.attach, model, select))
            for label, select in settings
        ]

    def attach(
        self,
        model: PreTrainedModel,
        select: SelectConfig,
        *,
        measure_recall: bool = False,
        measure_time: bool = False,
    ) -> AbstractContextManager[Sparse]:
        """Attaches the selection to ``model``, so that prompts of every length use sparse
        attention.
        """
        selection = self.selection(select)
        return attach(
            model, select=selection, measure_recall=measure_recall, measure_time=measure_time
        )

    def selection(self, select: SelectConfig) -> Selection:
        thresholds = self.thresholds if select.policy == "calibrated" else None
        return Selection.from_config(select, self.gate, scorer=self.scorer, thresholds=thresholds)


@dataclass(frozen=True)
class ComparedRouting:
    """Sparse decoding: ``bucket_decode`` reads the dense window and the buckets that ``router``
    chooses.

    Tasks that measure a single setting use ``keys``, a mean share of the keys, or otherwise
    ``probes`` buckets. A setting is one of the two: an integer is a number of buckets, a float a
    share of the keys. ``by_share`` holds numbers of probes that read about given shares of the
    keys; if set, every task measures these. With ``independent`` each query head reads its own
    buckets, whereas serving shares them within a query group.
    """

    method: Method
    router: Router
    probes: int
    recent: int
    sink: int
    dense_layers: tuple[int, ...]
    by_share: dict[float, int] | None = None
    keys: float | None = None
    independent: bool = False

    @classmethod
    def configured(cls, method: Method, router: Router, cfg: EvalRunConfig) -> "ComparedRouting":
        """Returns the router with the configured settings, otherwise with those that its artifact
        records.
        """
        keys = cfg.keys if router.predicts_attention else None
        return cls(
            method, router, **router.decode_numbers(cfg.routing, cfg.model.presets), keys=keys
        )

    def method_at(self, setting: int | float) -> Method:
        """Returns the method of the rows in a setting; with 0 probes only the dense window is
        read.
        """
        if setting == 0:
            return WINDOW
        variants = [CALIBRATED] if isinstance(setting, float) else []
        return self.method.of(*variants, *([INDEPENDENT] if self.independent else []))

    def cases(
        self, model: PreTrainedModel, probes: list[int] | None = None, keys: Sequence[float] = ()
    ) -> list[MethodSetting]:
        """Returns the cases with ``probes`` and at shares ``keys``; without ``probes`` the one of
        :meth:`own_settings`.
        """
        settings = self.own_settings() if probes is None else self.settings(probes, keys)
        return [
            MethodSetting(self.method_at(number), label, partial(self.attach, model, number))
            for label, number in settings
        ]

    def own_settings(self) -> list[tuple[Setting, int | float]]:
        """Returns the setting of tasks that measure a single one."""
        return self.settings([self.probes]) if self.keys is None else self.settings([], [self.keys])

    def settings(
        self, probes: list[int], keys: Sequence[float] = ()
    ) -> list[tuple[Setting, int | float]]:
        """Returns ``(setting, number)`` for each number of probes and, if the router predicts
        attention, each share.
        """
        for count in probes:
            if count > self.router.num_buckets:
                raise UserError(
                    f"probes={count}: {self.method} has {self.router.num_buckets} buckets for "
                    f"each key/value head"
                )
        shares = keys if self.router.predicts_attention else ()
        counts = probes if self.by_share is None else [count for count in probes if count == 0]
        return [
            *((Setting("probes", count), count) for count in counts),
            *(
                (Setting("about keys", share), count)
                for share, count in (self.by_share or {}).items()
            ),
            *((Setting("far keys", float(share)), float(share)) for share in shares),
        ]

    def buckets(self, scores: Tensor, setting: int | float, sizes: Tensor | None = None) -> Tensor:
        """Returns the buckets that queries with bucket ``scores [n, H, C]`` read in a setting,
        int32 ``[n, H, L]``; -1 is none.

        ``sizes [n, H, C]`` are the numbers of keys, which a share of the keys needs.
        """
        budget = (
            self.router.budget(keys=setting)
            if isinstance(setting, float)
            else self.router.budget(probes=setting)
        )
        return self.router.choose(scores, budget, None if sizes is None else lambda: sizes)

    def attach_options(self, setting: int | float) -> dict[str, Any]:
        """Returns the arguments of ``msattn.attach`` that say which keys are read in a setting."""
        window = {"recent": self.recent, "sink": self.sink, "dense_layers": self.dense_layers}
        return {**window, "keys" if isinstance(setting, float) else "probes": setting}

    def attach(
        self, model: PreTrainedModel, setting: int | float, *, dense_below: int = 0
    ) -> AbstractContextManager[Sparse]:
        """Attaches the routing to ``model``, by default so that it decodes sparsely after prompts
        of every length.
        """
        options = self.attach_options(setting)
        return attach(
            model,
            qmodel=self.router,
            dense_below=dense_below,
            independent=self.independent,
            **options,
        )


@dataclass(frozen=True)
class Compared:
    """The methods that each task compares with dense attention, and the artifacts that they were
    read from.
    """

    block_selections: list[ComparedSelection]  # for sparse prefill
    bucket_routings: list[ComparedRouting]  # for sparse decoding
    # by kind, or "kind (source)"
    manifests: dict[str, dict[str, Any]] = field(default_factory=dict)
    # for the reader, e.g. a missing artifact and the command that creates it
    notes: list[str] = field(default_factory=list)
    read: list[artifacts.Artifact] = field(default_factory=list)

    def on(self, loaded: Loaded) -> "Compared":
        """Moves the methods to the device of a model, and returns them with a note for each
        artifact of other weights.
        """
        for module in (
            *(selection.gate for selection in self.block_selections),
            *(routing.router for routing in self.bucket_routings),
        ):
            if module is not None:
                module.to(loaded.model.device)
        warnings = [
            artifacts.check_model(artifact.manifest, loaded.fingerprint, strict=False)
            for artifact in self.read
        ]
        return replace(self, notes=[*self.notes, *filter(None, warnings)])

    def with_independent(self, wanted: bool) -> "Compared":
        """Returns the methods and, if ``wanted``, after each routing the same with separate buckets
        for each query head.
        """
        kinds = (False, True) if wanted else (False,)
        routings = [
            replace(routing, independent=independent)
            for routing in self.bucket_routings
            for independent in kinds
        ]
        return replace(self, bucket_routings=routings)

    def prefill_cases(self, model: PreTrainedModel, sparsities: list[float]) -> list[MethodSetting]:
        """Returns dense attention, and the cases of each block selection."""
        sparse = [
            case
            for selection in self.block_selections
            for case in selection.cases(model, sparsities)
        ]
        return [MethodSetting(DENSE, Setting(), nullcontext), *sparse]

    def cases(
        self,
        model: PreTrainedModel,
        sparsities: list[float],
        probes: list[int] | None = None,
        keys: Sequence[float] = (),
    ) -> list[MethodSetting]:
        """Returns the prefill cases, and the cases of each routing."""
        routed = [
            case for routing in self.bucket_routings for case in routing.cases(model, probes, keys)
        ]
        return [*self.prefill_cases(model, sparsities), *routed]


def find_compared(cfg: EvalRunConfig, model: Described | Loaded) -> Compared:
    """Loads the artifacts of ``cfg.artifacts`` and of this model and name that a task reads, and
    adds untrained methods.

    All are on the CPU, and only compared with the configuration of the model; see
    :meth:`Compared.on`.
    """
    paths, notes = _artifact_paths(cfg)
    manifests: dict[str, dict[str, Any]] = {}
    modules: list[tuple[_Path, Any]] = []
    for path in paths:
        module = artifacts.KINDS[path.kind].load(path.path)
        assert module.artifact is not None
        artifacts.check_model(module.artifact.manifest, model.fingerprint, strict=False)
        label = f"{path.kind} ({path.source})" if path.source else path.kind
        manifests[label] = {"path": str(path.path), **module.artifact.manifest}
        if getattr(module, "routing_warning", None):
            notes.append(f"{label} {path.path}: {module.routing_warning}")
        modules.append((path, module))
    read = [module.artifact for _, module in modules]
    routings = _bucket_routings(cfg, modules)
    routings += _untrained_routings(cfg, routings, model.config)
    return Compared(_block_selections(cfg, modules), routings, manifests, notes, read)


class _Path(NamedTuple):
    """An artifact to read; ``source`` distinguishes a second one of the same kind."""

    kind: str
    path: str | Path
    source: str = ""


def _artifact_paths(cfg: EvalRunConfig) -> tuple[list[_Path], list[str]]:
    """Returns the artifacts to read, and a note for each kind that is missing or not of this name.

    An artifact of ``cfg.artifacts`` is compared with that of this model and name, e.g. a k-means
    with and without RoPE.
    """
    paths: list[_Path] = []
    notes = []
    for kind in artifacts.KINDS.values():
        if not reads(cfg, "blocks" if kind.precedence is None else "routings"):
            continue
        folder, given = cfg.folder / kind.name, getattr(cfg.artifacts, kind.name)
        default = artifacts.default_artifact(cfg, kind.name)
        own = [_Path(kind.name, folder)] if default == folder else []
        if given is not None:
            if own and artifacts.find(given, kind.name).resolve() == folder.resolve():
                own = []
            source = ("embedded" if given == "embedded" else "named") if own else ""
            own.append(_Path(kind.name, given, source))
        elif default is not None and not own:
            own = [_Path(kind.name, default)]
            notes.append(
                f"There is no {kind.name} at {folder}: the one that ships with msattn is measured."
            )
        if not own and kind.expected:
            command = f"msattn {kind.command} {cfg.arguments(cfg.name)}"
            notes.append(f"No {kind.name} at {folder}: `{command}` creates it.")
        paths += own
    return paths, notes


def _block_selections(
    cfg: EvalRunConfig, modules: list[tuple[_Path, Any]]
) -> list[ComparedSelection]:
    gates = [(path, module) for path, module in modules if path.kind == "gate"]
    # Baselines select among the same blocks as the gate.
    sizes = (gates[0][1].cfg if gates else cfg.select).sizes.arguments
    methods = []
    for path, gate in gates:
        cfg.select.check_gate(gate.cfg.sizes)  # before the weights are read
        method = GATE_SCORERS[cfg.select.scores].method.of(source=path.source)
        methods.append(ComparedSelection(method, cfg.select, gate))
        if cfg.select.policy == "calibrated" and not path.source:  # to compare the policies
            methods.append(
                ComparedSelection(method.of(TOP_K), cfg.select.with_policy("topk"), gate)
            )
        if cfg.select.scores != "gate" and not path.source:  # to compare the scores
            methods.append(
                ComparedSelection(GateScores.method, replace(cfg.select, scores="gate"), gate)
            )
    return methods + [
        ComparedSelection(untrained_scorer(name).method, replace(cfg.select, scores=name, **sizes))
        for name in cfg.eval.baselines
    ]


def _bucket_routings(cfg: EvalRunConfig, modules: list[tuple[_Path, Any]]) -> list[ComparedRouting]:
    methods = []
    for kind in artifacts.ROUTER_KINDS:
        for path, router in modules:
            if path.kind == kind:
                method = router.method.of(*[ROPE] * router.rope, source=path.source)
                methods.append(ComparedRouting.configured(method, router, cfg))
    return methods


def _untrained_routings(
    cfg: EvalRunConfig, trained: list[ComparedRouting], config: PreTrainedConfig
) -> list[ComparedRouting]:
    """Returns ``eval.routers``, with the number of buckets, the layers and the dense window of the
    first trained routing.

    Without one, they use the number of buckets of ``model.presets`` and route all served layers.
    """
    if not reads(cfg, "routings"):
        return []
    like = trained[0] if trained else None
    buckets = like.router.num_buckets if like else cfg.model.presets.num_buckets
    layers = like.router.layers if like else models.served_layers(config)
    routings = []
    for name in cfg.eval.routers:
        router = untrained_router(name).for_model(config, buckets, layers, cfg.seed)
        same = replace(like, method=router.method, router=router, keys=None) if like else None
        routings.append(same or ComparedRouting.configured(router.method, router, cfg))
    return routings


def reads(cfg: EvalRunConfig, kind: Literal["blocks", "routings"]) -> bool:
    return any(kind in task_of(task).reads for task in cfg.eval.tasks)
