"""Arguments of operations on gates that tests share."""

from typing import Any

import torch

from msattn.kernels import testing
from msattn.kernels.reference.pool_blocks import pool_blocks as reference_pools

# query heads, key heads, gate heads, queries, keys, head size, hidden, block, key block, padding,
# poolings
CASES = {
    "one gate per query head": (4, 2, 4, 70, 70, 16, 16, 16, 16, None, ["avg"], ["max", "min"]),
    "one gate per key/value head": (4, 2, 2, 70, 70, 40, 24, 16, 16, None, ["avg", "max"], ["avg"]),
    "gates between both": (8, 1, 2, 40, 40, 16, 8, 16, 16, None, ["min"], ["max", "min", "avg"]),
    "padding": (2, 2, 2, 70, 70, 16, 16, 16, 16, [0, 37, 69], ["avg"], ["max", "min"]),
    "more keys": (2, 1, 2, 37, 90, 16, 16, 16, 16, [0, 60], ["avg"], ["max", "min"]),
    "more queries": (2, 1, 2, 90, 37, 16, 16, 16, 16, None, ["avg"], ["max", "min"]),
    "fewer keys than queries in a block": (
        4,
        2,
        4,
        150,
        150,
        16,
        16,
        64,
        16,
        None,
        ["avg"],
        ["max", "min"],
    ),
    "fewer keys, padding": (4, 1, 4, 70, 150, 16, 8, 32, 16, [0, 33], ["avg"], ["max", "min"]),
    "three queries a key": (6, 2, 6, 140, 170, 8, 8, 64, 32, [0, 20], ["avg"], ["max", "min"]),
    "seven queries a key": (7, 1, 7, 130, 130, 16, 16, 64, 64, None, ["avg"], ["avg"]),
    "several tiles": (1, 1, 1, 2100, 2100, 8, 8, 16, 16, [0, 1000], ["avg"], ["avg"]),
}

WITHOUT_MEANS = ("one gate per query head", "more queries")


def random_arguments(case: str, device: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Returns arguments with weights that make rows neither uniform nor one-hot."""
    (
        heads,
        kv_heads,
        gates,
        queries,
        keys,
        size,
        hidden,
        block,
        key_block,
        padding,
        q_pool,
        k_pool,
    ) = CASES[case]
    q, k, _ = testing.random_qkv(
        1 if padding is None else len(padding), heads, kv_heads, queries, keys, size, dtype, device
    )
    widths = heads // gates * len(q_pool) * size, len(k_pool) * size
    weights = [
        torch.randn(gates, hidden, width).to(device) * (block**0.25 / width**0.5)
        for width in widths
    ]
    means = {"q_rope": q.flip(3), "k_rope": k.roll(1, 3), "mean_weight": (block / size) ** 0.5}
    return {
        "q": q, "k": k, "query_weight": weights[0], "key_weight": weights[1],
        "inv_freq": (100.0 ** -(torch.arange(hidden // 2) / (hidden // 2))).to(device),
        "q_pool": q_pool, "k_pool": k_pool, "block_size": block, "key_block_size": key_block,
        "kv_start": testing.starts(padding, device), **({} if case in WITHOUT_MEANS else means),
    }  # fmt: skip


def pooled(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of ``gate_scores``, with pooled keys."""
    a = dict(arguments)
    k, k_pool, k_rope = a.pop("k"), a.pop("k_pool"), a.pop("k_rope", None)
    of_blocks = {"block_size": a["key_block_size"], "start": a["kv_start"], "rotated": k_rope}
    return a | {"pooled_k": reference_pools(k, k_pool, **of_blocks), "num_keys": k.shape[2]}


def doubled(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same numbers in fp64; frequencies stay as they are."""
    double = ("q", "k", "pooled_k", "query_weight", "key_weight", "q_rope", "k_rope")
    return {name: x.double() if name in double else x for name, x in arguments.items()}
