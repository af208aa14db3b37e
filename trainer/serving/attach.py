"""The public functions ``attach`` and ``enable``, which run a model with sparse attention, and ``load`` for artifacts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from msattn.trainer.config import SelectConfig
from msattn.trainer.errors import UserError
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.selection import Selection
from msattn.trainer.models.devices import compute_devices
from msattn.trainer.models.families import decoder
from msattn.trainer.models.identity import fingerprint
from msattn.trainer.models.parallel import head_shard
from msattn.trainer.models.tap import tap
from msattn.trainer.serving.build import AttachOptions, Host, build_sparse
from msattn.trainer.serving.checks import check_model, check_types
from msattn.trainer.serving.engines.generate_batch import batching
from msattn.trainer.serving.loading import AnyRouter, load
from msattn.trainer.serving.sparse import Sparse
from msattn.trainer.serving.steps import decoding_steps

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Sparse", "attach", "disable", "enable", "load"]

_enabled: "dict[PreTrainedModel, AbstractContextManager[Sparse]]" = {}


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
        0.5 by default.
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
    options = AttachOptions(
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
