"""The public functions ``attach`` and ``enable``, which run a model with sparse attention, and
``load`` for artifacts.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from msattn.trainer.config.select import SelectConfig
from msattn.trainer.errors import UserError
from msattn.trainer.methods.buckets import Router
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.selection import Selection
from msattn.trainer.models.devices import compute_devices
from msattn.trainer.models.families import decoder
from msattn.trainer.models.identity import fingerprint
from msattn.trainer.models.parallel import head_shard
from msattn.trainer.models.tap import tap
from msattn.trainer.serving.attend import Sparse
from msattn.trainer.serving.build import AttachOptions, ModelInfo, build_sparse, check_model, load
from msattn.trainer.serving.engines.generate_batch import batching
from msattn.trainer.serving.graphs.steps import DecodingSteps
from msattn.trainer.serving.hooks import hooked, padding_before_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Sparse", "attach", "disable", "enable", "enabled", "load"]

# attribute of an enabled model, its context and sparse attention: a table would keep models alive
_ENABLED = "_msattn_enabled"


@contextmanager
def attach(
    model: "PreTrainedModel",
    *,
    gate: Gate | str | Path | None = None,
    select: Selection | SelectConfig | Mapping[str, Any] | str | None = None,
    sparsity: float | None = None,
    qmodel: Router | str | Path | None = None,
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

    Prompts read the blocks that ``select`` chooses from the scores of ``gate``, or of the method
    that ``select`` names. New tokens read the buckets or blocks that the router ``qmodel`` chooses.
    Without ``gate`` and ``select`` prefill is dense; without ``qmodel`` decoding is. Leaving the
    context restores the model.

    Parameters
    ----------
    model : a decoder of a supported family, also quantized, offloaded, or with PEFT adapters.
        Models with images are served on their text decoder.
        :func:`msattn.trainer.models.families.attention_layers` says which layers can be sparse; the
        others keep their own attention.
    gate : a loaded gate, its folder, the folder of its run (``outputs/tiny/base``), a Hub id, or
        ``embedded`` (the gate that ships with the package, for the embedded model). Prompts read
        the blocks that ``select`` chooses from its scores.
    select : how blocks are selected: a policy (``topk``), training-free scores (``quest``, which
        need no gate), the keys of a :class:`SelectConfig`, or an object. With a gate, None means
        ``calibrated``, as on the command line, or ``topk`` if the gate has no calibrated
        thresholds. A ``Selection`` object applies to prompts of every length.
    sparsity : share of the visible blocks that is not read, for policies with this key; None: the
        value of ``select``, 0.5 by default.
    qmodel : the decoding router: a query classifier, a decode gate or a k-means, given like
        ``gate``, or a training-free router by name (``quest``; a folder of that name is
        ``./quest``) or as an object. New tokens read the dense window and ``probes`` buckets, or
        blocks of decode gates.
    probes : buckets that each decoded query reads; None: as recorded in the artifact.
    keys : replaces probes: mean share of the keys outside the dense window that decoded queries
        read, e.g. 0.05; with decode gates also their number, rounded down to whole blocks.
    threshold : replaces probes and keys: a decode gate reads the blocks with at least this
        probability, e.g. 0.005.
    recent : number of last keys that are always read; None: as recorded in the artifact.
    sink : number of first keys that are always read; None: as recorded in the artifact.
    dense_layers : layers in which decoding reads every key; None: as recorded in the artifact.
    dense_below : attention is dense below this number of keys; None: the measured break-even
        lengths.
    independent : each query head reads its own buckets. By default a query group shares them, so
        that memory is read once for all heads of the group.
    strict : refuse artifacts that were made for different weights of the same shape, e.g. before
        quantization or fine-tuning. By default these cause a warning. The adapters of PEFT models
        are not compared.
    cuda_graphs : decode with CUDA graphs on a GPU. Passes that cannot be captured run without
        graphs, with a warning that says why. Prompts of small models run as graphs from the third
        prompt of a length on.
    measure_recall : also measure the attention mass that is read, at the cost of a dense pass.
    measure_time : also measure the time of selection and of attention on the device.

    Yields
    ------
    Sparse : its ``stats()`` say how much was read.

    Raises
    ------
    UserError : there is nothing to attach, an artifact has the wrong kind or was made for another
        model, the model is not supported, in double precision or already attached, or an argument
        has the wrong type or is out of range. In a forward pass: ids outside the vocabulary, inputs
        of the wrong type or shape, no tokens, a cache of another model or batch, or a full static
        cache.

    Notes
    -----
    Several threads may run the model at the same time. Copying (also ``copy.copy``) or pickling the
    model inside the context raises UserError. So does ``backward`` outside the context with
    activation checkpointing, because that runs the forward pass again.

    With a selection, passes over several tokens after cached ones (chunked prefill, the next turn
    of a chat) are sparse. A cache that was filled outside the context can be used: keys before RoPE
    are recovered by inverting the rotation. Dynamic RoPE cannot be inverted, so passes after such a
    cache are dense and count as ``dense_fallbacks``. Passes that are dense because this is faster
    count as ``dense_by_choice``.

    Without an attention mask, ``generate`` treats pad tokens before a text as padding and pad
    tokens inside the text as tokens; transformers alone would mask both. Right padding is refused.

    The model's ``generate_batch`` and ``init_continuous_batching`` serve many prompts over a paged
    cache; see :meth:`Sparse.batching_config`. Their managers end with the context.

    On a GPU, single tokens are decoded with CUDA graphs, and prompts of small models run as graphs
    from the third prompt of a length on, for two lengths at a time. Changes of forward hooks and
    adapters take effect at the next pass over several tokens.
    """
    options = AttachOptions(
        gate=gate,
        select=select,
        sparsity=sparsity,
        qmodel=qmodel,
        probes=probes,
        keys=keys,
        threshold=threshold,
        recent=recent,
        sink=sink,
        dense_layers=dense_layers,
        dense_below=dense_below,
        independent=independent,
        strict=strict,
        cuda_graphs=cuda_graphs,
        measure_recall=measure_recall,
        measure_time=measure_time,
    )
    check_model(model)
    info = ModelInfo(
        config=model.config,
        dtype=model.dtype,
        fingerprint=partial(fingerprint, model),
        shard=partial(head_shard, model),
        to_device=partial(_move_to_model, model),
    )
    sparse = build_sparse(info, options)
    steps = DecodingSteps(decoder(model), sparse, cuda_graphs=options.cuda_graphs)
    with (
        tap(model, sparse.attend, steps.attention),
        steps.installed(),
        batching(model, sparse, cuda_graphs=options.cuda_graphs) as managers,
        hooked(decoder(model), sparse, managers),
        padding_before_text(model),
    ):
        yield sparse


