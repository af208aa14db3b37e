"""Decoding attention over the buckets of a cache (SAAP, arXiv 2502.08246, section 5).

Usage in an attention function for :func:`msattn.trainer.models.tap.tap`, which gets ``x: LayerInputs`` after the cache update::

    layer = x.cache                                   # a BucketLayer, from `install_layers`
    layer.assign(router, x)                           # in every forward pass, for prompts and single tokens
    if x.num_queries == 1:
        visited = route(router, x, probes)            # int32 [B, Hkv, L]
        out = decode_attention(x, visited, window=layer.window(recent), sink=sink).out
"""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from msattn.kernels.bucket_decode import bucket_decode
from msattn.kernels.types import BucketIndex, SparseAttention
from msattn.trainer.models.layer_attention import score_options, with_sinks

if TYPE_CHECKING:
    from msattn.trainer.models.tap import LayerInputs


def decode_attention(
    x: "LayerInputs", probes: Tensor, *, window: int | Tensor, sink: int, counts: Tensor | None = None
) -> SparseAttention:
    """Computes the attention of one query per row over the dense window and the visited buckets.

    Parameters
    ----------
    x : LayerInputs
        ``x.cache`` is a :class:`BucketLayer`, after its ``assign`` of this pass. With :func:`queries_as_batch`, rows are
        queries of one of its sequences.
    probes : Tensor
        int32 ``[B, Hkv, L]``, from :func:`msattn.trainer.methods.buckets.route`.
    window : int or Tensor int32 ``[B]``
        Number of last keys that are always read: :meth:`BucketLayer.window`.
    sink : int
        Number of first keys that are always read.
    counts : Tensor int64 ``[B, Hkv]``, optional
        The number of keys that are read is added to it.

    Returns
    -------
    SparseAttention : ``out [B, Hq, 1, D]``, ``lse [B, Hq, 1]``.
    """
    index = BucketIndex(*(part.expand(len(x.q), -1, -1) for part in x.cache.index))
    state = bucket_decode(
        x.q, x.k, x.v, index, probes, recent=window, sink=sink, kv_len=x.kv_len, counts=counts, **score_options(x)
    )
    return with_sinks(x, state)


def decode_query_heads(
    x: "LayerInputs", probes: Tensor, *, window: int | Tensor, sink: int, counts: Tensor | None = None
) -> SparseAttention:
    """Computes :func:`decode_attention` with separate ``probes [B, Hq, L]`` for each query head.

    The first query heads of all groups are decoded together, then the second ones, and so on. ``counts`` adds up their keys.
    """
    group = x.q.shape[1] // x.k.shape[1]
    parts = []
    for member in range(group):
        own = slice(member, None, group)
        queries = replace(x, q=x.q[:, own], sinks=None if x.sinks is None else x.sinks[own])
        parts.append(decode_attention(queries, probes[:, own], window=window, sink=sink, counts=counts))
    return SparseAttention(*(torch.stack(each, 2).flatten(1, 2) for each in zip(*parts, strict=True)))


def queries_as_batch(x: "LayerInputs", row: int) -> "LayerInputs":
    """Returns the N queries of one sequence as a batch over its keys, which are not copied.

    Query i sees the first ``kv_len[i]`` keys.
    """
    queries = x.num_queries
    one = slice(row, row + 1)

    def as_rows(of_tokens: Tensor) -> Tensor:
        return of_tokens[row].transpose(0, 1).unsqueeze(2)  # [H, N, D] -> [N, H, 1, D]

    return replace(
        x,
        q=as_rows(x.q),
        k=x.k[one].expand(queries, -1, -1, -1),
        v=x.v[one].expand(queries, -1, -1, -1),
        q_nope=as_rows(x.q_nope),
        k_nope=as_rows(x.k_nope),
        kv_start=None if x.kv_start is None else x.kv_start[one].expand(queries),
        kv_len=torch.arange(x.num_keys - queries + 1, x.num_keys + 1, dtype=torch.int32, device=x.q.device),
        cache=_OneRow(
            BucketIndex(*(part[one] for part in x.cache.index)), None if x.cache.summaries is None else x.cache.summaries[one]
        ),
    )


class _OneRow(NamedTuple):
    """The index and the summaries of one sequence of a :class:`BucketLayer`."""

    index: BucketIndex
    summaries: Tensor | None
