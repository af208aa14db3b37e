"""The public functions ``attach``, which runs a model with sparse attention, and ``load``, which loads an artifact."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from msattn.trainer import artifacts
from msattn.trainer.config import SelectConfig, SparsityConfig
from msattn.trainer.errors import UserError
from msattn.trainer.models.break_even import break_even
from msattn.trainer.models.families import check_supported, num_layers
from msattn.trainer.models.identity import fingerprint
from msattn.trainer.models.tap import tap
from msattn.trainer.models.timing import PhaseTimer
from msattn.trainer.saap.kmeans import KMeans
from msattn.trainer.saap.qmodel import QModel
from msattn.trainer.seer.gate import Gate
from msattn.trainer.seer.select import Selection
from msattn.trainer.serving.sparse import Sparse

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Sparse", "attach", "load"]

LOADERS = {"gate": Gate.load, "kmeans": KMeans.load, "qmodel": QModel.load}


def load(path: str | Path) -> Gate | KMeans | QModel:
    """Loads an artifact of any kind from a folder or a Hub id, on the CPU.

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
    select: Selection | SelectConfig | None = None,
    qmodel: QModel | KMeans | str | Path | None = None,
    probes: int = 32,
    recent: int = 2047,
    sink: int = 1,
    dense_layers: tuple[int, ...] = (0,),
    measure_recall: bool = False,
    measure_time: bool = False,
) -> Iterator[Sparse]:
    """Runs ``model`` with sparse attention inside the context, in forward passes and ``generate``.

    Prefill without ``gate`` or ``select`` stays dense, as does decoding without ``qmodel``. Leaving the context restores the
    model.

    Parameters
    ----------
    model : a Llama, Mistral, Qwen2 or Qwen3 decoder.
    gate : path, Hub id or loaded gate. Prompts read the blocks that ``select`` chooses from its scores.
    select : policy of block selection. None with a gate selects the top blocks at 90 % sparsity; baselines need no gate. A
        ``Selection`` object applies to prompts of every length.
    qmodel : path, Hub id or loaded query classifier or k-means. New tokens read the dense window and ``probes`` buckets.
    probes : number of buckets that a new token visits, for each key/value head.
    recent, sink : numbers of last and first keys that a new token always reads.
    dense_layers : layers in which new tokens read every key.
    measure_recall : also measures the attention mass that is read, at the cost of a dense pass.
    measure_time : also measures the time of selection and of attention on the device.

    Yields
    ------
    Sparse : its ``stats()`` return what was read.

    Raises
    ------
    UserError : there is nothing to attach, an artifact has another kind or was made for another model, the model is not
        supported or already attached, or a number is out of range.

    Notes
    -----
    Passes over several tokens after cached ones (chunked prefill) are dense, and count as ``dense_fallbacks`` if a selection is
    attached. Single tokens after a cache that was filled outside the context are dense, and count too. Prompts shorter than
    ``select.dense_below`` are dense because that is faster, and count as ``dense_by_choice``.
    """
    check_supported(model.config)
    gate = Gate.load(gate) if isinstance(gate, str | Path) else gate
    router = _load_router(qmodel) if isinstance(qmodel, str | Path) else qmodel
    selection = _build_selection(select, gate)
    if selection is None and router is None:
        raise UserError("attach: nothing to attach; give gate=, select= or qmodel=")
    _check_same_model(model, gate, router)
    _check_numbers(model, router, probes=probes, recent=recent, sink=sink, dense_layers=dense_layers)
    for module in (gate, router):
        if module is not None:
            module.to(model.device)
    sparse = Sparse(
        selection,
        router,
        probes=probes,
        recent=recent,
        sink=sink,
        dense_layers=tuple(dense_layers),
        dense_below=_dense_below(select, model.device),
        measure_recall=measure_recall,
        timer=PhaseTimer(model.device) if measure_time else None,
    )
    with tap(model, sparse.dispatch):
        hook = model.base_model.register_forward_pre_hook(sparse.prepare_cache, with_kwargs=True)
        try:
            yield sparse
        finally:
            hook.remove()


def _load_router(path: str | Path) -> QModel | KMeans:
    artifact = load(path)
    if isinstance(artifact, Gate):
        raise UserError(f"qmodel={path}: this is a gate; accepted is a qmodel or a kmeans artifact")
    return artifact


def _check_same_model(model: "PreTrainedModel", gate: Gate | None, router: QModel | KMeans | None) -> None:
    """Raises UserError for artifacts of another model; modules that were never saved have no manifest to check."""
    manifests = [gate.manifest if gate else None, router.artifact.manifest if router and router.artifact else None]
    if any(manifests):
        identity = fingerprint(model)
        for manifest in filter(None, manifests):
            artifacts.check_model(manifest, identity)


def _build_selection(select: Selection | SelectConfig | None, gate: Gate | None) -> Selection | None:
    if isinstance(select, Selection):
        if gate is not None:
            raise UserError("gate: a Selection has its own scores; give one of gate and select, or a SelectConfig")
        return select
    if select is None and gate is None:
        return None
    return Selection.from_config(select or SelectConfig(), gate)


def _dense_below(select: Selection | SelectConfig | None, device: torch.device) -> int:
    """Returns the prompt length in tokens from which attention is sparse; see :class:`SelectConfig`."""
    if isinstance(select, Selection):
        return 0
    cfg = select or SelectConfig()
    if isinstance(cfg.dense_below, int):
        return cfg.dense_below
    if cfg.scores == "gate" and isinstance(cfg, SparsityConfig):  # break-even was measured only for these
        return break_even(cfg.sparsity, device)
    return 0


def _check_numbers(
    model: "PreTrainedModel",
    router: QModel | KMeans | None,
    *,
    probes: int,
    recent: int,
    sink: int,
    dense_layers: tuple[int, ...],
) -> None:
    if router is not None and not 0 <= probes <= router.num_buckets:
        raise UserError(f"probes={probes}: accepted are 0 to {router.num_buckets}, the number of buckets")
    if recent < 1:
        raise UserError(f"recent={recent}: accepted is 1 or more tokens")
    if sink < 0:
        raise UserError(f"sink={sink}: accepted is 0 or more tokens")
    layers = num_layers(model.config)
    for layer in dense_layers:
        if not 0 <= layer < layers:
            raise UserError(f"dense_layers={dense_layers}: accepted are 0 to {layers - 1}")
