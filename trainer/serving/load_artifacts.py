"""Loading of artifacts, and checks that attached artifacts fit the model."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from msattn.trainer import artifacts
from msattn.trainer.config.select import ROUTERS
from msattn.trainer.config.sizes import BlockSizes
from msattn.trainer.config.values import one_of, require
from msattn.trainer.errors import UserError
from msattn.trainer.methods.base import check_finite
from msattn.trainer.methods.buckets import PRESETS, Router
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from msattn.trainer.methods.selection import Selection
from msattn.trainer.methods.untrained import untrained_router
from msattn.trainer.models.families import check_shape, check_supported, num_layers, served_layers
from msattn.trainer.storage.replace import current_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


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


def load_router(qmodel: str | Path, config: "PreTrainedConfig") -> Router:
    """Returns the training-free router of this name, for the model with this ``config``, or loads a
    router.

    From a folder with several, loads the one that has precedence. A str that is a name is not a
    folder; ``./quest`` is.
    """
    if isinstance(qmodel, str) and qmodel in ROUTERS:
        return untrained_router(qmodel).for_model(
            config, PRESETS.num_buckets, served_layers(config), seed=0
        )
    if (
        isinstance(qmodel, str)
        and qmodel.isidentifier()
        and not os.path.lexists(current_folder(Path(qmodel)))
    ):
        one_of("qmodel", qmodel, (*ROUTERS, "embedded", "the folder or Hub id of an artifact"))
    artifact = load(artifacts.find(qmodel, *artifacts.ROUTER_KINDS))
    if isinstance(artifact, Gate):
        accepted = "expected a qmodel, a decode_gate or a kmeans artifact"
        raise UserError(f"qmodel={qmodel}: this is a gate for prefill; {accepted}")
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


def check_selection(selection: Selection, config: "PreTrainedConfig") -> None:
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
