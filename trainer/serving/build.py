"""Construction of the sparse attention of a model from the options of :func:`msattn.attach`, for
any engine that runs it: transformers or vLLM. Artifacts are loaded, and checked against the model.
"""

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import BeforeValidator
from torch import nn
from transformers import PreTrainedConfig

from msattn.trainer import artifacts
from msattn.trainer.config import SelectConfig
from msattn.trainer.config.commands import BudgetOptions, ReadOptions
from msattn.trainer.config.schema import Flag, Instance, Sparsity, schema
from msattn.trainer.config.select import ROUTERS, select_config
from msattn.trainer.config.sizes import BlockSizes
from msattn.trainer.config.values import one_of, require
from msattn.trainer.errors import ModelWarning, UserError
from msattn.trainer.methods.base import check_finite
from msattn.trainer.methods.buckets import PRESETS, Router
from msattn.trainer.methods.budgets import Probes
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from msattn.trainer.methods.selection import Selection
from msattn.trainer.methods.untrained import untrained_router
from msattn.trainer.models.break_even import decoding_break_even, prefill_break_even
from msattn.trainer.models.families import (
    check_shape,
    check_supported,
    head_dim,
    num_heads,
    num_kv_heads,
    num_layers,
    served_layers,
)
from msattn.trainer.models.identity import config_fingerprint
from msattn.trainer.models.parallel import ModelShard
from msattn.trainer.models.rope import Rotation
from msattn.trainer.models.timing import PhaseTimer
from msattn.trainer.serving.attend import Sparse
from msattn.trainer.serving.dispatch import Dispatch, Routing
from msattn.trainer.serving.statistics import Statistics
from msattn.trainer.storage.replace import current_folder

# options that only a router uses
DECODING = ("threshold", "keys", "probes", "recent", "sink", "dense_layers")
GATE = "a gate of phase prefill, or the folder or Hub id of one"
SELECT = "a name, a dictionary, a SelectConfig or a Selection"
ROUTER = (
    "a query classifier, a decode gate, a k-means or another Router, its name, or the folder "
    "or Hub id of an artifact"
)
Switch = Annotated[
    Flag, BeforeValidator(lambda value: bool(value) if isinstance(value, np.bool_) else value)
]


@schema(kw_only=True)
class AttachOptions(BudgetOptions):
    """The options of :func:`msattn.attach`, which explains them, and their types; those that the
    configuration also has are inherited from it.
    """

    gate: Annotated[Gate | str | Path | None, Instance(GATE)] = None
    select: Annotated[Selection | SelectConfig | Mapping | str | None, Instance(SELECT)] = None
    sparsity: Sparsity | None = None
    qmodel: Annotated[Router | str | Path | None, Instance(ROUTER)] = None
    independent: Switch = False
    strict: Switch = False
    cuda_graphs: Switch = True
    measure_recall: Switch = False
    measure_time: Switch = False

    def __post_init__(self) -> None:
        self.check_budget()


# options that vLLM and config.json also take: what is attached, and what is read
ARTIFACT_KEYS = (
    "gate",
    "select",
    "sparsity",
    "qmodel",
    *(item.name for item in fields(ReadOptions)),
)


def artifact_options(given: Any, where: str) -> AttachOptions:
    """Returns the options of artifacts given by a file or an engine; ``where`` begins the UserError
    for unknown names.
    """
    require(
        isinstance(given, Mapping),
        where,
        given,
        f"expected a mapping with {', '.join(ARTIFACT_KEYS)}",
    )
    for name in given:
        require(name in ARTIFACT_KEYS, where, name, f"expected {', '.join(ARTIFACT_KEYS)}")
    return AttachOptions(**given)


class ModelInfo(NamedTuple):
    """Description of the model that sparse attention is built for, independent of the engine."""

    config: PreTrainedConfig
    dtype: torch.dtype
    fingerprint: Callable[[], dict[str, Any]]
    shard: Callable[[], ModelShard]  # returns the layers and heads that this rank computes
    # moves modules to the model's device and returns the device
    to_device: Callable[..., torch.device]


def _warn(message: str) -> None:
    warnings.warn(message, ModelWarning, stacklevel=6)  # at the caller's with statement


