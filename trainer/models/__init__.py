"""The frozen model: loading, supported families, RoPE, and access to each layer's attention.

Import functions for loading, configuration and devices from here; import
:mod:`~msattn.trainer.models.tap`, :mod:`~msattn.trainer.models.rope` and the other modules
directly. Nothing here depends on gates or buckets.
"""
# ruff: noqa: F401 (names for import from here)

from msattn.trainer.models.devices import resolve_device, resolve_dtype
from msattn.trainer.models.families import (
    attention_layers,
    check_length,
    check_supported,
    decoder,
    family_of,
    head_dim,
    max_length,
    num_heads,
    num_kv_heads,
    num_layers,
    output_logits,
    served_layers,
    shape,
    text_config,
)
from msattn.trainer.models.identity import fingerprint
from msattn.trainer.models.loading import EMBEDDED, Described, Loaded, describe, load, random_config
from msattn.trainer.models.unpacked import no_progress_bar
