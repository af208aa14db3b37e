"""The public functions ``attach`` and ``enable``, which run a model with sparse attention, and ``load`` for artifacts."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from msattn.trainer import artifacts
from msattn.trainer.config import SelectConfig, SparsityConfig
from msattn.trainer.config.select import select_config
from msattn.trainer.config.values import require
from msattn.trainer.errors import ModelWarning, UserError
from msattn.trainer.models.break_even import break_even, decoding_break_even
from msattn.trainer.models.devices import compute_devices
from msattn.trainer.models.families import decoder, head_dim, num_heads, num_kv_heads
from msattn.trainer.models.identity import fingerprint
from msattn.trainer.models.parallel import HeadShard, head_shard
from msattn.trainer.models.rope import Rotation
from msattn.trainer.models.tap import tap
from msattn.trainer.models.timing import PhaseTimer
from msattn.trainer.routing.calibrate import most_probes, threshold_at
from msattn.trainer.saap.kmeans import KMeans
from msattn.trainer.saap.pages import UntrainedPages
from msattn.trainer.saap.qmodel import QModel
from msattn.trainer.saap.random_buckets import RandomBuckets
from msattn.trainer.seer.decode_gate import DecodeGate
from msattn.trainer.seer.gate import Gate
from msattn.trainer.seer.select import Selection
from msattn.trainer.serving.arguments import check_model, check_numbers, check_router, check_selection, check_types
from msattn.trainer.serving.paged.batching import batching
from msattn.trainer.serving.routed import RoutedDecoding
from msattn.trainer.serving.sparse import Sparse
from msattn.trainer.serving.statistics import Statistics
from msattn.trainer.serving.steps import decoding_steps

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Sparse", "attach", "disable", "enable", "load"]

AnyRouter = QModel | KMeans | DecodeGate | RandomBuckets | UntrainedPages
LOADERS = {"gate": Gate.load, "kmeans": KMeans.load, "qmodel": QModel.load, "decode_gate": DecodeGate.load}
# How routers are served whose manifest records nothing.
SERVING: dict[str, Any] = {"probes": 32, "recent": 2047, "sink": 1, "dense_layers": (0,)}
_enabled: "dict[PreTrainedModel, AbstractContextManager[Sparse]]" = {}


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


@contextmanager
def attach(
    model: "PreTrainedModel",
    *,
    gate: Gate | str | Path | None = None,
    select: Selection | SelectConfig | Mapping[str, Any] | str | None = None,
    sparsity: float | None = None,
    qmodel: AnyRouter | str | Path | None = None,
    probes: int | None = None,
    keys: float | None = None,
    threshold: float | None = None,
    recent: int | None = None,
    sink: int | None = None,
    dense_layers: Sequence[int] | None = None,
    dense_below: int | None = None,
    independent: bool = False,
    strict: bool = False,
    cuda_graphs: bool = True,
    measure_recall: bool = False,
    measure_time: bool = False,
) -> Iterator[Sparse]:
    """Runs ``model`` with sparse attention inside the context, in forward passes and ``generate``.

    Prefill without ``gate`` or ``select`` stays dense, as does decoding without ``qmodel``. Leaving the context restores the
    model.

    Parameters
    ----------
    model : a decoder of a supported family (:func:`msattn.trainer.models.families.attention_layers` says which of its layers
        may be sparse; the others keep their own attention); also quantized, offloaded, or with PEFT adapters. Of a model with
        images, its decoder of text is served.
    gate : a loaded gate, its folder, that of its run (``outputs/tiny/base``), a Hub id, or ``embedded`` (the gate that ships
        with the package, for the embedded model). Prompts read the blocks that ``select`` chooses from its scores.
    select : how blocks are selected: a policy (``topk``), the scores of a baseline (``quest``, which needs no gate), the keys
        of a :class:`SelectConfig`, or an object. None with a gate is ``calibrated``, as on the command line, or ``topk`` if the
        gate has no calibrated thresholds. A ``Selection`` object applies to prompts of every length.
    sparsity : share of the visible blocks that is not read, for policies that have it; None stands for that of ``select``,
        0.9 by default.
    qmodel : the router of decoding: a query classifier, a decode gate or a k-means, given in the same ways, or a router without
        training, such as ``QuestPages``. New tokens read the dense window and ``probes`` buckets, of decode gates blocks.
    probes : number of buckets that a new token visits, for each key/value head.
    keys : instead of ``probes``, the mean share of the keys outside the dense window that new tokens read. How many buckets one
        reads depends on what its classifier or decode gate predicts and on their sizes; these have calibrated thresholds for
        it. With a decode gate also an integer: a number of keys, read in as many whole blocks as it holds.
    threshold : instead of ``probes``, the probability from which a decode gate reads a block, among those before the window.
    recent, sink : numbers of last and first keys that a new token always reads.
    dense_layers : layers in which new tokens read every key. None for these four numbers stands for the values that the
        artifact's manifest records, or for 32, 2047, 1 and (0,).
    dense_below : number of keys below which prompts and new tokens are dense, because that is faster. None stands for the
        lengths that were measured on such a device; for prompts, ``select.dense_below`` is an alternative.
    independent : each query head visits buckets of its own. By default a query group shares them, as memory is read once for
        all of its heads.
    strict : refuse artifacts that were made for other weights of the same shape, e.g. before quantization or fine-tuning.
        By default they are served with a warning. The adapters of PEFT models are not compared.
    cuda_graphs : decode with CUDA graphs on a GPU. What cannot be captured runs without, with a warning that says why.
    measure_recall : also measures the attention mass that is read, at the cost of a dense pass.
    measure_time : also measures the time of selection and of attention on the device.

    Yields
    ------
    Sparse : its ``stats()`` return what was read.

    Raises
    ------
    UserError : there is nothing to attach, an artifact has another kind or was made for another model, the model is not
        supported or already attached, or an argument has another type or is out of range. In a forward pass: ids outside the
        vocabulary, inputs of another type or shape, no token, or a cache of another model or batch.

    Notes
    -----
    Several threads may run the model at the same time. Copying or pickling the model inside the context raises a UserError, and
    so does ``backward`` outside the context with activation checkpointing, which runs the forward pass again.

    Passes over several tokens after cached ones (chunked prefill, the next turn of a chat) are sparse with a selection. A cache
    that was filled outside the context is taken over: inverting the rotation recovers its keys before RoPE. With dynamic RoPE
    that is not possible, and such passes are dense and count as ``dense_fallbacks``. Passes that are dense because that is
    faster count as ``dense_by_choice``.

    ``generate_batch`` and ``init_continuous_batching`` of the model serve many prompts over a paged cache; see
    :meth:`Sparse.batching_config`. Managers end with the context.

    On a GPU, single tokens are decoded with CUDA graphs. Forward hooks and adapters that are changed take effect with the next
    pass over several tokens.
    """
    options = Options(
        gate=gate, select=select, sparsity=sparsity, qmodel=qmodel, probes=probes, keys=keys, threshold=threshold,
        recent=recent, sink=sink, dense_layers=dense_layers, dense_below=dense_below, independent=independent, strict=strict,
        measure_recall=measure_recall, measure_time=measure_time,
    )  # fmt: skip
    check_types(**vars(options), cuda_graphs=cuda_graphs)
    check_model(model)
    place = partial(_move_to_model, model)
    host = Host(model.config, model.dtype, partial(fingerprint, model), partial(head_shard, model), place)
    sparse = build_sparse(host, options)
    with (
        tap(model, sparse.dispatch),
        decoding_steps(decoder(model), sparse, cuda_graphs=cuda_graphs),
        batching(model, sparse, cuda_graphs=cuda_graphs),
    ):
        hooks = [
            decoder(model).register_forward_pre_hook(sparse.prepare_cache, with_kwargs=True),
            decoder(model).register_forward_hook(sparse.guard_backward),
        ]
        try:
            yield sparse
        finally:
            sparse.attached = False
            for hook in hooks:
                hook.remove()


def enable(model: "PreTrainedModel", **options: Any) -> Sparse:
    """Runs ``model`` with sparse attention, e.g. in a server, until :func:`disable` is called, which also lets go of it.

    Parameters
    ----------
    model : as for :func:`attach`.
    **options : the other parameters of :func:`attach`.

    Raises
    ------
    UserError : as :func:`attach`.
    """
    context = attach(model, **options)
    sparse = context.__enter__()
    _enabled[model] = context
    return sparse


def disable(model: "PreTrainedModel") -> None:
    """Restores a model after :func:`enable`.

    Raises
    ------
    UserError : :func:`enable` was not called for this model.
    """
    if not isinstance(model, nn.Module) or model not in _enabled:
        raise UserError("disable: the model is not enabled")
    _enabled.pop(model).__exit__(None, None, None)


class Host(NamedTuple):
    """The model that sparse attention is built for, in whatever engine it runs.

    Attributes
    ----------
    config, dtype : of the model.
    identify : returns its fingerprint.
    shard : returns the heads that this rank computes.
    place : moves modules to the model's device and returns the device.
    """

    config: Any
    dtype: torch.dtype
    identify: Callable[[], dict[str, Any]]
    shard: Callable[[], HeadShard]
    place: Callable[..., torch.device]


@dataclass(frozen=True)
class Options:
    """The parameters of :func:`attach` that say what is served and how."""

    gate: Gate | str | Path | None = None
    select: Selection | SelectConfig | Mapping[str, Any] | str | None = None
    sparsity: float | None = None
    qmodel: AnyRouter | str | Path | None = None
    probes: int | None = None
    keys: float | None = None
    threshold: float | None = None
    recent: int | None = None
    sink: int | None = None
    dense_layers: Sequence[int] | None = None
    dense_below: int | None = None
    independent: bool = False
    strict: bool = False
    measure_recall: bool = False
    measure_time: bool = False


def build_sparse(host: Host, options: Options) -> Sparse:
    """Builds the sparse attention of a model of a supported family.

    Parameters
    ----------
    options : have the types of :func:`msattn.trainer.serving.arguments.check_types`.

    Raises
    ------
    UserError : as :func:`attach`.
    """
    gate, qmodel, dense_below, config = options.gate, options.qmodel, options.dense_below, host.config
    require(dense_below is None or dense_below >= 0, "dense_below", dense_below, "accepted are 0 or more keys")
    gate = Gate.load(gate) if isinstance(gate, str | Path) else gate
    router = load_router(qmodel) if isinstance(qmodel, str | Path) else qmodel
    select = options.select
    given = select if isinstance(select, Selection) else _chosen_config(select, options.sparsity, gate)
    selection = _build_selection(given, gate, options.sparsity)
    if selection is None and router is None:
        raise UserError("attach: nothing to attach; give gate=, select= or qmodel=")
    gate = None if selection is None else selection.gate
    for warning in _check_same_model(host, gate, router, options.strict):
        _warn_once(warning)
    if selection is not None:
        check_selection(selection, config)
    reads = _reads(router, probes=options.probes, keys=options.keys, threshold=options.threshold)
    asked = {"recent": options.recent, "sink": options.sink, "dense_layers": options.dense_layers}
    numbers = _numbers(config, router, probes=reads.probes, **asked)
    if router is not None and reads.probes is None and numbers["probes"] == router.num_buckets:
        _warn_once(f"probes={numbers['probes']} by default: every bucket is read, so decoding is dense")
    shard = host.shard()
    if shard.ranks > 1:
        selection, router = _of_rank(shard, given, selection, router)
        gate = None if selection is None else selection.gate
    device = host.place(gate, router)
    group = num_heads(config) // num_kv_heads(config)
    statistics = Statistics(PhaseTimer(device) if options.measure_time else None, reads=group if options.independent else 1)
    routed = None
    if router is not None:
        routed = RoutedDecoding(
            router, **numbers, threshold=reads.density, probability=reads.probability, independent=options.independent,
            routed_from=_routed_from(host, router, numbers, reads.share, dense_below, device),
            measure_recall=options.measure_recall, statistics=statistics,
        )  # fmt: skip
    return Sparse(
        selection,
        routed,
        statistics,
        dense_below=_dense_below(given, device) if dense_below is None else dense_below,
        rotation=Rotation.of(config, device),
        kv_heads=num_kv_heads(config) // shard.ranks,
        measure_recall=options.measure_recall,
    )


def load_router(path: str | Path) -> QModel | KMeans | DecodeGate:
    """Loads a query classifier or, in a folder without one, decode gates, or else a k-means, which routes by itself.

    Raises
    ------
    UserError : as :func:`load`, or the artifact is a gate for prefill.
    """
    artifact = load(artifacts.find(path, "qmodel", "decode_gate", "kmeans"))
    if isinstance(artifact, Gate):
        raise UserError(f"qmodel={path}: this is a gate for prefill; accepted is a qmodel, a decode_gate or a kmeans artifact")
    return artifact


def _numbers(config: Any, router: AnyRouter | None, **given: Any) -> dict[str, Any]:
    """Returns the numbers of decoding with a router, {} without one.

    Raises
    ------
    UserError : a number is out of range or has no use, or the router is for another model.
    """
    if router is None:
        for name, value in given.items():
            if value is not None:
                raise UserError(f"{name}={value!r}: only decoding with a router uses it; give qmodel=")
        return {}
    check_router(router, config)
    if router.artifact is None and given["probes"] is None:
        given["probes"] = min(SERVING["probes"], router.num_buckets)
    numbers = serving_numbers(router, given)
    check_numbers(router, config, **numbers)
    return numbers


class _Reads(NamedTuple):
    """The number of buckets that a new token visits at most (None: not given), and what limits them to fewer.

    ``share`` is the share of the keys that is asked for. Buckets are read from the ``density`` on, or blocks from the
    ``probability`` on.
    """

    probes: int | None
    share: float | None = None
    density: float | None = None
    probability: float | None = None


def _reads(router: AnyRouter | None, *, probes: int | None, keys: float | None, threshold: float | None) -> _Reads:
    """Returns what a new token reads by ``probes``, ``keys`` or ``threshold``.

    Raises
    ------
    UserError : two of the three are given, the router cannot serve them, or there are no thresholds for this share.
    """
    given = [f"{name}={value}" for name, value in (("keys", keys), ("threshold", threshold)) if value is not None]
    if not given:
        return _Reads(probes)
    (asked, *others) = given
    if probes is not None or others:
        raise UserError(f"{asked}: {others[0] if others else f'probes={probes}'} is given too; give one of the two")
    if router is None:
        raise UserError(f"{asked}: only decoding with a router uses it; give qmodel=")
    if threshold is not None:
        require(0 < threshold < 1, "threshold", threshold, "accepted is a number in (0, 1)")
        if not isinstance(router, DecodeGate):
            raise UserError(f"{asked}: needs a decode gate; other routers read probes")
        most = int(min(1 / float(threshold), router.num_buckets))  # probabilities sum to 1
        return _Reads(most, probability=float(threshold))
    assert keys is not None
    if keys >= 1:
        return _Reads(_whole_blocks(router, keys))
    if not isinstance(router, QModel | DecodeGate):
        raise UserError(
            f"{asked}: needs a query classifier or a decode gate, which predict attention; other routers take probes"
        )
    if router.thresholds is None:
        raise UserError(f"{asked}: this router has no calibrated thresholds; train it again, or give probes")
    density = threshold_at(router.thresholds, keys)
    return _Reads(most_probes(keys, router.num_buckets), float(keys), density=density)


def _whole_blocks(router: AnyRouter, keys: float) -> int:
    """Returns the number of whole blocks of a decode gate in a number of keys."""
    if not isinstance(router, DecodeGate):
        raise UserError(f"keys={keys}: a number of keys needs a decode gate, whose blocks are equally large")
    size, most = router.page_size, router.page_size * router.num_buckets
    ok = size <= keys <= most and keys == int(keys)
    require(ok, "keys", keys, f"accepted are {size} (a block) to {most:,} keys, or a share of them")
    return int(keys) // size


def _check_same_model(host: Host, gate: Gate | None, router: AnyRouter | None, strict: bool) -> list[str]:
    """Returns warnings about artifacts of other weights; modules that were never saved have no manifest to check.

    Raises
    ------
    UserError : as :func:`msattn.trainer.artifacts.check_model`.
    """
    saved = [module.artifact for module in (gate, router) if module is not None and module.artifact is not None]
    if not saved:
        return []
    identity = host.identify()
    warned = [artifacts.check_model(artifact.manifest, identity, strict=strict) for artifact in saved]
    return list(filter(None, warned))


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, ModelWarning, stacklevel=5)  # at the caller's with statement


def _move_to_model(model: "PreTrainedModel", *modules: nn.Module | None) -> torch.device:
    """Moves gates and routers to the model's device; returns its first device."""
    devices = compute_devices(model)
    if not devices:
        raise UserError("model: all of its weights are on the meta device; load them first")
    for module in filter(None, modules):
        if len(devices) > 1:
            raise UserError(f"model: it is split over {', '.join(map(str, devices))}; gates and routers need one device")
        module.to(devices[0])
    return devices[0]