def build_sparse(
    model: ModelInfo, options: AttachOptions, warn: Callable[[str], None] = _warn
) -> Sparse:
    """Builds the sparse attention of a model of a supported family; raises UserError like
    :func:`msattn.attach`.
    """
    gate, router, config = options.gate, options.qmodel, model.config
    require(
        model.dtype != torch.float64,
        "model.dtype",
        "float64",
        "expected float32, float16 or bfloat16",
    )
    gate = Gate.load(gate) if isinstance(gate, str | Path) else gate
    router = load_router(router, config) if isinstance(router, str | Path) else router
    selection, chosen = _selection(options, gate)
    if selection is None and router is None:
        raise UserError("attach: nothing to attach; give gate=, select= or qmodel=")
    _check_artifacts(model, selection, router, warn, strict=options.strict)
    routed = _routing(router, options, config, warn)
    shard = model.shard()
    if not shard.is_whole:
        selection = _sharded(selection, chosen, shard)
        if routed is not None:
            part = routed.router.shard(shard)
            routed = replace(routed, router=part, layers=routed.layers.intersection(part.layers))
    device = model.to_device(
        None if selection is None else selection.gate, None if routed is None else routed.router
    )
    group = num_heads(config) // num_kv_heads(config)
    statistics = Statistics(
        PhaseTimer(device) if options.measure_time else None,
        reads_per_head=group if options.independent else 1,
    )
    below = options.dense_below
    dispatch = Dispatch(
        selection=selection,
        routed=routed,
        dense_below=_prompt_break_even(chosen, device) if below is None else below,
        shortest_routed=(
            _token_break_even(model, routed, device) if below is None else lambda batch: below
        ),
    )
    return Sparse(
        dispatch,
        statistics,
        rotation=Rotation.of(config, device),
        kv_heads=num_kv_heads(config) // shard.ranks,
        measure_recall=options.measure_recall,
    )


def check_options(config: PreTrainedConfig, options: AttachOptions) -> None:
    """Raises UserError, like :func:`msattn.attach`, for options that do not work with a model with
    this configuration.
    """
    check_supported(config)
    info = ModelInfo(
        config=config,
        dtype=torch.float32,
        fingerprint=partial(config_fingerprint, config),
        shard=ModelShard,
        to_device=lambda *modules: torch.device("cpu"),
    )
    build_sparse(info, options, warn=lambda message: None)  # serving warns


def _selection(
    options: AttachOptions, gate: Gate | None
) -> tuple[Selection | None, SelectConfig | None]:
    """Returns the selection (None for dense prompts) and the configuration it was built from (None
    for an object).
    """
    select, sparsity = options.select, options.sparsity
    if isinstance(select, Selection):
        if gate is not None:
            raise UserError(
                "gate: a Selection has its own scores; give one of gate and select, or a "
                "SelectConfig"
            )
        if sparsity is not None:
            raise UserError(f"sparsity={sparsity}: a Selection has its own policy")
        return select, None
    if select is None and gate is None:
        if sparsity is not None:
            raise UserError(
                f"sparsity={sparsity}: there is nothing to select; give gate= or select="
            )
        return None, None
    chosen = select_config(
        select or ("calibrated" if gate and gate.thresholds else "topk"), sparsity=sparsity
    )
    if gate is not None and not chosen.by_gate:
        raise UserError(
            f"gate: select.scores={chosen.scores} are used instead of its scores; give one of the "
            f"two"
        )
    return Selection.from_config(chosen, gate), chosen


def _check_artifacts(
    model: ModelInfo,
    selection: Selection | None,
    router: Router | None,
    warn: Callable[[str], None],
    *,
    strict: bool,
) -> None:
    """Raises UserError for a selection or artifacts that do not fit the model, and warns about
    doubtful ones.
    """
    gate = None if selection is None else selection.gate
    saved = [
        each.artifact for each in (gate, router) if each is not None and each.artifact is not None
    ]
    identity = model.fingerprint() if saved else {}
    for artifact in saved:
        if warning := artifacts.check_model(artifact.manifest, identity, strict=strict):
            warn(warning)
    if router is not None and router.routing_warning:
        warn(router.routing_warning)
    if selection is not None:
        check_selection(selection, model.config)


def _sharded(
    selection: Selection | None, chosen: SelectConfig | None, shard: ModelShard
) -> Selection | None:
    """Returns the selection, built from ``chosen``, with the gate's layers and heads of one
    rank.
    """
    if selection is None or selection.gate is None:
        return selection
    if chosen is None:
        raise UserError(
            "select: a Selection with a gate cannot be divided among ranks; give gate= and a "
            "SelectConfig"
        )
    return Selection.from_config(chosen, selection.gate.shard(shard))


def _prompt_break_even(select: SelectConfig | None, device: torch.device) -> int:
    """Returns the prompt length in tokens from which attention over blocks is faster than dense; 0
    without a sparsity.
    """
    if select is None or select.scores == "oracle" or select.sparsity is None:
        return 0  # the oracle needs dense attention anyway
    return prefill_break_even(select.sparsity, device)


