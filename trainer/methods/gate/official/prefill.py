"""The released gates for prefill (arXiv 2410.13276).

Their scores are those of ``AttnGate``: maxima, minima and means of blocks before RoPE,
projections ``[heads, pools * D, hidden]``, RoPE at the first position of each block, scaled
products. Three differences are folded into the weights:

- Key projections of a key/value head serve all query heads of its group: here each gate head has
  its own copy.
- Gates with one pooling of queries and the model's head size have no query projection: here it is
  the identity.
- YaRN's attention factor multiplies their rotated queries and keys: here the projections.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
from annotated_types import Interval
from torch import Tensor

from msattn.trainer.config import GateConfig
from msattn.trainer.errors import UserError
from msattn.trainer.methods.blocks import AlwaysRead
from msattn.trainer.methods.gate.attn_gate import AttnGate, Gate
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

FAMILIES = ("llama", "qwen2")
GATE_TYPE = re.compile(r"Q((?:max|min|avg)+)_K((?:max|min|avg)+)")


@dataclass(frozen=True)
class PrefillConfig:
    """The keys of ``config.json`` that describe prefill gates."""

    base_model: str
    seerattn_gate_type: str
    seerattn_gate_block_size: Annotated[int, Interval(ge=1, le=2**20)]
    seerattn_gate_hidden_size: Annotated[int, Interval(ge=2, le=16384)]
    seerattn_gate_force_double: bool = False


def read_gates(files: ModelFiles, config: "PretrainedConfig") -> tuple[Gate, dict[str, Any], str]:
    """Returns the gates, the details of their manifest, and the name of the base model, whose
    configuration is ``config``.

    Raises UserError if the files are damaged, or the gates compute something else than ours.
    """
    official, cfg = _read_config(files)
    gate = Gate.build(config, cfg)
    factor = rotation_factor(files, config, official.seerattn_gate_hidden_size)
    shape = gate.shape
    size, hidden = shape.head_dim, official.seerattn_gate_hidden_size
    double = len(cfg.q_pool) > 1 or hidden != size or official.seerattn_gate_force_double
    shapes = {
        "mask_linear_k": (
            shape.num_kv_heads if double else shape.num_heads,
            len(cfg.k_pool) * size,
            hidden,
        )
    }
    if double:
        shapes["mask_linear_q"] = (shape.num_heads, len(cfg.q_pool) * size, hidden)
    layers = read_weights(files, shape.num_layers, shapes)
    for number in gate.layer_numbers:
        _fill(cast(AttnGate, gate.layers[number]), layers[number], factor)
    gate.always = AlwaysRead(0, 0)  # the authors read the row's own block and the best ones alone
    return gate, gate.details(), official.base_model


def _read_config(files: ModelFiles) -> tuple[PrefillConfig, GateConfig]:
    """Returns the keys of the gates in ``config.json``, checked, and what they are as a
    configuration of ours.
    """
    where = f"{files.name}: config.json"
    check_family(files, FAMILIES)
    official = checked(files.config(), PrefillConfig, where)
    pools = GATE_TYPE.fullmatch(official.seerattn_gate_type)
    if pools is None:
        raise UserError(
            f"{where}: seerattn_gate_type={official.seerattn_gate_type:.60}: expected poolings "
            f"such as Qavg_Kmaxminavg"
        )
    q_pool, k_pool = (POOLING.findall(text) for text in pools.groups())
    size, hidden = official.seerattn_gate_block_size, official.seerattn_gate_hidden_size
    own = {"target": "max", "mean_weight": 0.0}
    return official, gate_config(
        files, block_size=size, q_pool=q_pool, k_pool=k_pool, hidden=hidden, **own
    )


@torch.no_grad()
def _fill(layer: AttnGate, weights: dict[str, Tensor], factor: float) -> None:
    """Sets the weights of a layer; ``factor`` is that of rotated queries and of rotated keys."""
    keys, queries = weights["mask_linear_k"], weights.get("mask_linear_q")
    layer.key_weight.copy_(keys.mT.repeat_interleave(layer.heads // len(keys), dim=0) * factor)
    layer.query_weight.copy_((torch.eye(layer.hidden) if queries is None else queries.mT) * factor)