def serving_numbers(
    router: AnyRouter | None, given: Mapping[str, Any], defaults: Mapping[str, Any] = SERVING
) -> dict[str, Any]:
    """Returns ``probes``, ``recent``, ``sink`` and ``dense_layers`` as ``given``, or as the router records, or the defaults.

    Raises
    ------
    UserError : a value of another type.
    """
    recorded = router.artifact.manifest["details"].get("serving", {}) if router and router.artifact else {}
    found = {
        name: recorded.get(name, default) if given.get(name) is None else given[name] for name, default in defaults.items()
    }
    check_types(**found)
    layers = tuple(map(int, found.pop("dense_layers")))
    return {name: int(value) for name, value in found.items()} | {"dense_layers": layers}


def _chosen_config(
    select: SelectConfig | Mapping[str, Any] | str | None, sparsity: float | None, gate: Gate | None
) -> SelectConfig | None:
    """Returns the configuration that ``select`` stands for, or None for dense prompts."""
    if select is None and gate is None:
        if sparsity is not None:
            raise UserError(f"sparsity={sparsity}: there is nothing to select; give gate= or select=")
        return None
    chosen = select_config(select or ("calibrated" if gate and gate.thresholds else "topk"), sparsity=sparsity)
    if gate is not None and chosen.scores != "gate":
        raise UserError(f"gate: select.scores={chosen.scores} are used instead of its scores; give one of the two")
    return chosen


