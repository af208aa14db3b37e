"""Cases of the functions beside attention: sinks, rotations, and the parts of a decoder layer."""

import torch

from msattn.kernels import decoder_layer, unrotate
from msattn.kernels.attention_sinks import apply_sinks
from msattn.kernels.testing import random_qkv
from msattn.kernels.types import SparseAttention
from tests.kernels.cases.records import (
    HALF,
    INT,
    LONG,
    Cases,
    choose,
    drawn,
    zeros,
)


def compile_unrotate(dtype: torch.dtype, head_size: int, sm: int) -> None:
    share, interleaved = choose([(1, False), (2, True)], head_size, sm)
    for tokens, size in ((1, head_size), (100, head_size), (100, head_size * 3 // 4)):
        cos = torch.zeros(1, tokens, size // share, dtype=dtype)
        unrotate.launch(torch.zeros(2, 4, tokens, size, dtype=dtype), cos, cos, interleaved)


def compile_decoder_layer(dtype: torch.dtype, head_size: int, sm: int) -> None:
    cols, eps = choose([4096, 16384, 100], head_size, sm), 1e-6
    # one row, several rows of a program, many rows
    for shape in ((1, 1, cols), (2, 3, head_size), (2**20 // cols + 1, cols)):
        x = torch.zeros(shape, dtype=dtype)
        decoder_layer.launch_rms_norm(x, x.new_zeros(shape[-1]), eps)
        decoder_layer.launch_gated_silu(x, x)
    halves = torch.zeros(3, 2 * cols, dtype=dtype).chunk(2, dim=-1)
    decoder_layer.launch_gated_silu(*halves)
    for tokens, position in ((1, torch.zeros(1, dtype=torch.int64)), (100, 0)):
        q, k, v = random_qkv(2, 4, 2, tokens, tokens, head_size, dtype)
        cache, cos = (
            torch.zeros(2, 2, 200, head_size, dtype=dtype),
            torch.zeros(1, tokens, head_size, dtype=dtype),
        )
        decoder_layer.launch_rotate_and_append(q, k, v, cos, cos, cache, cache, position)


CASES = {
    "apply_sinks": Cases(
        apply_sinks,
        lambda device: (
            {"state": SparseAttention(zeros(1, 2, 5, 8), zeros(1, 2, 5)), "sinks": zeros(2)}
        ),
        None,
        [
            ({"sinks": zeros(3)}, r"sinks is torch.float32 \(3,\): expected floating point \(2,\)"),
            ({"sinks": zeros(1, 2)}, r"sinks is torch.float32 \(1, 2\)"),
            ({"sinks": zeros(2, dtype=LONG)}, "sinks is torch.int64"),
            ({"sinks": zeros(2, device="meta")}, "sinks.device=meta"),
        ],
    ),
    "unrotate": Cases(
        unrotate.unrotate,
        lambda device: drawn(device, x=(1, 1, 5, 16), cos=(1, 5, 16), sin=(1, 5, 16)),
        compile_unrotate,
        [
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
    ),
    "rms_norm": Cases(
        decoder_layer.rms_norm,
        lambda device: drawn(device, x=(3, 8), weight=(8,)) | {"eps": 1e-5},
        compile_decoder_layer,
        [
            ({"x": zeros(3, 8).double(), "weight": zeros(8).double()}, "x is torch.float64"),
            ({"x": zeros(())}, r"x is torch.float32 \(\)"),
            ({"x": zeros(3, 0), "weight": zeros(0)}, r"x is torch.float32 \(3, 0\)"),
            ({"weight": zeros(7)}, r"weight is torch.float32 \(7,\): expected float32 \(8,\)"),
            ({"weight": zeros(8).half()}, "weight is torch.float16"),
            ({"weight": zeros(8, device="meta")}, "weight.device=meta"),
            ({"eps": -1.0}, "eps=-1.0"),
        ],
    ),
    "gated_silu": Cases(
        decoder_layer.gated_silu,
        lambda device: drawn(device, gate=(3, 8), up=(3, 8)),
        None,
        [
            ({"gate": zeros(3, 8).int()}, "gate is torch.int32"),
            ({"up": zeros(2, 8)}, r"up is torch.float32 \(2, 8\)"),
            ({"up": zeros(3, 8).half()}, "up is torch.float16"),
            ({"up": zeros(3, 8, device="meta")}, "up.device=meta"),
        ],
    ),
    "rotate_and_append": Cases(
        decoder_layer.rotate_and_append,
        lambda device: (
            drawn(device, q=(2, 4, 1, 64), k=(2, 2, 1, 64), v=(2, 2, 1, 64))
            | drawn(device, cos=(1, 1, 64), sin=(1, 1, 64))
            | drawn(device, keys=(2, 2, 6, 64), values=(2, 2, 6, 64))
            | {"position": torch.tensor([2], device=device)}
        ),
        None,
        [
            ({"q": zeros(2, 4, 2, 64)}, r"q.shape=\(2, 4, 2, 64\): expected 1 tokens"),
            ({"k": zeros(2, 3, 1, 64), "v": zeros(2, 3, 1, 64)}, "q has 4 heads, k has 3"),
            ({"v": zeros(2, 2, 1, 64, dtype=HALF)}, "v.dtype=torch.float16"),
            (
                {"cos": zeros(3, 1, 64)},
                r"cos is torch.float32 \(3, 1, 64\): expected torch.float32 \[2 or 1, 1, 64\]",
            ),
            ({"sin": zeros(1, 1, 64, dtype=HALF)}, "sin is torch.float16"),
            ({"keys": zeros(2, 2, 64)}, "keys is torch.float32"),
            (
                {"values": zeros(2, 2, 5, 64)},
                r"values.shape=\(2, 2, 5, 64\): expected that of keys",
            ),
            ({"values": zeros(2, 2, 6, 64, device="meta")}, "values.device=meta"),
            ({"position": zeros(2, dtype=LONG)}, r"position is torch.int64 \(2,\)"),
            ({"position": zeros(1, dtype=INT)}, "position is torch.int32"),
        ],
    ),
}