def _routing(
    router: Router | None,
    options: AttachOptions,
    config: PreTrainedConfig,
    warn: Callable[[str], None],
) -> Routing | None:
    """Returns how new tokens read the buckets of a router.

    Raises UserError for a budget that the router cannot serve, a number that is out of range or has
    no use, or a router for another model.
    """
    given = {name: getattr(options, name) for name in DECODING}
    if router is None:
        for name, value in given.items():
            if value is not None:
                raise UserError(
                    f"{name}={value!r}: only decoding with a router uses it; give qmodel="
                )
        return None
    router.check_model(config)
    numbers, last = router.decode_numbers(given), num_layers(config) - 1
    dense = numbers.pop("dense_layers")
    require(max(dense, default=0) <= last, "dense_layers", dense, f"expected 0 to {last}")
    budget = router.budget(
        probes=numbers.pop("probes"), keys=given["keys"], threshold=given["threshold"]
    )
    if budget == Probes(router.num_buckets) and options.probes is options.keys is None:
        warn(f"probes={router.num_buckets} by default: every bucket is read, so decoding is dense")
    return Routing(
        router=router,
        budget=budget,
        layers=frozenset(router.layers).difference(dense),
        independent=options.independent,
        **numbers,
    )


def _token_break_even(
    model: ModelInfo, routed: Routing | None, device: torch.device
) -> Callable[[int], int]:
    """Returns the function from a batch size to the number of keys from which new tokens read
    buckets.
    """
    if routed is None:
        return lambda batch: sys.maxsize
    config, (keys, share) = model.config, routed.router.mean_keys(routed.budget)
    key_bytes = 2 * num_kv_heads(config) * head_dim(config) * model.dtype.itemsize
    return cache(
        partial(decoding_break_even, device, key_bytes, routed.recent + routed.sink + keys, share)
    )


def load(path: str | Path) -> Gate | KMeans | QModel | DecodeGate:
    """Loads an artifact of any kind, on the CPU.

    Parameters
    ----------
    path : folder of an artifact, or the id of a Hub repository.

    Raises
    ------
    UserError : the artifact is missing, damaged or has another format version.
    """
    return artifacts.KINDS[artifacts.read_kind(path)].load(path)


def load_router(router: str | Path, config: PreTrainedConfig) -> Router:
    """Returns the training-free router of this name, for the model with this ``config``, or loads a
    router.

    From a folder with several, loads the one that has precedence. A str that is a name is not a
    folder; ``./quest`` is.
    """
    if isinstance(router, str) and router in ROUTERS:
        return untrained_router(router).for_model(
            config, PRESETS.num_buckets, served_layers(config), seed=0
        )
    if (
        isinstance(router, str)
        and router.isidentifier()
        and not os.path.lexists(current_folder(Path(router)))
    ):
        one_of("qmodel", router, (*ROUTERS, "embedded", "the folder or Hub id of an artifact"))
    artifact = load(artifacts.find(router, *artifacts.ROUTER_KINDS))
    if isinstance(artifact, Gate):
        accepted = "expected a qmodel, a decode_gate or a kmeans artifact"
        raise UserError(f"qmodel={router}: this is a gate for prefill; {accepted}")
    return artifact


def check_model(model: Any) -> None:
    """Raises UserError for an object that is not a model, and like
    :func:`msattn.trainer.models.families.check_supported`.
    """
    is_model = (
        isinstance(model, nn.Module) and hasattr(model, "get_decoder") and hasattr(model, "config")
    )
    require(is_model, "model", repr(model), "expected a causal language model of transformers")
    check_supported(model.config)


def check_selection(selection: Selection, config: PreTrainedConfig) -> None:
    """Raises UserError for a selection without a valid policy and scorer, or whose gate is for
    another model or not finite.
    """
    policy, scorer = selection.policy, selection.scorer
    policies = policy if isinstance(policy, Sequence) else [policy] * num_layers(config)
    ok = len(policies) == num_layers(config) and all(map(callable, policies))
    accepted = f"expected a policy, e.g. TopK(0.5), or one for each of {num_layers(config)} layers"
    require(ok, "select.policy", repr(policy), accepted)
    ok = callable(scorer) and isinstance(getattr(scorer, "sizes", None), BlockSizes)
    require(ok, "select.scorer", repr(scorer), "expected a scorer, e.g. Quest()")
    gate, served = selection.gate, served_layers(config)
    if gate is not None:
        check_shape("gate", gate.model_shape(), config)
        require(
            gate.layer_numbers == served,
            "gate.layer_numbers",
            gate.layer_numbers,
            f"expected the layers {served}",
        )
        check_finite("gate", gate)
