"""Break-even lengths, from which sparse attention is faster than dense attention."""

import math
import sys
from typing import NamedTuple

import torch

# Compute capability (0: a CPU) -> sparsity -> prompt length in tokens from which a forward pass
# with gates, selection included, is faster than the fastest dense one. Measured by
# `msattn eval eval=latency`: on GPUs with a model of Llama-3.1-8B's shape, on a CPU with the
# embedded model.
BREAK_EVEN: dict[int, dict[float, int]] = {
    # 2026-11-27, one thread, 4096 tokens: 0.78 of the dense time at 0.8, 1.2 at 0.5
    0: {0.8: 4096},
    # 0.8: one H200, 2026-11-26. 0.5: that of 0.8, longer by the ratio on one H100 (6371 and 5539).
    # 0.9: one H200, 8 layers, 2026-11-27.
    90: {0.5: 7700, 0.8: 6700, 0.9: 3900},
}


class DecodingCost(NamedTuple):
    """Cost of routed decoding in a layer, in bytes of keys and values that dense attention reads in
    the same time.
    """

    overhead: float  # cost per step: choosing buckets, launching kernels
    overhead_of_row: float  # cost per sequence of the batch
    factor: float  # cost of a byte read through the bucket index, relative to a dense read


DECODING_COST: dict[int, DecodingCost] = {
    0: DecodingCost(32e6, 0, 2.0),  # 2 cores, the embedded model, 2026-11-23
    90: DecodingCost(95e6, 2e6, 1.5),  # one H200, batches of 1 to 32, 2026-11-23
}


def prefill_break_even(sparsity: float, device: torch.device) -> int:
    """Returns the prompt length in tokens from which prefill with gates at ``sparsity`` beats dense
    attention.

    Uses the measurement at the nearest sparsity that is not higher; if there is none, returns
    ``sys.maxsize``. Returns 0 on GPUs older than the measured ones.
    """
    measured = BREAK_EVEN.get(_measured_device(device, tuple(BREAK_EVEN)))
    if measured is None:
        return 0
    return min(
        (tokens for lower, tokens in measured.items() if lower <= sparsity), default=sys.maxsize
    )


def decoding_break_even(
    device: torch.device, key_bytes: int, window: int, share: float, batch: int
) -> int:
    """Returns the number of keys of each sequence from which routed decoding beats dense attention.

    A key and its value take ``key_bytes`` in all heads of a layer. The ``window`` is always read,
    and a ``share`` of the buckets.
    """
    cost = DECODING_COST.get(_measured_device(device, tuple(DECODING_COST)))
    if cost is None:
        return 0
    saved = 1 - cost.factor * share  # saved per key
    if saved <= 0:
        return sys.maxsize
    overhead = cost.overhead / batch + cost.overhead_of_row
    return math.ceil((overhead / key_bytes + cost.factor * window) / saved)


def _measured_device(device: torch.device, measured: tuple[int, ...]) -> int:
    """Returns the largest of the ``measured`` compute capabilities that the device has; 0 for a
    CPU, -1 for none.
    """
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return max((sm for sm in measured if 0 < sm <= 10 * major + minor), default=-1)
