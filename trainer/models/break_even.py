"""Break-even prompt lengths of sparse prefill against dense attention."""

import sys

import torch

# Compute capability -> sparsity -> prompt length in tokens from which a forward pass with gates, selection included, is
# faster than the fastest dense one. Measured by `msattn eval eval=latency` on a model of Llama-3.1-8B's shape.
BREAK_EVEN: dict[int, dict[float, int]] = {
    90: {0.5: 4082, 0.8: 4053, 0.9: 3963, 0.95: 3924},  # one H200, 2026-11-21
}


def break_even(sparsity: float, device: torch.device) -> int:
    """Returns the prompt length in tokens from which prefill with gates at ``sparsity`` beats dense attention.

    Uses the measurement at the nearest sparsity that is not higher; without one the result is ``sys.maxsize``. Returns 0 on a
    CPU and on GPUs older than the measured ones.
    """
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    measured = BREAK_EVEN.get(max((sm for sm in BREAK_EVEN if sm <= 10 * major + minor), default=0))
    if measured is None:
        return 0
    return min((tokens for lower, tokens in measured.items() if lower <= sparsity), default=sys.maxsize)
