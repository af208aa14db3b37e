"""The released gates for decoding (SeerAttention-R, arXiv 2506.08889).

Their scores are those of ``DecodeGate``. Three differences are folded into the weights:

- ``Qavgproj`` projects the mean of a group's queries, ``Qavg`` uses the mean directly: here the
  projection of each query is a part of that projection, or of the identity.
- The weights of an RMSNorm are shared by the heads: here each head has its own copy.
- YaRN's attention factor multiplies their rotated queries and keys: here the projections, or the
  norms after them.

Blocks that are complete after a prompt are rotated at their first position, as in the training of
these gates. Blocks that new tokens complete are rotated at their last position, that of the
completing token, in the authors' code (since the fix of their issue 37); imported gates do the same
unless ``finished_at="first"``.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
from annotated_types import Interval
from torch import Tensor

from msattn.trainer.config import GateConfig
from msattn.trainer.errors import UserError
from msattn.trainer.methods.buckets import DecodeDefaults
from msattn.trainer.methods.gate.attn_gate import AttnGate
from msattn.trainer.methods.gate.decode_gate import DecodeGate, Finished
from msattn.trainer.methods.gate.official.files import (
    POOLING,
    check_family,
    gate_config,
    read_weights,
    rotation_factor,
)
from msattn.trainer.storage.documents import checked
from msattn.trainer.storage.model_files import ModelFiles

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("qwen2", "qwen3")
OF_DECODING = ("seerattn_q_head_pooling_type", "seerattn_k_seq_pooling_type")
K_POOLING = re.compile(r"K((?:max|min|avg)+)")
Q_POOLINGS = ("Qproj", "Qavgproj", "Qavg")


@dataclass(frozen=True)
class DecodeConfig:
    """The keys of ``config.json`` that describe decode gates, with the authors' defaults."""

    base_model: str
    seerattn_q_head_pooling_type: str = "Qproj"
    seerattn_k_seq_pooling_type: str = "Kmaxminavg"
    seerattn_gate_block_size: Annotated[int, Interval(ge=1, le=2**20)] = 64
    seerattn_gate_hidden_size: Annotated[int, Interval(ge=2, le=16384)] = 128
    seerattn_use_rope: bool = True
    seerattn_use_qk_norm: bool = False
    seerattn_token_budget: Annotated[int, Interval(ge=1, lt=2**31)] = 4096
    seerattn_start_layer: Annotated[int, Interval(ge=0, lt=2**31)] = 0


def holds_decode_gates(document: Mapping[str, Any]) -> bool:
    """Returns True for a ``config.json`` of decode gates."""
    return "seerattn_gate_type" not in document and any(key in document for key in OF_DECODING)


def read_decode_gates(
    files: ModelFiles, config: "PretrainedConfig", finished_at: Finished
) -> tuple[DecodeGate, dict[str, Any], str]:
    """Returns the gates, the details of their manifest, and the name of the base model, whose
    configuration is ``config``.

    Raises UserError if the files are damaged, or the gates compute something else than ours.
    """
    official, cfg = _read_config(files)
    gate = DecodeGate.build(config, cfg, finished_at)
    hidden = official.seerattn_gate_hidden_size
    pooling = official.seerattn_q_head_pooling_type
    size = gate.shape.head_dim
    if pooling == "Qavg" and hidden != size:
        raise UserError(
            f"{files.name}: seerattn_gate_hidden_size={hidden}: with Qavg it is the head size, "
            f"{size}"
        )
    factor = rotation_factor(files, config, hidden) if cfg.rope else 1.0
    group = gate.shape.num_heads // gate.kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "attngate_linear_k": (gate.kv_heads, len(cfg.k_pool) * size, hidden)
    }
    if pooling != "Qavg":
        of_group = (group,) if pooling == "Qproj" else ()
        shapes["attngate_linear_q"] = (gate.kv_heads, *of_group, size, hidden)
    if cfg.qk_norm:
        shapes |= {"attngate_qnorm": (hidden,), "attngate_knorm": (hidden,)}
    for layer, weights in zip(
        gate.gates, read_weights(files, len(gate.layers), shapes), strict=True
    ):
        _fill(cast(AttnGate, layer), weights, factor, group)
    return (
        gate,
        gate.details() | {"serving": asdict(_serving(official, gate, files))},
        official.base_model,
    )


def _read_config(files: ModelFiles) -> tuple[DecodeConfig, GateConfig]:
    """Returns the keys of the gates in ``config.json``, checked, and what they are as a
    configuration of ours.
    """
    where = f"{files.name}: config.json"
    check_family(files, FAMILIES)
    official = checked(files.config(), DecodeConfig, where)
    q_pooling = official.seerattn_q_head_pooling_type
    k_pooling = K_POOLING.fullmatch(official.seerattn_k_seq_pooling_type)
    if q_pooling not in Q_POOLINGS:
        raise UserError(
            f"{where}: seerattn_q_head_pooling_type={q_pooling:.60}: expected "
            f"{', '.join(Q_POOLINGS)}"
        )
    if k_pooling is None:
        named = f"seerattn_k_seq_pooling_type={official.seerattn_k_seq_pooling_type:.60}"
        raise UserError(f"{where}: {named}: expected poolings such as Kmaxminavg")
    return official, gate_config(
        files,
        phase="decode",
        block_size=official.seerattn_gate_block_size,
        k_pool=POOLING.findall(k_pooling[1]),
        hidden=official.seerattn_gate_hidden_size,
        rope=official.seerattn_use_rope,
        qk_norm=official.seerattn_use_qk_norm,
        loss="kl",
    )


def _serving(official: DecodeConfig, gate: DecodeGate, files: ModelFiles) -> DecodeDefaults:
    """Returns how the gates are served there: a budget of tokens, besides the last block, in the
    layers from one on.
    """
    dense = official.seerattn_start_layer
    if dense >= len(gate.layers):
        raise UserError(
            f"{files.name}: config.json: seerattn_start_layer={dense}: the model has "
            f"{len(gate.layers)} layers"
        )
    probes = max(official.seerattn_token_budget // gate.block_size, 1)
    return DecodeDefaults(
        min(probes, gate.num_buckets), gate.block_size, dense_layers=list(range(dense))
    )


@torch.no_grad()
def _fill(layer: AttnGate, weights: dict[str, Tensor], factor: float, group: int) -> None:
    """Sets the weights of a layer; ``factor`` is that of rotated queries and of rotated keys."""
    queries = weights.get("attngate_linear_q", torch.eye(layer.hidden)[None])
    alone = queries.flatten(1, 2) if queries.dim() == 4 else queries.repeat(1, group, 1) / group
    layer.query_weight.copy_(alone.mT)
    layer.key_weight.copy_(weights["attngate_linear_k"].mT)
    if layer.cfg.qk_norm:
        layer.query_norm.copy_(weights["attngate_qnorm"])
        layer.key_norm.copy_(weights["attngate_knorm"])
    for rotated in (
        (layer.query_norm, layer.key_norm)
        if layer.cfg.qk_norm
        else (layer.query_weight, layer.key_weight)
    ):
        rotated.mul_(factor)
