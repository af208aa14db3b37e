"""Small valid arguments of the functions of kernels, with which their operators and their checks of
arguments are tested.
"""

from typing import Any

import torch
from torch import Tensor

from msattn.kernels.common.bucket_index import build_bucket_index
from msattn.kernels.testing import random_block_mask, random_pages, random_qkv, starts
from msattn.kernels.types import PagedKeys
from tests.kernels.problems import random_buckets

Arguments = dict[str, Any]


def _attention(device: str, **others: Any) -> Arguments:
    """One sequence of 40 tokens, 3 of them padding, with 4 query heads and 2 key/value heads."""
    q, k, v = random_qkv(1, 4, 2, 40, head_size=16, device=device)
    return {"q": q, "k": k, "v": v, "kv_start": starts([3], device), "scale": 0.1, **others}


def _decoding(device: str, queries: int = 1, **others: Any) -> Arguments:
    """Two sequences of 70 and 30 cached tokens."""
    q, k, v = random_qkv(2, 4, 2, queries, 70, 16, device=device)
    return {"q": q, "k": k, "v": v, "kv_len": starts([70, 30], device), "scale": 0.1, **others}


def maxpool_attention(device: str) -> Arguments:
    return _attention(
        device, block_size=32, pool="mass", softcap=5.0, sinks=torch.randn(4, device=device)
    )


def block_sparse_attention(device: str) -> Arguments:
    mask = random_block_mask(1, 2, 2, 3, 0.5, device)
    return _attention(device, block_mask=mask, block_size=32, key_block_size=16, softcap=5.0)


def multiscale_attention(device: str) -> Arguments:
    zoom = torch.tensor([[[1, 0], [4, 1]], [[0, 1], [8, 2]]], dtype=torch.uint8, device=device)
    return _attention(device, zoom=zoom[None], block_size=32, softcap=5.0)


def conv_attention(device: str) -> Arguments:
    return _attention(device, weight=torch.randn(4, 2, 3, device=device))


def head_mix_attention(device: str) -> Arguments:
    return _attention(device, weight=torch.randn(4, 4, device=device))


def flash_decode(device: str) -> Arguments:
    return _decoding(
        device, queries=2, kv_start=starts([3, 0], device), variant="global", causal=True
    )


def conv_decode(device: str) -> Arguments:
    return {
        "q_window" if name == "q" else name: x for name, x in _decoding(device, queries=2).items()
    } | {
        "weight": torch.randn(4, 2, 3, device=device),
        "splits": 2,
    }


def bucket_decode(device: str) -> Arguments:
    index = build_bucket_index(random_buckets(2, 2, 70, 10, device), 10)
    recent = starts([5, 9], device)
    return _decoding(device, index=index, probes=_probes(device), recent=recent, softcap=5.0)


def _probes(device: str) -> Tensor:
    return torch.randint(-1, 10, (2, 2, 4), dtype=torch.int32).to(device)


def paged_bucket_decode(device: str) -> Arguments:
    (cache, (slots,)), others = (
        _pages(device, random_buckets(2, 2, 70, 10, device).short()),
        bucket_decode(device),
    )
    given = {name: others[name] for name in ("q", "probes", "recent", "softcap", "scale")}
    return given | {"cache": cache, "buckets": slots}


def paged_bucket_sizes(device: str) -> Arguments:
    cache, (slots,) = _pages(device, random_buckets(2, 2, 70, 10, device).short())
    given = {"buckets": slots, "table": cache.table, "kv_len": cache.kv_len}
    return given | {"num_buckets": 10, "counted": starts([60, 0], device)}


def paged_flash_decode(device: str) -> Arguments:
    given = _decoding(device, queries=3, softcap=2.0)
    return {name: given[name] for name in ("q", "softcap", "scale")} | {"cache": _pages(device)[0]}


