"""Prompt lengths from which sparse prefill is faster than dense attention."""

import sys

import torch

# compute capability -> sparsity -> tokens from which on a forward pass with gates is faster than the fastest dense one,
# choosing blocks included; for a model of Llama-3.1-8B's shape (`msattn eval eval=latency` finds them).
BREAK_EVEN: dict[int, dict[float, int]] = {
    90: {0.5: 4082, 0.8: 4053, 0.9: 3963, 0.95: 3924},  # one H200, 2026-11-21
}


def break_even(sparsity: float, device: torch.device) -> int:
    """Length in tokens from which on prefill through gates at ``sparsity`` is faster than dense attention.

    That of the next lower sparsity which was measured; below all of them no length is long enough. 0 on a CPU and on GPUs
    older than those measured, of which nothing is known.
    """
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    measured = BREAK_EVEN.get(max((sm for sm in BREAK_EVEN if sm <= 10 * major + minor), default=0))
    if measured is None:
        return 0
    return min((tokens for lower, tokens in measured.items() if lower <= sparsity), default=sys.maxsize)
