"""Invalid arguments of all functions of kernels, each by the message that names it."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import msattn
from msattn.kernels.attention_sinks import apply_sinks
from msattn.kernels.decoder_layer import gated_silu, rms_norm, rotate_and_append
from msattn.kernels.flash_decode.score_mod import alibi, sliding_window, softcap
from msattn.kernels.nearest_centroid import bucket_sums
from msattn.kernels.operations import OPERATIONS
from msattn.kernels.paged.write import round_keys, write_pages
from msattn.kernels.testing import starts
from msattn.kernels.types import BucketIndex, PagedKeys, SparseAttention
from msattn.kernels.unrotate import unrotate
from tests.kernels import arguments

INT, LONG, SHORT, HALF = torch.int32, torch.int64, torch.int16, torch.float16
zeros = torch.zeros
NAN, INF = float("nan"), float("inf")
ANY: dict[str, list[Any]] = {  # invalid values of arguments that several functions have
    "backend": ["cuda"],
    "scale": [-1.0, 0.0, NAN],
    "softcap": [0.0, -1.0, NAN, INF],
    "kv_start": [zeros(3, dtype=INT), zeros(1)],
    "kv_len": [zeros(1), zeros(3, dtype=INT)],
    "block_size": [48],
    "key_block_size": [48],
    "splits": [0],
}
BLOCK_MAPS: list[tuple[dict[str, Any], str]] = [
    ({"q": zeros(1, 4, 20, 16)}, "row blocks must be 1"),
    ({"kv_start": starts([41])}, "kv_start=.41."),
]
WEIGHTED: list[tuple[dict[str, Any], str]] = [
    ({"weight": zeros(4, 4, 1, 1)}, r"weight.shape=\(4, 4, 1, 1\)"),
    ({"kv_start": starts([41])}, r"kv_start=\[41\]"),
]
IN_FP8 = {name: zeros(12, 16, 2, 16).to(torch.float8_e4m3fn) for name in "kv"}
PAGED: list[tuple[dict[str, Any], str]] = [  # changes of the cache
    ({"k": zeros(10, 16, 2, 80)}, r"cache.k has shape \(10, 16, 2, 80\)"),
    ({"k": zeros(10, 16, 16, 2).mT}, "cache.k has shape .* strides"),
    ({"k": zeros(10, 16, 2, 16, dtype=HALF)}, "cache.k.dtype=torch.float16"),
    ({"v": zeros(12, 32, 2, 16)}, "cache.v.shape"),
    ({"v": zeros(10, 16, 2, 16).half()}, "cache.v.dtype"),
    ({"table": zeros(2, 3)}, "cache.table is torch.float32"),
    ({"table": zeros(2, 0, dtype=INT)}, "cache.table is"),
    ({"kv_len": zeros(3, dtype=INT)}, r"cache.kv_len is torch.int32 \(3,\)"),
    ({"kv_len": zeros(2, dtype=INT, device="meta")}, "cache.kv_len.device=meta"),
    # values, which the torch backend reads
    ({"kv_len": torch.tensor([81, 30], dtype=INT)}, r"cache.kv_len=\[81, 30\]: expected 0 to 80"),
    ({"kv_len": torch.tensor([-1, 30], dtype=INT)}, r"cache.kv_len=\[-1, 30\]|fewer than its 20"),
    (
        {"table": torch.tensor([[0, 12, 1, 2, 3], [0] * 5], dtype=INT)},
        r"cache.table\[0\]=\[0, 12, 1, 2, 3\]: expected pages",
    ),
    ({"table": torch.tensor([[-1, 3, 1, 2, 3], [0] * 5], dtype=INT)}, "cache.table"),
    ({"k": IN_FP8["k"]}, "cache.v.dtype=torch.float32: expected .* the same for cache.k and"),
    ({"v": IN_FP8["v"]}, "cache.v.dtype=torch.float8_e4m3fn"),
    ({name: x.to(torch.float8_e5m2) for name, x in IN_FP8.items()}, "dtype=torch.float8_e5m2"),
    ({"k_scale": torch.ones(1)}, "cache.k_scale: expected None for .* in torch.float32"),
    (IN_FP8 | {"k_scale": torch.ones(3)}, r"cache.k_scale is torch.float32 \(3,\): .* or \(2,\)"),
    (IN_FP8 | {"v_scale": torch.ones(2).half()}, "cache.v_scale is torch.float16"),
    (IN_FP8 | {"v_scale": zeros(1, device="meta")}, "cache.v_scale.device=meta"),
    (IN_FP8 | {"v_scale": zeros(1)}, r"cache.v_scale=\[0.0\]: expected positive"),
    (IN_FP8 | {"k_scale": torch.tensor([1.0, NAN])}, r"cache.k_scale=\[1.0, nan\]"),
]
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "maxpool_attention": [
        ({"key_block_size": 48}, "key_block_size=48: expected one of 16, 32, 64, 128"),
        ({"pool": "sum"}, "pool='sum': expected one of max, mass, mean_mass"),
        ({"sinks": zeros(3)}, r"sinks is torch.float32 \(3,\)"),
        ({"sinks": zeros(4, dtype=INT)}, "sinks is torch.int32"),
        ({"q": zeros(1, 3, 40, 16)}, "q has 3 heads"),
        ({"q": zeros(1, 4, 40, 24)}, "head size"),
        ({name: zeros(1, 2, 40, 60) for name in "qkv"}, "head size 60"),
        ({"q": zeros(1, 4, 40, 16, dtype=torch.float64)}, "dtype"),
        ({"q": zeros(4, 40, 16)}, "q.shape"),
        ({"q": zeros(2, 4, 40, 16)}, "batch"),
        ({"kv_start": starts([41])}, "kv_start"),
    ],
    "block_sparse_attention": [
        *BLOCK_MAPS,
        ({"block_mask": zeros(1, 3, 2, 2, dtype=torch.bool)}, "heads must be 4 or 2 or 1"),
        ({"block_mask": zeros(1, 2, 2, 2)}, "block_mask is torch.float32"),
        ({"block_mask": zeros(1, 2, 2, 2, dtype=INT)}, "column blocks must be 1"),
    ],
    "multiscale_attention": [
        *BLOCK_MAPS,
        ({"zoom": zeros(1, 3, 2, 2, dtype=torch.uint8)}, "heads must be 4 or 2 or 1"),
        ({"zoom": zeros(1, 2, 2, 2)}, "zoom is torch.float32"),
        ({"zoom": zeros(1, 2, 2, 2, dtype=torch.bool)}, "zoom is torch.bool"),
        (
            {"zoom": torch.full((1, 2, 2, 2), 3, dtype=torch.uint8)},
            "zoom holds 3: expected 0 .skip., 1, 2, 4 or 8",
        ),
    ],
    "conv_attention": [
        *WEIGHTED,
        ({"weight": zeros(2, 3, 3)}, r"weight.shape=\(2, 3, 3\)"),
        ({"weight": zeros(4, 33, 3)}, r"weight.shape=\(4, 33, 3\)"),
        ({"weight": zeros(4, 3)}, r"weight.shape=\(4, 3\)"),
        ({"weight": zeros(4, 3, 3, dtype=HALF)}, "weight.dtype=torch.float16"),
        ({"mask": "keys"}, "mask='keys'"),
    ],
    "head_mix_attention": [
        *WEIGHTED,
        ({"weight": zeros(2, 2)}, r"weight.shape=\(2, 2\)"),
        ({"weight": zeros(4, 4, dtype=HALF)}, "weight.dtype=torch.float16"),
    ],
    "flash_decode": [
        ({"variant": "both"}, "variant='both'"),
        ({"kv_len": starts([71, 30])}, r"kv_len=\[71, 30\]"),
        ({"kv_start": starts([-1, 0])}, r"kv_start=\[-1, 0\]"),
        ({"score_mod": alibi(zeros(3))}, "3 slopes"),
        ({"score_mod": alibi(zeros(4, device="meta"))}, r"score_mod.tensors\[0\].device=meta"),
    ],
    "conv_decode": [
        ({"weight": zeros(4, 3, 3)}, r"q_window.shape=\(2, 4, 2, 16\): expected 3 queries"),
        ({"weight": zeros(3, 2, 3)}, r"weight.shape=\(3, 2, 3\)"),
        ({"mask": "keys"}, "mask='keys'"),
        ({"kv_len": starts([71, 30])}, "kv_len=71"),
        ({"kv_start": starts([-1, 0])}, "kv_start=-1"),
    ],
    "bucket_decode": [
        ({"recent": -1}, "recent=-1"),
        ({"recent": zeros(1)}, "recent is torch.float32"),
        ({"sink": -2}, "sink=-2"),
        ({"counts": zeros(2, 2)}, "counts is torch.float32"),
        ({"counts": zeros(2, 1, dtype=LONG)}, r"counts is torch.int64 \(2, 1\)"),
        ({"counts": zeros(2, 4, dtype=LONG)[:, ::2]}, "contiguous"),
        ({"counts": zeros(2, 2, dtype=LONG, device="meta")}, "counts.device=meta"),
        ({"q": zeros(2, 4, 2, 16)}, "one query"),
        ({"q": zeros(2, 3, 1, 16)}, "q has 3 heads"),
        ({"probes": zeros(2, 2, 4)}, "probes is torch.float32"),
        ({"probes": zeros(2, 1, 4, dtype=INT)}, "probes is torch.int32"),
        ({"index": BucketIndex(zeros(2, 2, 1).int(), zeros(2, 2, 9).int())}, "index.offsets"),
        ({"index": BucketIndex(zeros(2, 2, 3).int(), zeros(2, 2, 9))}, "index.order"),
        # values, which the torch backend reads
        ({"probes": torch.full((2, 2, 1), 10, dtype=INT)}, "probes: 10 to 10"),
        ({"probes": torch.full((2, 2, 1), -2, dtype=INT)}, "probes: -2"),
        ({"kv_len": starts([71, 30])}, r"kv_len=\[71, 30\]"),
        ({"kv_start": starts([-1, 0])}, r"kv_start=\[-1, 0\]"),
        ({"recent": starts([-1, 0])}, r"recent=\[-1, 0\]"),
        *(
            (
                {
                    "index": BucketIndex(offsets.expand(2, 2, -1), zeros(2, 2, 70).int()),
                    "probes": zeros(2, 2, 1).int(),
                },
                "index.offsets",
            )
            for offsets in torch.tensor([[0, 71], [5, 2]], dtype=INT)
        ),
    ],
    "paged_bucket_decode": [
        *PAGED,
        ({"q": zeros(2, 4, 2, 16)}, "one query"),
        ({"q": zeros(2, 3, 1, 16)}, "q has 3 heads"),
        ({"q": zeros(1, 4, 1, 16)}, r"cache.table.shape=\(2, 5\)"),
        ({"q": zeros(2, 4, 1, 72)}, "cache.k has shape"),
        ({"buckets": zeros(12, 16, 2, dtype=INT)}, "buckets is torch.int32"),
        ({"buckets": zeros(12, 16, 1).short()}, r"buckets is torch.int16 \(12, 16, 1\)"),
        ({"probes": zeros(2, 1, 4, dtype=INT)}, "probes is torch.int32"),
        ({"recent": -1}, "recent=-1"),
        ({"recent": zeros(1)}, "recent is torch.float32"),
        ({"sink": -2}, "sink=-2"),
        ({"counts": zeros(2, 2)}, "counts is torch.float32"),
    ],
    "paged_flash_decode": [
        *PAGED,
        ({"q": zeros(2, 4, 16)}, "q.shape"),
        ({"q": zeros(2, 3, 1, 16)}, "q has 3 heads"),
    ],
    "paged_block_sparse_attention": [
        *PAGED,
        ({"q": zeros(1, 4, 23, 16)}, r"q.shape=\(1, 4, 23, 16\): expected packed queries"),
        ({"q": zeros(0, 4, 16)}, r"q.shape=\(0, 4, 16\)"),
        ({"q": zeros(23, 4, 16, dtype=INT)}, "q.dtype=torch.int32"),
        ({"q": zeros(23, 3, 16)}, "q has 3 heads"),
        ({"q": zeros(23, 4, 12)}, "head size 12"),
        (
            {"cu_queries": zeros(2, dtype=INT)},
            r"cu_queries is torch.int32 \(2,\): expected int32 \(3,\)",
        ),
        ({"cu_queries": zeros(3, dtype=LONG)}, "cu_queries is torch.int64"),
        ({"cu_queries": zeros(3, dtype=INT, device="meta")}, "cu_queries.device=meta"),
        ({"block_mask": zeros(2, 1, 2, 5)}, "block_mask is torch.float32"),
        ({"block_mask": zeros(1, 1, 2, 5, dtype=torch.bool)}, "batch must be 2"),
        ({"block_mask": zeros(2, 3, 2, 5, dtype=torch.bool)}, "heads must be 4 or 2 or 1"),
        ({"block_mask": zeros(2, 1, 3, 5, dtype=torch.bool)}, "row blocks must be 2"),
        ({"block_mask": zeros(2, 1, 2, 2, dtype=torch.bool)}, "column blocks must be 5"),
        (
            {"block_mask": zeros(2, 1, 2, 5, dtype=torch.bool, device="meta")},
            "block_mask.device=meta",
        ),
        ({"max_queries": 0}, "max_queries=0"),
        # values, which the torch backend reads
        (
            {"kv_len": torch.tensor([70, 2], dtype=INT)},
            "a sequence has 2 keys, fewer than its 3 queries",
        ),
        ({"cu_queries": torch.tensor([0, 20, 2], dtype=INT)}, r"cu_queries=\[0, 20, 2\]"),
        ({"cu_queries": torch.tensor([1, 20, 23], dtype=INT)}, r"cu_queries=\[1, 20, 23\]"),
        ({"cu_queries": torch.tensor([0, 20, 24], dtype=INT)}, r"cu_queries=\[0, 20, 24\]"),
        ({"max_queries": 19}, "max_queries=19: a sequence has 20 queries"),
    ],
    "paged_bucket_sizes": [
        ({"buckets": zeros(12, 16, 2, dtype=INT)}, "buckets is torch.int32"),
        ({"buckets": zeros(12, 16).short()}, r"buckets is torch.int16 \(12, 16\)"),
        ({"buckets": zeros(12, 0, 2).short()}, "each at least 1"),
        ({"table": zeros(2, 5)}, "table is torch.float32"),
        (
            {"table": zeros(2, 5, dtype=INT, device="meta")},
            "table.device=meta: expected buckets's device",
        ),
        ({"num_buckets": 0}, "num_buckets=0"),
        ({"num_buckets": 2**15 + 1}, "num_buckets=32769: expected 1 to 32,768"),
        ({"counted": zeros(3, dtype=INT)}, r"counted is torch.int32 \(3,\)"),
        ({"sizes": zeros(2, 2, 11, dtype=INT)}, r"sizes is torch.int32 \(2, 2, 11\)"),
        ({"sizes": zeros(2, 10, 2, dtype=INT).mT}, "contiguous"),
        ({"kv_len": starts([81, 30])}, r"kv_len=\[81, 30\]"),
        (
            {"table": torch.tensor([[0, 12, 1, 2, 3], [0] * 5], dtype=INT)},
            r"table\[0\]=\[0, 12, 1, 2, 3\]",
        ),
    ],
    "probe_buckets": [
        ({"probes": 21}, "probes=21"),
        ({"kv_heads": 3}, "kv_heads=3"),
        ({"threshold": 0.5}, "threshold=0.5: expected a number with sizes"),
        ({"sizes": torch.ones(1, 2, 20, dtype=INT)}, "threshold=None"),
        ({"sizes": torch.ones(1, 2, 20), "threshold": 0.5}, "sizes is torch.float32"),
        (
            {"sizes": torch.ones(1, 2, 19, dtype=INT), "threshold": 0.5},
            r"sizes is torch.int32 \(1, 2, 19\)",
        ),
        ({"sizes": torch.ones(1, 2, 20, dtype=INT), "threshold": NAN}, "threshold=nan"),
        (
            {"sizes": torch.ones(1, 2, 20, dtype=INT, device="meta"), "threshold": 0.5},
            "sizes.device=meta",
        ),
        ({"bias_in": zeros(2, 1, 31)}, "bias_in is torch.float32"),
        ({"weight_out": zeros(2, 32, 20, dtype=HALF)}, "weight_out is torch.float16"),
    ],
    "bucket_mass": [
        ({"num_buckets": 0}, "num_buckets=0"),
        ({"min_distance": -1}, "min_distance=-1"),
        ({"q": zeros(1, 3, 5, 64)}, "q has 3 heads"),
        ({"buckets": zeros(1, 2, 70)}, "buckets is torch.float32"),
        ({"buckets": zeros(1, 1, 70, dtype=INT)}, "buckets is torch.int32"),
        ({"buckets": torch.full((1, 2, 70), 10, dtype=INT)}, "buckets: 10 to 10"),
        ({"q_pos": zeros(6, dtype=INT)}, "q_pos is torch.int32"),
        ({"k_pos": zeros(70)}, "k_pos is torch.float32"),
    ],
    "merge_states": [
        ({"lses": zeros(3, 2, 1, 4)}, "lses is"),
        ({"lses": zeros(3, 2, 1, 5, dtype=torch.float64)}, "lses is"),
        ({"outs": zeros(3, 2, 5, 16)}, "outs is"),
        ({"outs": zeros(0, 2, 1, 5, 16), "lses": zeros(0, 2, 1, 5)}, "outs is"),
    ],
    "nearest_centroid": [
        ({"k": zeros(2, 40, 64)}, r"k.shape=\(2, 40, 64\): expected \[batch"),
        ({"k": zeros(1, 2, 40, 64).int()}, "k.dtype=torch.int32"),
        ({"k": zeros(1, 2, 40, 60)}, "head size 60: expected a multiple of 8"),
        ({"centroids": zeros(3, 7, 64)}, r"centroids.shape=\(3, 7, 64\): expected \[2, C, 64\]"),
        (
            {"centroids": zeros(2, 7, 64).half()},
            "centroids.dtype=torch.float16: expected torch.float32",
        ),
    ],
    "bucket_sums": [
        ({"buckets": zeros(1, 2, 40)}, "buckets is torch.float32"),
        (
            {"buckets": zeros(1, 2, 41).int()},
            r"buckets is torch.int32 \(1, 2, 41\): expected int32 \(1, 2, 40\)",
        ),
        ({"num_buckets": 0}, "num_buckets=0"),
        ({"k": zeros(1, 2, 40, 520)}, "head size 520"),
    ],
    "pool_blocks": [
        ({"x": zeros(2, 40, 16)}, "x.shape="),
        ({"x": zeros(2, 1, 40, 12)}, "head size 12"),
        ({"x": zeros(2, 1, 40, 16, dtype=INT)}, "x.dtype="),
        ({"poolings": []}, "poolings="),
        ({"poolings": ["avg", "avg"]}, "poolings="),
        ({"poolings": ["mean"]}, "poolings="),
        ({"start": zeros(3, dtype=INT)}, "start is"),
        ({"start": zeros(2)}, "start is"),
        ({"rotated": zeros(2, 3, 39, 16)}, "rotated is"),
        ({"start": starts([0, 41])}, "start="),
    ],
    "gate_scores": [
        ({"columns": zeros(1, 4, 4)}, "columns is"),
        (
            {"columns": zeros(1, 4, 5), "last_queries": True},
            "columns: expected None with last_queries=True",
        ),
        ({"key_block_size": 8}, "key_block_size=8: expected one of 16, 32, 64, 128"),
        ({"q_pool": ["mean"]}, "q_pool="),
        ({"query_weight": zeros(3, 16, 16)}, "query_weight.shape="),
        ({"query_weight": zeros(4, 15, 16)}, "query_weight.shape="),
        ({"query_weight": zeros(4, 16, 16, dtype=HALF)}, "query_weight is"),
        ({"key_weight": zeros(4, 32, 16).mT}, "key_weight is"),
        ({"inv_freq": zeros(16)}, "inv_freq is"),
        ({"num_keys": 90}, "pooled_k.shape="),
        ({"pooled_k": zeros(1, 2, 5, 8)}, "pooled_k.shape="),
        ({"pooled_k": zeros(1, 2, 5, 32, dtype=torch.float64)}, "pooled_k is"),
        # of the keys' poolings, the last one would be its
        ({"q_rope": zeros(1, 4, 70, 16)}, "key_weight is"),
        ({"mean_weight": 0.5}, "mean_weight=0.5"),
        ({"q_rope": zeros(1, 4, 70, 8)}, "q_rope is"),
        ({"last_rows": zeros(1, 4, 2, 4)}, "last_rows is"),
        ({"last_rows": zeros(1, 4, 6, 5)}, r"expected torch.float32 \(1, 4, 5, 5\)"),
        (
            {"last_rows": zeros(1, 4, 2, 5), "last_queries": True},
            "last_rows: expected None with last_queries=True",
        ),
        ({"whole": zeros(1, 2, dtype=torch.bool)}, r"whole is .* expected bool \[1 or 1, 0\]"),
        ({"last_rows": zeros(1, 4, 2, 5), "whole": zeros(1, 2)}, "whole is torch.float32"),
    ],
    "gate_blocks": [
        ({"counts": zeros(1, 1, 5, 1)}, "counts is torch.float32"),
        ({"local": zeros(2, 1, 5, 1, dtype=INT)}, r"local is torch.int32 \(2, 1, 5, 1\)"),
        ({"sink_blocks": -1}, "sink_blocks=-1: expected 0 or more"),
        ({"num_keys": 90}, "pooled_k.shape="),
    ],
    "best_blocks": [
        ({"scores": zeros(2, 4, 9)}, "scores is"),
        ({"scores": zeros(2, 3, 4, 9, dtype=HALF)}, "scores is"),
        ({"scores": zeros(2, 3, 9, 4).mT}, "scores.stride"),
        ({"counts": torch.ones(1, 1, 4, 1)}, "counts is"),
        ({"visible": torch.ones(2, 3, 4, 9, dtype=torch.bool)}, "visible is"),
        ({"visible": torch.ones(1, 1, 9, 4, dtype=torch.bool).mT}, "visible.stride"),
        ({"always": torch.ones(1, 1, 4, 8, dtype=torch.bool)}, "always is"),
    ],
    "apply_sinks": [
        ({"sinks": zeros(3)}, r"sinks is torch.float32 \(3,\): expected floating point \(2,\)"),
        ({"sinks": zeros(1, 2)}, r"sinks is torch.float32 \(1, 2\)"),
        ({"sinks": zeros(2, dtype=LONG)}, "sinks is torch.int64"),
        ({"sinks": zeros(2, device="meta")}, "sinks.device=meta"),
    ],
    "unrotate": [
        ({"x": zeros(5, 16)}, "x.shape="),
        ({"x": zeros(1, 1, 5, 16).int()}, "x.dtype="),
        ({"cos": zeros(1, 4, 16)}, r"cos is torch.float32 \(1, 4, 16\)"),
        ({"cos": zeros(1, 5, 15)}, "cos is .* r even"),
        ({"cos": zeros(1, 5, 18)}, "cos is .* up to 16"),
        ({"sin": zeros(1, 5, 8)}, "sin is"),
        ({"sin": zeros(3, 5, 16)}, "sin is"),
        ({"sin": zeros(1, 5, 16).int()}, "sin is torch.int32"),
        ({"sin": zeros(1, 5, 16, device="meta")}, "sin.device=meta"),
    ],
    "rms_norm": [
        ({"x": zeros(3, 8).double(), "weight": zeros(8).double()}, "x is torch.float64"),
        ({"x": zeros(())}, r"x is torch.float32 \(\)"),
        ({"x": zeros(3, 0), "weight": zeros(0)}, r"x is torch.float32 \(3, 0\)"),
        ({"weight": zeros(7)}, r"weight is torch.float32 \(7,\): expected float32 \(8,\)"),
        ({"weight": zeros(8).half()}, "weight is torch.float16"),
        ({"weight": zeros(8, device="meta")}, "weight.device=meta"),
        ({"eps": -1.0}, "eps=-1.0"),
    ],
    "gated_silu": [
        ({"gate": zeros(3, 8).int()}, "gate is torch.int32"),
        ({"up": zeros(2, 8)}, r"up is torch.float32 \(2, 8\)"),
        ({"up": zeros(3, 8).half()}, "up is torch.float16"),
        ({"up": zeros(3, 8, device="meta")}, "up.device=meta"),
    ],
    "rotate_and_append": [
        ({"q": zeros(2, 4, 2, 64)}, r"q.shape=\(2, 4, 2, 64\): expected 1 tokens"),
        ({"k": zeros(2, 3, 1, 64), "v": zeros(2, 3, 1, 64)}, "q has 4 heads, k has 3"),
        ({"v": zeros(2, 2, 1, 64, dtype=HALF)}, "v.dtype=torch.float16"),
        (
            {"cos": zeros(3, 1, 64)},
            r"cos is torch.float32 \(3, 1, 64\): expected torch.float32 \[2 or 1, 1, 64\]",
        ),
        ({"sin": zeros(1, 1, 64, dtype=HALF)}, "sin is torch.float16"),
        ({"keys": zeros(2, 2, 64)}, "keys is torch.float32"),
        ({"values": zeros(2, 2, 5, 64)}, r"values.shape=\(2, 2, 5, 64\): expected that of keys"),
        ({"values": zeros(2, 2, 6, 64, device="meta")}, "values.device=meta"),
        ({"position": zeros(2, dtype=LONG)}, r"position is torch.int64 \(2,\)"),
        ({"position": zeros(1, dtype=INT)}, "position is torch.int32"),
    ],
    "write_pages": [
        ({"k": zeros(2, 3)}, r"k is torch.float32 \(2, 3\)"),
        ({"v": zeros(2, 4, 16)}, "v is"),
        ({"v": zeros(2, 3, 16).half()}, "v is torch.float16"),
        ({"keys": zeros(5, 8, 1, 16)}, "keys is"),
        ({"values": zeros(5, 9, 2, 16)}, "values is"),
        ({"values": zeros(5, 8, 2, 16).double()}, "values is torch.float64"),
        ({"values": zeros(5, 8, 2, 16).to(torch.float8_e4m3fn)}, "values is torch.float8_e4m3fn"),
        ({"v_scale": torch.ones(())}, "v_scale: expected None for keys and values in"),
        ({"pages": zeros(3).int()}, "pages is torch.int32"),
        ({"offsets": zeros(4, dtype=LONG)}, r"offsets is torch.int64 \(4,\)"),
        ({"ids": None}, "ids and buckets: expected both or neither"),
        ({"ids": zeros(2, 3)}, "ids is torch.float32"),
        ({"buckets": zeros(5, 8, 2, dtype=INT)}, "buckets is torch.int32"),
        ({"buckets": zeros(5, 8, 2, dtype=SHORT, device="meta")}, "buckets.device=meta"),
    ],
    "round_keys": [
        ({"k": zeros(2, 3)}, r"k is torch.float32 \(2, 3\)"),
        ({"k": zeros(2, 3, 16, dtype=INT)}, "k is torch.int32"),
        ({"k_scale": torch.ones(3)}, r"k_scale is torch.float32 \(3,\): expected .* \(2,\)"),
    ],
}
# functions that are no operations, and valid arguments
PLAIN: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "bucket_sums": (bucket_sums, arguments.bucket_sums("cpu")),
    "apply_sinks": (
        apply_sinks,
        {"state": SparseAttention(zeros(1, 2, 5, 8), zeros(1, 2, 5)), "sinks": zeros(2)},
    ),
    "unrotate": (
        unrotate,
        {"x": zeros(1, 1, 5, 16), "cos": torch.ones(1, 5, 16), "sin": zeros(1, 5, 16)},
    ),
    "rms_norm": (rms_norm, {"x": zeros(3, 8), "weight": zeros(8), "eps": 1e-5}),
    "gated_silu": (gated_silu, {"gate": zeros(3, 8), "up": zeros(3, 8)}),
    "rotate_and_append": (
        rotate_and_append,
        {"q": zeros(2, 4, 1, 64), "k": zeros(2, 2, 1, 64), "v": zeros(2, 2, 1, 64)}
        | {"cos": zeros(1, 1, 64), "sin": zeros(1, 1, 64)}
        | {
            "keys": zeros(2, 2, 6, 64),
            "values": zeros(2, 2, 6, 64),
            "position": zeros(1, dtype=LONG),
        },
    ),
    "write_pages": (
        write_pages,
        {name: zeros(2, 3, 16) for name in "kv"}
        | {
            "keys": zeros(5, 8, 2, 16),
            "values": zeros(5, 8, 2, 16),
            "buckets": zeros(5, 8, 2, dtype=SHORT),
        }
        | {
            "pages": zeros(3, dtype=LONG),
            "offsets": zeros(3, dtype=LONG),
            "ids": zeros(2, 3, dtype=LONG),
        },
    ),
    "round_keys": (round_keys, {"k": zeros(2, 3, 16), "k_scale": torch.ones(2)}),
}


WITHOUT_BFLOAT16 = ("apply_sinks", "best_blocks", "paged_bucket_sizes")
# of any dtype of the others
FULL_PRECISION = (
    "lses", "centroids", "pooled_k", "query_weight", "key_weight", "inv_freq", "k_scale",
)  # fmt: skip

FUNCTIONS = {
    name: (getattr(msattn, name), getattr(arguments, name)("cpu")) for name in OPERATIONS
} | PLAIN


def refusals() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields functions, refused changes of their arguments, and messages."""
    for name, (function, _) in FUNCTIONS.items():
        for change, message in REFUSED.get(name, []):
            yield name, change, message
        for each in [x for x in ANY if x in inspect.signature(function).parameters]:
            for x in ANY[each]:
                yield (
                    name,
                    {each: x},
                    f"{each} is {x.dtype}" if isinstance(x, Tensor) else f"{each}={x!r}",
                )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    refusals(),
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_refuses(name: str, change: dict[str, Any], message: str) -> None:
    """Checks read shapes and types; the torch backend also refuses values."""
    function, given = FUNCTIONS[name]
    of_cache = "cache" in given and change.keys() <= {*PagedKeys._fields}
    with pytest.raises(ValueError, match=message):
        function(**given | ({"cache": given["cache"]._replace(**change)} if of_cache else change))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_accepts_what_the_refused_arguments_are_changes_of(name: str) -> None:
    function, given = FUNCTIONS[name]
    function(**given)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are interpreted without a CUDA device only"
)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in WITHOUT_BFLOAT16])
def test_interpreted_kernels_refuse_bfloat16(name: str) -> None:
    """Triton's interpreter has no arithmetic for it: products were wrong by up to 1e9."""
    function, given = FUNCTIONS[name]

    def half(x: Any) -> Any:
        return x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x

    given = {key: x if key in FULL_PRECISION else half(x) for key, x in given.items()}
    if cache := given.get("cache"):
        given["cache"] = PagedKeys(*map(half, cache))
    with pytest.raises(
        ValueError,
        match=r"dtype=torch.bfloat16: Triton's interpreter .* use float32, float16 or "
        r"backend='torch'",
    ):
        function(**given, backend="triton")
    function(**given, backend="torch")


def test_score_modifications_refuse_bad_parameters() -> None:
    for limit in (0.0, -1.0, INF, NAN):
        with pytest.raises(ValueError, match="limit="):
            softcap(limit)
    for width in (0, 2.5):
        with pytest.raises(ValueError, match="width="):
            sliding_window(width)  # type: ignore[arg-type]
    for slopes in (zeros(4, dtype=HALF), zeros(2, 2)):
        with pytest.raises(ValueError, match="slopes is"):
            alibi(slopes)
