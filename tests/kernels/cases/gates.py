"""Cases of the functions that pool keys, score blocks and choose them."""

import math

import torch

import msattn
from msattn.kernels import best_blocks
from msattn.kernels.common import block_counts, block_masses, block_pooling, gate_rows
from msattn.kernels.testing import starts
from tests.kernels.cases.records import (
    CAPS,
    HALF,
    INT,
    Arguments,
    Cases,
    choose,
    token,
    zeros,
)

WEIGHTS = ("query_weight", "key_weight", "inv_freq")


def pool_blocks_arguments(device: str) -> Arguments:
    x, start = torch.randn(2, 3, 40, 16, device=device), starts([0, 7], device)
    return {"x": x, "poolings": ["max", "avg"], "block_size": 16, "start": start}


def compile_pool_blocks(dtype: torch.dtype, head_size: int, sm: int) -> None:
    x = torch.zeros(2, 200, 3, head_size, dtype=dtype).transpose(1, 2)
    one, two, three = (
        ("avg", 64, None, x),
        ("max,min", 16, None, None),
        ("min,avg,max", 128, torch.tensor([8, 0]), x),
    )
    block_pooling.launch(x, *choose([two, three, one], head_size, sm))


def gate_scores_arguments(device: str) -> Arguments:
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


def other_gates(given: Arguments) -> list[Arguments]:
    """Means and the last queries; scores of columns and of the last rows."""
    device = given["q"].device
    return [
        {
            "q_rope": given["q"].flip(3),
            "pooled_k": torch.randn(1, 2, 5, 48, device=device),
            "mean_weight": 0.5,
            "last_queries": True,
        },
        {
            "last_rows": torch.rand(1, 4, 2, 5, device=device),
            "whole": torch.tensor([[False, True]], device=device),
            "columns": torch.rand(1, 4, 5, device=device),
        },
    ]


def compile_gate_scores(dtype: torch.dtype, head_size: int, sm: int) -> None:
    gate, *_ = _gate(dtype, head_size, sm)
    gate_rows.launch(gate)
    q, key_block, kv_start = gate.q, gate.key_block_size, gate.kv_start
    block_masses.launch(
        q[:, :, -64:], q[:, :2], kv_start, key_block, 0.1, choose(CAPS, head_size, sm)
    )
    total, blocks = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.int64)
    for selected in (torch.bool, torch.int32):
        block_counts.launch(total, torch.zeros(2, 4, 13, 13, dtype=selected), blocks, 8)


def gate_blocks_arguments(device: str) -> Arguments:
    rows = {"counts": [1, 1, 2, 2, 3], "local": [0, 0, 1, 2, 3]}
    return (
        gate_scores_arguments(device)
        | {
            name: torch.tensor(x, dtype=torch.int32, device=device)[None, None, :, None]
            for name, x in rows.items()
        }
        | {"sink_blocks": 1, "threshold": 1.2, "exponent": -1.0, "above": 2.0}
    )


def compile_gate_blocks(dtype: torch.dtype, head_size: int, sm: int) -> None:
    gate, rows, cols = _gate(dtype, head_size, sm)
    numbers = torch.zeros(1, 1, rows, 1, dtype=torch.int32)
    choice = gate_rows.Choice(numbers, numbers, 1, 1.0, -1.0, -0.5, 2.0)
    given = torch.zeros(2, len(gate.query_weight), 2, cols), torch.ones(2, 2, dtype=torch.bool)
    exact = gate._replace(last_queries=False, columns=given[0][:, :, 0].contiguous())
    for each in (gate, exact._replace(last_rows=given[0], whole=given[1])):
        gate_rows.launch(each, choice)
    # the longest row that a program holds
    longest = gate._replace(
        pooled_k=gate.pooled_k[:, :, :1].expand(-1, -1, 65536, -1),
        num_keys=65536 * gate.key_block_size,
        kv_start=None,
        last_queries=False,
    )
    gate_rows.launch(longest, choice)


