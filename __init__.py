"""msattn: sparse attention for pretrained long-context language models.

Public API, loaded on first use so that ``import msattn`` is fast and does not import torch:

- ``msattn.attach``: context manager that runs a Hugging Face model with sparse attention through trained artifacts.
- ``msattn.enable``, ``msattn.disable``: the same without a context, e.g. in a server; ``msattn.enabled`` has its ``stats()``.
- ``msattn.register``: lets transformers load models with ``from_pretrained(..., attn_implementation="msattn")``.
- ``msattn.load``: loads an artifact (gate, k-means, query classifier) from a folder or the Hub, and checks it.
- ``msattn.SelectConfig``: policy that selects the blocks of a prompt that are read.
- ``msattn.UserError``: a ``ValueError``, raised for every mistake that the caller can correct.
- ``msattn.<operation>``: each attention operation, e.g. ``msattn.block_sparse_attention(q, k, v, mask)``.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from msattn.kernels.operations import OPERATIONS
from msattn.trainer.version import __version__

if TYPE_CHECKING:
    from msattn.kernels.best_blocks import best_blocks
    from msattn.kernels.block_sparse_attention import block_sparse_attention
    from msattn.kernels.bucket_decode import bucket_decode
    from msattn.kernels.bucket_mass import bucket_mass
    from msattn.kernels.conv_attention import conv_attention
    from msattn.kernels.conv_decode import conv_decode
    from msattn.kernels.flash_decode import flash_decode
    from msattn.kernels.gate_scores import gate_scores
    from msattn.kernels.head_mix_attention import head_mix_attention
    from msattn.kernels.maxpool_attention import maxpool_attention
    from msattn.kernels.merge_states import merge_states
    from msattn.kernels.multiscale_attention import multiscale_attention
    from msattn.kernels.nearest_centroid import nearest_centroid
    from msattn.kernels.paged import (
        paged_block_sparse_attention,
        paged_bucket_decode,
        paged_bucket_sizes,
        paged_flash_decode,
    )
    from msattn.kernels.pool_blocks import pool_blocks
    from msattn.kernels.probe_buckets import probe_buckets
    from msattn.trainer.config import SelectConfig
    from msattn.trainer.errors import UserError
    from msattn.trainer.serving.attach import attach, disable, enable, enabled, load
    from msattn.trainer.serving.implementation import register

_MODULES = {name: operation.module for name, operation in OPERATIONS.items()} | {
    "SelectConfig": "msattn.trainer.config",
    "UserError": "msattn.trainer.errors",
    "attach": "msattn.trainer.serving.attach",
    "disable": "msattn.trainer.serving.attach",
    "enable": "msattn.trainer.serving.attach",
    "enabled": "msattn.trainer.serving.attach",
    "load": "msattn.trainer.serving.attach",
    "register": "msattn.trainer.serving.implementation",
}
__all__ = [  # noqa: RUF022  # operations last
    "SelectConfig",
    "UserError",
    "__version__",
    "attach",
    "disable",
    "enable",
    "enabled",
    "load",
    "register",
    "best_blocks",
    "block_sparse_attention",
    "bucket_decode",
    "bucket_mass",
    "conv_attention",
    "conv_decode",
    "flash_decode",
    "gate_scores",
    "head_mix_attention",
    "maxpool_attention",
    "merge_states",
    "multiscale_attention",
    "nearest_centroid",
    "paged_block_sparse_attention",
    "paged_bucket_decode",
    "paged_bucket_sizes",
    "paged_flash_decode",
    "pool_blocks",
    "probe_buckets",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'msattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
