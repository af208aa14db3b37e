"""Fused forward passes of a decoder's modules, for inference on a GPU: fewer kernels, with the same rounding as transformers.

``replaced`` installs them as ``module.forward``, so hooks on the modules still run.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from msattn.kernels.common.checks import FLOATS
from msattn.kernels.decoder_layer import gated_silu, rms_norm
from msattn.trainer.models.families import family_of
from msattn.trainer.models.stand_ins import NotCopied, replaced
from msattn.trainer.serving.graphs import concurrently


@contextmanager
def fused(decoder: nn.Module) -> Iterator[None]:
    """Runs a decoder with the fused forward passes of its norms and MLPs inside the context."""
    with ExitStack() as replacements:
        for module, forward in _fused_modules(decoder):
            replacements.enter_context(replaced(module, forward))
        yield


class _Fused(NotCopied):
    def __init__(self, module: Any) -> None:
        self.module, self.original = module, module.forward


class FusedNorm(_Fused):
    """The forward pass of an RMS norm as one kernel."""

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight = self.module.weight
        if _is_fusable(hidden_states, weight):
            return rms_norm(hidden_states, weight, self.module.variance_epsilon)
        return self.original(hidden_states)


class FusedMLP(_Fused):
    """The forward pass of a gated MLP with SiLU; activation and product are one kernel."""

    def __call__(self, x: Tensor) -> Tensor:
        if not _is_fusable(x, x):
            return self.original(x)
        gate, up = concurrently(x, lambda: self.module.gate_proj(x), lambda: self.module.up_proj(x))
        return self.module.down_proj(gated_silu(gate, up))


def _is_fusable(x: Tensor, weight: Tensor) -> bool:
    """Returns True if a fused kernel supports ``x``; weights of offloaded modules are on another device between passes."""
    same = not isinstance(weight, DTensor) and x.dtype == weight.dtype and x.dtype in FLOATS and x.device == weight.device
    return x.is_cuda and same and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cuda")


def _fused_modules(decoder: nn.Module) -> list[tuple[nn.Module, Callable[..., Any]]]:
    """Returns a decoder's modules with a fused forward pass, and that pass; norms that round differently have none."""
    found: list[tuple[nn.Module, Callable[..., Any]]] = []
    if not family_of(decoder.config).llama_layers:  # pyrefly: ignore[bad-argument-type]
        return found
    for module in decoder.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            found.append((module, FusedNorm(module)))
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")) and _is_silu(module):
            found.append((module, FusedMLP(module)))
    return found


def _is_silu(mlp: Any) -> bool:
    return isinstance(getattr(mlp, "act_fn", None), nn.SiLU) or type(getattr(mlp, "act_fn", None)).__name__ == "SiLUActivation"
