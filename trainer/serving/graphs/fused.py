"""Fused forward passes of a decoder's modules, for inference on a GPU: fewer kernels, with the same
rounding as transformers.

``replaced`` installs them as ``module.forward``, so hooks on the modules still run.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from msattn.kernels.common.checks import FLOATS
from msattn.kernels.decoder_layer import gated_silu, rms_norm, rotate_and_append
from msattn.trainer.models.families import family_of
from msattn.trainer.models.replacement import NotCopied, replaced
from msattn.trainer.models.tap import CACHE, PAGES, Angles, LayerInputs, LayerTap, Scoring
from msattn.trainer.serving.attend import Sparse
from msattn.trainer.serving.contiguous.layers import GrowingLayer
from msattn.trainer.serving.graphs.capture import CurrentStep, NoGraph, Step, concurrently


@contextmanager
def fused(decoder: nn.Module) -> Iterator[None]:
    """Runs a decoder with the fused forward passes of its norms and MLPs inside the context."""
    is_llama = family_of(decoder.config).llama_layers  # pyrefly: ignore[bad-argument-type]
    with ExitStack() as replacements:
        for module in decoder.modules() if is_llama else ():
            # others round differently
            if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
                replacements.enter_context(replaced(module, FusedNorm(module)))
            elif all(
                hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")
            ) and _is_silu(module):
                replacements.enter_context(replaced(module, FusedMLP(module)))
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


class FusedAttention(_Fused):
    """Forward pass of a tapped attention module whose RoPE writes to the cache, for steps and for
    prompts without gradients.
    """

    def __init__(self, tap: LayerTap, sparse: Sparse, current: CurrentStep) -> None:
        super().__init__(tap.module)
        self.tap, self.sparse, self.current = tap, sparse, current
        self.layer: int = tap.module.layer_idx

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step, hidden = self.current.step, args[0] if args else kwargs["hidden_states"]
        if step is None and not self._is_prompt(hidden, kwargs):
            return self.original(*args, **self.tap.keep(kwargs))
        cache_layer: GrowingLayer = kwargs[CACHE].layers[self.layer]
        cos, sin = kwargs["position_embeddings"]
        q_nope, k_nope, v = _project_heads(self.module, hidden)
        if step is None:
            cache_layer.reserve(k_nope, v)
        keys: Any = cache_layer.key_buffer.memory
        values: Any = cache_layer.value_buffer.memory
        if not q_nope.dtype == cos.dtype == keys.dtype:
            if step is None:
                return self.original(*args, **self.tap.keep(kwargs))
            raise NoGraph(
                f"queries are {q_nope.dtype}, rotations {cos.dtype}, and cached keys {keys.dtype}"
            )
        position = cache_layer.get_seq_length() if step is None else step.position
        q = rotate_and_append(q_nope, k_nope, v, cos, sin, keys, values, position)
        if step is None:
            cache_layer.add_tokens(q.shape[2])
            keys, values = (each[:, :, : cache_layer.get_seq_length()] for each in (keys, values))
            start, kv_len = kwargs.get("attention_mask"), None
        else:
            start, kv_len = step.kv_start, step.kv_len
        angles, scoring = Angles(cos, sin, kwargs.get("position_ids")), Scoring(self.module.scaling)
        x = LayerInputs(
            self.layer, q, keys, values, q_nope, k_nope, angles, scoring, start, cache_layer,
            kv_len=kv_len,
        )  # fmt: skip
        out = (
            self.sparse.attend(x)
            if step is None
            else self.sparse.attend_step(x, step.window, dense=step.dense)
        )
        return self.module.o_proj(out.transpose(1, 2).reshape(*hidden.shape[:2], -1)), None

    def _is_prompt(self, hidden: Tensor, kwargs: dict[str, Any]) -> bool:
        """Returns True if this pass supports several tokens after those in a cache."""
        cache = kwargs.get(CACHE)
        cos = kwargs["position_embeddings"][0]
        mask = kwargs.get("attention_mask")
        device = hidden.device.type
        if (
            cache is None
            or hidden.shape[1] < 2
            or device != Step.device_type
            or not (mask is None or mask.ndim == 1)
        ):
            return False
        if (
            kwargs.get(PAGES) is not None
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled(device)
        ):
            return False
        layer, size = cache.layers[self.layer], self.module.head_dim
        memory = layer.key_buffer.memory if isinstance(layer, GrowingLayer) else None
        alike = memory is None or (memory.dtype == hidden.dtype and memory.device == hidden.device)
        return (
            isinstance(layer, GrowingLayer)
            and alike
            and cos.dtype == hidden.dtype
            and cos.shape[2] == size
        )


def _project_heads(attention: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries ``[B, Hq, N, D]``, keys and values ``[B, Hkv, N, D]`` of a layer like
    Llama's, before RoPE.
    """
    shape = (*hidden_states.shape[:2], -1, attention.head_dim)

    def project(*names: str) -> list[Tensor]:
        return [getattr(attention, f"{name}_proj")(hidden_states).view(shape) for name in names]

    (q,), (k, v) = concurrently(hidden_states, partial(project, "q"), partial(project, "k", "v"))
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _is_fusable(x: Tensor, weight: Tensor) -> bool:
    """Returns True if a fused kernel supports ``x``; weights of offloaded modules are on another
    device between passes.
    """
    same = (
        not isinstance(weight, DTensor)
        and x.dtype == weight.dtype
        and x.dtype in FLOATS
        and x.device == weight.device
    )
    return (
        x.is_cuda and same and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cuda")
    )


def _is_silu(mlp: Any) -> bool:
    return (
        isinstance(getattr(mlp, "act_fn", None), nn.SiLU)
        or type(getattr(mlp, "act_fn", None)).__name__ == "SiLUActivation"
    )