def _build_selection(select: Selection | SelectConfig | None, gate: Gate | None, sparsity: float | None) -> Selection | None:
    if not isinstance(select, Selection):
        return None if select is None else Selection.from_config(select, gate)
    if gate is not None:
        raise UserError("gate: a Selection has its own scores; give one of gate and select, or a SelectConfig")
    if sparsity is not None:
        raise UserError(f"sparsity={sparsity}: a Selection has its own policy")
    return select


def _of_rank(
    shard: HeadShard, given: Selection | SelectConfig | None, selection: Selection | None, router: AnyRouter | None
) -> tuple[Selection | None, AnyRouter | None]:
    """Returns selection and router for the heads that this rank of a tensor-parallel model computes.

    Raises
    ------
    UserError : the weights of a ``Selection`` object cannot be divided.
    """
    if selection is not None and selection.gate is not None:
        if isinstance(given, Selection):
            raise UserError("select: a Selection with a gate cannot be divided among ranks; give gate= and a SelectConfig")
        selection = _build_selection(given, selection.gate.shard(shard), None)
    return selection, None if router is None else router.shard(shard)


def _dense_below(select: Selection | SelectConfig | None, device: torch.device) -> int:
    """Returns the prompt length in tokens from which attention is sparse; see :class:`SelectConfig`."""
    if select is None or isinstance(select, Selection):
        return 0
    if select.dense_below != "auto":
        return int(select.dense_below)
    if select.scores != "oracle" and isinstance(select, SparsityConfig):  # the oracle needs dense attention anyway
        return break_even(select.sparsity, device)
    return 0


def _routed_from(
    host: Host,
    router: AnyRouter,
    numbers: Mapping[str, Any],
    share: float | None,
    dense_below: int | None,
    device: torch.device,
) -> Callable[[int], int]:
    """Returns the function from a batch size to the number of keys from which new tokens read buckets."""
    if dense_below is not None:
        return lambda batch: dense_below
    config, window = host.config, numbers["recent"] + numbers["sink"]
    key_bytes = 2 * num_kv_heads(config) * head_dim(config) * host.dtype.itemsize
    if share is None and isinstance(router, DecodeGate):  # as many keys at every length
        window, share = window + numbers["probes"] * router.page_size, 0.0
    elif share is None:
        share = numbers["probes"] / router.num_buckets
    return partial(decoding_break_even, device, key_bytes, window, share)