def paged_block_sparse_attention(device: str) -> Arguments:
    """Of the first sequence 20 queries, of the second 3; a page is a block."""
    return {
        "q": torch.randn(23, 4, 16, device=device),
        "cache": _pages(device)[0],
        "cu_queries": torch.tensor([0, 20, 23], dtype=torch.int32, device=device),
        "block_mask": torch.rand(2, 4, 2, 5, device=device) < 0.5,
        "max_queries": 20,
        "block_size": 16,
        "softcap": 5.0,
    }


def _pages(device: str, *by_position: Tensor) -> tuple[PagedKeys, list[Tensor]]:
    """Returns sequences of 70 and 30 tokens in pages of 16, and other tensors by slot."""
    _, k, v = random_qkv(2, 4, 2, 1, 70, 16, device=device)
    return random_pages(k, v, starts([70, 30], device), 16, by_position)


def probe_buckets(device: str) -> Arguments:
    q, *_ = random_qkv(1, 4, 2, 1, head_size=64, device=device)
    sizes = {"weight_in": (64, 32), "bias_in": (1, 32), "weight_out": (32, 20), "bias_out": (1, 20)}
    return {"q": q, "kv_heads": 2, "probes": 3} | {
        name: torch.randn(2, *size, device=device) for name, size in sizes.items()
    }


def bucket_mass(device: str) -> Arguments:
    q, k, _ = random_qkv(1, 4, 2, 20, 70, 64, device=device)
    options = {"num_buckets": 10, "causal": True, "scale": 0.1, "softcap": 5.0, "min_distance": 3}
    return {"q": q, "k": k, "buckets": random_buckets(1, 2, 70, 10, device), **options}


def merge_states(device: str) -> Arguments:
    return {
        "outs": torch.randn(3, 2, 1, 5, 16, device=device),
        "lses": torch.randn(3, 2, 1, 5, device=device),
    }


def nearest_centroid(device: str) -> Arguments:
    return {
        "k": torch.randn(1, 2, 40, 64, device=device),
        "centroids": torch.randn(2, 7, 64, device=device),
    }


def bucket_sums(device: str) -> Arguments:
    buckets = random_buckets(1, 2, 40, 7, device)
    return {"k": torch.randn(1, 2, 40, 64, device=device), "buckets": buckets, "num_buckets": 7}


def pool_blocks(device: str) -> Arguments:
    x, start = torch.randn(2, 3, 40, 16, device=device), starts([0, 7], device)
    return {"x": x, "poolings": ["max", "avg"], "block_size": 16, "start": start}


def gate_scores(device: str) -> Arguments:
    """One gate per query head, without means; keys have two poolings."""
    return {
        "q": torch.randn(1, 4, 70, 16, device=device),
        "pooled_k": torch.randn(1, 2, 5, 32, device=device),
        "query_weight": torch.randn(4, 16, 16, device=device),
        "key_weight": torch.randn(4, 16, 32, device=device),
        "inv_freq": torch.rand(8, device=device),
        "q_pool": ["avg"],
        "num_keys": 70,
        "block_size": 16,
        "kv_start": starts([7], device),
    }


def gate_blocks(device: str) -> Arguments:
    rows = {"counts": [1, 1, 2, 2, 3], "local": [0, 0, 1, 2, 3]}
    return (
        gate_scores(device)
        | {
            name: torch.tensor(x, dtype=torch.int32, device=device)[None, None, :, None]
            for name, x in rows.items()
        }
        | {"sink_blocks": 1, "threshold": 1.2, "exponent": -1.0, "above": 2.0}
    )


def best_blocks(device: str) -> Arguments:
    visible = torch.ones(1, 1, 4, 9, dtype=torch.bool, device=device).tril(5)
    return {
        "scores": torch.randn(2, 3, 4, 9, device=device),
        "counts": torch.randint(0, 11, (2, 1, 4, 1), dtype=torch.int32).to(device),
        "visible": visible,
        "always": visible & ~visible.tril(4),
        "threshold": 0.5,
        "exponent": -1.0,
        "edge_exponent": -0.5,
        "above": 2.0,
    }


def block_softmax(device: str) -> Arguments:
    given = best_blocks(device)
    return {"logits": given["scores"], "visible": given["visible"]}