def _gate(dtype: torch.dtype, head_size: int, sm: int):
    """Returns the arguments of a gate, and its numbers of row blocks and column blocks."""
    q = torch.zeros(2, 4, 200, head_size, dtype=dtype)
    usual, other = (4, head_size, None, 64, 16), (2, 24, starts([8, 0]), 128, 128)
    heads, hidden, kv_start, block, key_block = choose([usual, other], head_size, sm)
    means = (q, 0.5) if heads == 4 or head_size == 256 else (None, 0.0)
    weights = (
        torch.zeros(heads, hidden, 4 // heads * head_size),
        torch.zeros(heads, hidden, 2 * head_size),
    )
    pooled_k = torch.zeros(2, 2, -(-200 // key_block), (2 + (means[0] is not None)) * head_size)
    gate = gate_rows.GateArguments(
        q, pooled_k, *weights, torch.zeros(hidden // 2), "avg", 200, block, key_block, kv_start,
        *means, head_size != 16, None, None, None,
    )  # fmt: skip
    return gate, *gate.map_shape[2:]


def best_blocks_arguments(device: str) -> Arguments:
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


def compile_best_blocks(dtype: torch.dtype, head_size: int, sm: int) -> None:
    for cols in (7, 2048, 65536):
        scores, visible = torch.zeros(2, 3, 2, cols), torch.ones(1, 1, 2, cols, dtype=torch.bool)
        best_blocks.launch_best(
            scores,
            torch.ones(2, 1, 2, 1, dtype=torch.int32),
            visible,
            visible,
            math.inf,
            0.0,
            0.0,
            0.0,
        )


def block_softmax_arguments(device: str) -> Arguments:
    given = best_blocks_arguments(device)
    return {"logits": given["scores"], "visible": given["visible"]}


def compile_block_softmax(dtype: torch.dtype, head_size: int, sm: int) -> None:
    for cols in (7, 2048, 65536):
        best_blocks.launch_softmax(
            torch.zeros(2, 3, 2, cols), torch.ones(1, 1, 2, cols, dtype=torch.bool)
        )


CASES = {
    "pool_blocks": Cases(
        msattn.pool_blocks,
        pool_blocks_arguments,
        compile_pool_blocks,
        [
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
        read=token(20, name="x"),
        unread=lambda given: given["x"][1, 0, 3],
    ),
    "gate_scores": Cases(
        msattn.gate_scores,
        gate_scores_arguments,
        compile_gate_scores,
        [
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
        variants=other_gates,
        read=token(2, name="pooled_k"),
        unread=token(4, name="pooled_k"),
        contiguous=WEIGHTS,
        full_precision=("pooled_k", *WEIGHTS),
        slow=("strides",),
    ),
    "gate_blocks": Cases(
        msattn.gate_blocks,
        gate_blocks_arguments,
        compile_gate_blocks,
        [
            ({"counts": zeros(1, 1, 5, 1)}, "counts is torch.float32"),
            ({"local": zeros(2, 1, 5, 1, dtype=INT)}, r"local is torch.int32 \(2, 1, 5, 1\)"),
            ({"sink_blocks": -1}, "sink_blocks=-1: expected 0 or more"),
            ({"num_keys": 90}, "pooled_k.shape="),
        ],
        variants=other_gates,
        read=None,
        contiguous=WEIGHTS,
        full_precision=("pooled_k", *WEIGHTS),
        slow=("strides",),
    ),
    "best_blocks": Cases(
        msattn.best_blocks,
        best_blocks_arguments,
        compile_best_blocks,
        [
            ({"scores": zeros(2, 4, 9)}, "scores is"),
            ({"scores": zeros(2, 3, 4, 9, dtype=HALF)}, "scores is"),
            ({"scores": zeros(2, 3, 9, 4).mT}, "scores.stride"),
            ({"counts": torch.ones(1, 1, 4, 1)}, "counts is"),
            ({"visible": torch.ones(2, 3, 4, 9, dtype=torch.bool)}, "visible is"),
            ({"visible": torch.ones(1, 1, 9, 4, dtype=torch.bool).mT}, "visible.stride"),
            ({"always": torch.ones(1, 1, 4, 8, dtype=torch.bool)}, "always is"),
        ],
        read=None,
        contiguous=("scores", "visible", "always"),
        full_precision=("scores",),
        slow=("strides",),
    ),
    "block_softmax": Cases(
        msattn.block_softmax,
        block_softmax_arguments,
        compile_block_softmax,
        [
            ({"logits": zeros(2, 4, 9)}, "logits is"),
            ({"logits": zeros(2, 3, 4, 9, dtype=HALF)}, "logits is"),
            ({"logits": zeros(2, 3, 9, 4).mT}, "logits.stride"),
            ({"visible": zeros(1, 1, 4, 9)}, "visible is torch.float32"),
            ({"visible": torch.ones(1, 1, 9, 4, dtype=torch.bool).mT}, "visible.stride"),
        ],
        differentiable=True,
        read=lambda given: given["logits"][0, 0, 0, 2],
        unread=lambda given: given["logits"][0, 0, 0, 8:],
        contiguous=("logits", "visible"),
        full_precision=("logits",),
        slow=("strides",),
    ),
}
