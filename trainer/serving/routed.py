"""Decoding attention over the buckets that a router chooses (SAAP, arXiv 2502.08246, section 5)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from msattn.kernels.bucket_decode import bucket_decode
from msattn.kernels.types import BucketIndex, SparseAttention
from msattn.trainer.methods.buckets import Router
from msattn.trainer.methods.budgets import Budget
from msattn.trainer.models.layer_attention import (
    LayerInputs,
    attention_recall,
    score_options,
    with_sinks,
)
from msattn.trainer.serving.contiguous.layers import REBUILD_EVERY, BucketLayer, IndexedBuckets
from msattn.trainer.serving.statistics import Statistics

# tokens after which the bucket index is rebuilt, if the dense window is as long
MAX_UNINDEXED = 1024


@dataclass(eq=False, kw_only=True)
class RoutedDecoding:
    """Attention of new tokens over a dense window and the buckets of a router, in the routed
    layers.
    """

    router: Router
    budget: Budget
    recent: int
    sink: int
    layers: frozenset[int]  # the routed ones
    # each query head visits its own buckets; otherwise a query group shares them
    independent: bool = False
    # also measures the attention mass that is read, at the cost of a dense pass
    measure_recall: bool
    statistics: Statistics

    @property
    def rebuild_every(self) -> int:
        """The tokens after which a bucket index is rebuilt; the dense window holds their keys until
        then.
        """
        return max(REBUILD_EVERY, min(self.recent, MAX_UNINDEXED))

    def attend(self, x: LayerInputs, layer: BucketLayer, short: Tensor | None = None) -> Tensor:
        """Returns the attention of a few new tokens, ``[B, Hq, N, D]``.

        Sequences that are ``short``, bool ``[B]``, read every key. Several tokens of one become a
        batch of queries over its keys.
        """
        if x.num_queries == 1:
            window = whole_window(layer.window(self.recent), x.num_keys, short)
            return self._attend(x, layer.buckets, window)
        rows, buckets = [], layer.buckets
        for row in range(len(x.q)):
            queries = queries_as_batch(x, row)
            assert queries.kv_len is not None
            window = (queries.kv_len - layer.indexed).clamp(min=self.recent)
            window = whole_window(window, queries.kv_len, None if short is None else short[row])
            out = self._attend(queries, buckets.of_sequence(row), window)
            rows.append(out.squeeze(2).transpose(0, 1))  # [Hq, N, D]
        return torch.stack(rows)

    def _attend(self, x: LayerInputs, buckets: IndexedBuckets, window: int | Tensor) -> Tensor:
        buckets = buckets.for_queries(len(x.q))
        visited, state = self._visit(x, buckets, window)
        self.statistics.add_visible(visible_keys(x))
        if self.measure_recall:
            none = visited[:, : x.k.shape[1], :0]
            dense = decode_attention(x, buckets.index, none, window=x.num_keys, sink=0)
            self.statistics.add("decode_recall", attention_recall(state.lse, dense.lse))
        return state.out

    def attend_step(
        self, x: LayerInputs, layer: BucketLayer, window: Tensor, short: Tensor | None
    ) -> Tensor:
        """Like :meth:`attend`, for one new token of each sequence, without synchronizing with the
        device.
        """
        assert x.kv_len is not None
        buckets = layer.buckets.for_queries(len(x.q))
        return self._visit(x, buckets, whole_window(window, x.kv_len, short))[1].out

    def _visit(
        self, x: LayerInputs, buckets: IndexedBuckets, window: int | Tensor
    ) -> tuple[Tensor, SparseAttention]:
        """Returns the visited buckets and the attention of one query per row; the kernel counts the
        keys that it reads.
        """
        with self.statistics.timed("selection"):
            visited = self.router.visit(
                x, self.budget, buckets, window=window, by_head=self.independent
            )
        counts = self.statistics.key_counts(len(x.k), x.k.shape[1], x.k.device)
        with self.statistics.timed("attention"):
            decode = decode_query_heads if self.independent else decode_attention
            state = decode(x, buckets.index, visited, window=window, sink=self.sink, counts=counts)
        return visited, state


def whole_window(window: int | Tensor, keys: int | Tensor, short: Tensor | None) -> int | Tensor:
    """Returns the length of the dense window: ``window``, or all ``keys`` of sequences that are
    ``short``.
    """
    return window if short is None else torch.where(short, keys, window).int()


def visible_keys(x: LayerInputs) -> Tensor | int:
    """Returns the number of keys that the queries of ``x`` see in all rows and key/value heads."""
    rows, heads = x.k.shape[:2]
    if x.kv_len is None:
        # number for a row without padding
        last = x.num_queries * (2 * x.num_keys - x.num_queries + 1) // 2
        keys: Tensor | int = rows * last
    else:
        keys = x.kv_len.sum()
    padding = 0 if x.kv_start is None else x.kv_start.sum() * x.num_queries
    return (keys - padding) * heads


def decode_attention(
    x: LayerInputs,
    index: BucketIndex,
    probes: Tensor,
    *,
    window: int | Tensor,
    sink: int,
    counts: Tensor | None = None,
) -> SparseAttention:
    """Computes the attention of one query per row, ``[B, Hq, 1, D]``, over the last ``window`` keys
    and the selected buckets.

    ``probes`` are int32 ``[B, Hkv, L]`` without repeated buckets in a row; a ``window`` per row is
    int32 ``[B]``. The number of keys read is added to ``counts``, int64 ``[B, Hkv]``.
    """
    state = bucket_decode(
        x.q, x.k, x.v, index, probes, recent=window, sink=sink, kv_len=x.kv_len, distinct=True,
        counts=counts,
        **score_options(x),
    )  # fmt: skip
    return with_sinks(x, state)


def decode_query_heads(
    x: LayerInputs,
    index: BucketIndex,
    probes: Tensor,
    *,
    window: int | Tensor,
    sink: int,
    counts: Tensor | None = None,
) -> SparseAttention:
    """Computes :func:`decode_attention` with separate ``probes [B, Hq, L]`` for each query head.

    The first query heads of all groups are decoded together, then the second ones, and so on.
    ``counts`` sums their keys.
    """
    group = x.q.shape[1] // x.k.shape[1]
    parts = []
    for member in range(group):
        own = slice(member, None, group)
        sinks = None if x.scoring.sinks is None else x.scoring.sinks[own]
        queries = replace(x, q=x.q[:, own], scoring=x.scoring._replace(sinks=sinks))
        parts.append(
            decode_attention(
                queries, index, probes[:, own], window=window, sink=sink, counts=counts
            )
        )
    return SparseAttention(
        *(torch.stack(each, 2).flatten(1, 2) for each in zip(*parts, strict=True))
    )


def queries_as_batch(x: LayerInputs, row: int) -> LayerInputs:
    """Returns the N queries of one sequence as a batch over its keys, which are not copied.

    Query i sees the first ``kv_len[i]`` keys.
    """
    queries = x.num_queries
    one = slice(row, row + 1)

    def as_rows(tokens: Tensor) -> Tensor:
        return tokens[row].transpose(0, 1).unsqueeze(2)  # [H, N, D] -> [N, H, 1, D]

    return replace(
        x,
        q=as_rows(x.q),
        k=x.k[one].expand(queries, -1, -1, -1),
        v=x.v[one].expand(queries, -1, -1, -1),
        q_nope=as_rows(x.q_nope),
        k_nope=as_rows(x.k_nope),
        kv_start=None if x.kv_start is None else x.kv_start[one].expand(queries),
        kv_len=torch.arange(
            x.num_keys - queries + 1, x.num_keys + 1, dtype=torch.int32, device=x.q.device
        ),
    )
