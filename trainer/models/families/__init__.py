"""Model families: which decoders are supported, what distinguishes them, and access to their configurations.

``family`` says how each family computes queries, keys and RoPE, ``layers`` which layers of a model are served, ``support``
checks a configuration, ``shape`` reads its numbers. Code elsewhere asks these functions and never compares names of families.
"""

from msattn.trainer.models.families.family import FAMILIES, Family, family_of
from msattn.trainer.models.families.layers import LayerAttention, attention_layers, served_layers
from msattn.trainer.models.families.shape import (
    ROPE_TYPES,
    check_length,
    decoder,
    head_dim,
    max_length,
    num_heads,
    num_kv_heads,
    num_layers,
    output_logits,
    rope_parameters,
    text_config,
)
from msattn.trainer.models.families.support import check_supported, refusal

__all__ = [
    "FAMILIES",
    "ROPE_TYPES",
    "Family",
    "LayerAttention",
    "attention_layers",
    "check_length",
    "check_supported",
    "decoder",
    "family_of",
    "head_dim",
    "max_length",
    "num_heads",
    "num_kv_heads",
    "num_layers",
    "output_logits",
    "refusal",
    "rope_parameters",
    "served_layers",
    "text_config",
]
