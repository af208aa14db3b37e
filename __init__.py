"""msattn: sparse attention for pretrained long-context language models.

Public API, loaded on first use so that ``import msattn`` is fast and does not import torch:

- ``msattn.attach``: context manager that runs a Hugging Face model with sparse attention through
  trained artifacts.
- ``msattn.enable``, ``msattn.disable``: the same without a context, e.g. in a server;
  ``msattn.enabled`` has its ``stats()``.
- ``msattn.register``: lets transformers load models with
  ``from_pretrained(..., attn_implementation="msattn")``.
- ``msattn.load``: loads an artifact (gate, k-means, query classifier) from a folder or the Hub, and
  checks it.
- ``msattn.SelectConfig``: policy that selects the blocks of a prompt that are read.
- ``msattn.Selection``: a policy, e.g. ``msattn.TopK``, with a scorer of your own, derived from
  ``msattn.UntrainedScorer``; its tools are ``msattn.aligned_blocks``, ``msattn.normalize_rows`` and
  ``msattn.calibrate_blocks``.
- ``msattn.EMBEDDED``: path of the small model that ships with msattn.
- ``msattn.UserError``: a ``ValueError``, raised for every mistake that the caller can correct;
  ``msattn.ModelWarning``: a warning about a model or its artifacts.
- ``msattn.<operation>``: each attention operation, e.g.
  ``msattn.block_sparse_attention(q, k, v, mask)``. Some take a ``msattn.PagedKeys``,
  ``msattn.BucketIndex`` (of ``msattn.build_bucket_index``) or ``msattn.ScoreMod``.
"""

# ruff: noqa: F401 (names for type checkers)

from importlib import import_module
from typing import TYPE_CHECKING

from msattn.kernels.operations import OPERATIONS
from msattn.trainer.version import __version__

if TYPE_CHECKING:
    from msattn.kernels.best_blocks import best_blocks, block_softmax
    from msattn.kernels.block_sparse_attention import block_sparse_attention
    from msattn.kernels.bucket_decode import bucket_decode
    from msattn.kernels.bucket_mass import bucket_mass
    from msattn.kernels.common.bucket_index import build_bucket_index
    from msattn.kernels.flash_decode import flash_decode
    from msattn.kernels.gate_blocks import gate_blocks
    from msattn.kernels.gate_scores import gate_scores
    from msattn.kernels.maxpool_attention import maxpool_attention
    from msattn.kernels.merge_states import merge_states
    from msattn.kernels.multi_token.conv_attention import conv_attention
    from msattn.kernels.multi_token.conv_decode import conv_decode
    from msattn.kernels.multi_token.head_mix_attention import head_mix_attention
    from msattn.kernels.multiscale_attention import multiscale_attention
    from msattn.kernels.nearest_centroid import bucket_sums, nearest_centroid
    from msattn.kernels.paged import (
        paged_block_sparse_attention,
        paged_bucket_decode,
        paged_bucket_sizes,
        paged_flash_decode,
    )
    from msattn.kernels.pool_blocks import pool_blocks
    from msattn.kernels.probe_buckets import probe_buckets
    from msattn.kernels.probe_centroids import probe_centroids
    from msattn.kernels.types import BucketIndex, PagedKeys, ScoreMod
    from msattn.trainer.config import SelectConfig
    from msattn.trainer.config.policies import TopK
    from msattn.trainer.errors import ModelWarning, UserError
    from msattn.trainer.methods.blocks import aligned_blocks, normalize_rows
    from msattn.trainer.methods.selection import Selection
    from msattn.trainer.methods.thresholds import calibrate_blocks
    from msattn.trainer.methods.untrained.base import UntrainedScorer
    from msattn.trainer.models import EMBEDDED
    from msattn.trainer.serving.attach import attach, disable, enable, enabled, load
    from msattn.trainer.serving.implementation import register

_OTHERS = {
    "msattn.kernels.common.bucket_index": ("build_bucket_index",),
    "msattn.kernels.types": ("BucketIndex", "PagedKeys", "ScoreMod"),
    "msattn.trainer.config": ("SelectConfig",),
    "msattn.trainer.errors": ("ModelWarning", "UserError"),
    "msattn.trainer.methods.blocks": ("aligned_blocks", "normalize_rows"),
    "msattn.trainer.config.policies": ("TopK",),
    "msattn.trainer.methods.selection": ("Selection",),
    "msattn.trainer.methods.thresholds": ("calibrate_blocks",),
    "msattn.trainer.methods.untrained.base": ("UntrainedScorer",),
    "msattn.trainer.models": ("EMBEDDED",),
    "msattn.trainer.serving.attach": ("attach", "disable", "enable", "enabled", "load"),
    "msattn.trainer.serving.implementation": ("register",),
}
_MODULES = {name: operation.module for name, operation in OPERATIONS.items()}
_MODULES |= {name: module for module, names in _OTHERS.items() for name in names}
__all__ = sorted(["__version__", *_MODULES])


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'msattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