def enable(model: "PreTrainedModel", **options: Any) -> Sparse:
    """Runs ``model`` with sparse attention, e.g. in a server, until :func:`disable` is called.

    Parameters
    ----------
    model, **options : as for :func:`attach`.

    Raises
    ------
    UserError : as :func:`attach`.
    """
    context = attach(model, **options)
    sparse = context.__enter__()
    vars(model)[_ENABLED] = context, sparse
    return sparse


def enabled(model: "PreTrainedModel") -> Sparse | None:
    """Returns the sparse attention of an enabled model; None for other models.

    The first use of a model that was loaded with ``attn_implementation="msattn"`` enables it.
    """
    _, sparse = vars(model).get(_ENABLED, (None, None))
    return sparse


def disable(model: "PreTrainedModel") -> None:
    """Restores a model after :func:`enable`.

    Raises
    ------
    UserError : :func:`enable` was not called for this model.
    """
    if not isinstance(model, nn.Module) or _ENABLED not in vars(model):
        raise UserError("disable: the model is not enabled")
    context, _ = vars(model).pop(_ENABLED)
    context.__exit__(None, None, None)


def _move_to_model(model: "PreTrainedModel", *modules: nn.Module | None) -> torch.device:
    """Moves gates and routers to the model's device; returns its first device."""
    devices = compute_devices(model)
    if not devices:
        raise UserError("model: all of its weights are on the meta device; load them first")
    for module in filter(None, modules):
        if len(devices) > 1:
            raise UserError(
                f"model: it is split over {', '.join(map(str, devices))}; gates and routers need "
                f"one device"
            )
        module.to(devices[0])
    return devices[0]
