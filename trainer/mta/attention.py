"""Multi-Token Attention (Golovneva et al., 2025, arXiv 2504.00927) in the place of a Llama layer's attention.

An attention weight of plain attention hangs on one query and one key. Here scores of neighbouring queries and keys, or of other
heads, are mixed before the softmax, so that a head can look for several things standing together. Every mixing begins as the
identity: a trained model starts as it was, and learns from there::

    model = convert(AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B"), layers=(2, 6, 10, 14))

The new weights are fp32 parameters beside the layer's projections. A saved state is read back into a model that was converted
with the same options. Of a padded batch's mask, only what left padding can look like is accepted, and every layer looks.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, LlamaModel
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from msattn.kernels.conv_attention import conv_attention
from msattn.kernels.conv_decode import conv_decode
from msattn.kernels.head_mix_attention import head_mix_attention
from msattn.trainer.errors import UserError
from msattn.trainer.models.tap import IMPLEMENTATION, causal_attention, padding_start
from msattn.trainer.mta.cache import query_window_layer

HeadMixing = Literal["scores", "group"]


class MultiTokenAttention(nn.Module):
    """Takes the place of ``layer.self_attn`` and its projections over.

    Parameters
    ----------
    attention : LlamaAttention
    kernel : (c_q, c_k) or None
        Scores are convolved over so many queries, up to a token's own, and keys around each key; a kernel for each head.
    head_mixing : {"scores", "group"}, optional
        ``scores``: before the softmax, each head's scores become a sum over all heads'. ``group``: after it, the query heads
        that share a key/value head mix their probabilities; they share the values as well, so their outputs are mixed.
    group_norm : bool
        RMS norm of each head's output with weights of its own, times ``1 - (0.8 - 0.6 exp(-0.3 layer))``: deeper layers
        begin smaller. With it the model does **not** start unchanged.

    Raises
    ------
    UserError : another attention than Llama's, one with dropout, options out of range; while running: padding that is not on
        the left, packed sequences, caches that do not grow, a model that is tapped.
    """

    def __init__(
        self,
        attention: LlamaAttention,
        *,
        kernel: tuple[int, int] | None = (6, 11),
        head_mixing: HeadMixing | None = None,
        group_norm: bool = False,
    ) -> None:
        super().__init__()
        _check(attention, kernel, head_mixing)
        config: Any = attention.config
        self.config, self.layer_idx = config, attention.layer_idx
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.o_proj = attention.o_proj

        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        new: dict[str, Any] = {"device": self.q_proj.weight.device, "dtype": torch.float32}
        self.score_kernel = self.score_mix = self.group_mix = self.head_norm = None
        if kernel is not None:
            self.score_kernel = nn.Parameter(torch.zeros(heads, *kernel, **new))
            self.score_kernel.data[:, -1, (kernel[1] - 1) // 2] = 1.0
        if head_mixing == "scores":
            self.score_mix = nn.Parameter(torch.eye(heads, **new))
        elif head_mixing == "group":
            self.group_mix = nn.Parameter(torch.eye(heads // kv_heads, **new).repeat(kv_heads, 1, 1))
        if group_norm:
            self.head_norm = HeadNorm(torch.ones(heads, self.head_dim, **new), self.layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,  # what transformers passes to every attention
    ) -> tuple[Tensor, None]:
        """Attention of ``hidden_states [B, N, hidden]``, as of a ``LlamaAttention``; there are no weights to return."""
        if IMPLEMENTATION in kwargs:
            raise UserError("model: it has multi-token attention, which cannot be tapped (or attached to)")
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (project(hidden_states).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast RoPE leaves fp32
        window = q
        if past_key_values is not None:
            reach = 0 if self.score_kernel is None else self.score_kernel.shape[1] - 1
            window = query_window_layer(past_key_values, self.layer_idx, reach).extend(q)
            k, v = past_key_values.update(k, v, self.layer_idx)
        out = self._attend(window, q, k, v, kv_start_of(attention_mask, q.shape[2], k.shape[2]))
        if self.group_mix is not None:
            mix = self.group_mix.to(out.dtype)
            out = torch.einsum("kgh,bkhnd->bkgnd", mix, out.unflatten(1, mix.shape[:2])).flatten(1, 2)
        if self.head_norm is not None:
            out = self.head_norm(out)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None

    def _attend(self, window: Tensor, q: Tensor, k: Tensor, v: Tensor, kv_start: Tensor | None) -> Tensor:
        """``[B, Hq, N, D]``. ``window`` holds the queries before ``q`` that the convolution reaches, then ``q``."""
        if self.score_mix is not None:
            return head_mix_attention(q, k, v, self.score_mix, scale=self.scaling, kv_start=kv_start)
        weight = self.score_kernel
        if weight is None:
            return causal_attention(q, k, v, scale=self.scaling, kv_start=kv_start)
        if q.shape[2] == 1 and not torch.is_grad_enabled():
            window = F.pad(window, (0, 0, weight.shape[1] - window.shape[2], 0))  # zeros before a sequence's start
            return conv_decode(window, k, v, weight, scale=self.scaling, kv_start=kv_start)
        out = conv_attention(window, k, v, weight, scale=self.scaling, kv_start=kv_start)
        return out[:, :, window.shape[2] - q.shape[2] :]


class HeadNorm(nn.Module):
    """RMS norm of each head apart, ``weight [Hq, D]``, scaled down with the layer's depth (as differential attention is)."""

    EPS = 1e-5

    def __init__(self, weight: Tensor, layer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.scale = 1 - (0.8 - 0.6 * math.exp(-0.3 * layer))

    def forward(self, x: Tensor) -> Tensor:
        """``x [B, Hq, N, D]`` in its own dtype, normalised in fp32."""
        normed = F.rms_norm(x.float(), x.shape[-1:], eps=self.EPS)
        return (normed * self.weight[:, None] * self.scale).to(x.dtype)


def convert(
    model: LlamaForCausalLM | LlamaModel,
    *,
    layers: Iterable[int] | None = None,
    kernel: tuple[int, int] | None = (6, 11),
    head_mixing: HeadMixing | None = None,
    group_norm: bool = False,
) -> Any:
    """Give ``layers`` (all, by default) of a Llama model :class:`MultiTokenAttention`, in place; returns the model.

    Raises
    ------
    UserError : a layer that there is not, or what :class:`MultiTokenAttention` refuses; the model is then as it was.
    """
    decoder: Any = model.base_model.layers
    chosen = range(len(decoder)) if layers is None else sorted(set(layers))
    if not all(0 <= index < len(decoder) for index in chosen):
        raise UserError(f"layers={tuple(chosen)}: accepted are 0 to {len(decoder) - 1}")
    options: Any = {"kernel": kernel, "head_mixing": head_mixing, "group_norm": group_norm}
    made = {index: MultiTokenAttention(decoder[index].self_attn, **options) for index in chosen}
    for index, attention in made.items():
        decoder[index].self_attn = attention
    return model


def kv_start_of(attention_mask: Tensor | None, num_queries: int, num_keys: int) -> Tensor | None:
    """What transformers hands a layer as its mask, as ``kv_start``: int32 [B], None where there is no padding.

    Parameters
    ----------
    attention_mask : ``[B, M]``, or ``[B, 1, N, M]``, boolean or added to the scores; None where nothing but the order of the
        tokens hides any.

    Raises
    ------
    UserError : anything but the causal mask of sequences that are padded on the left.
    """
    if attention_mask is None:
        return None
    shape = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
    if not (isinstance(shape, tuple) and shape[1:] in ((num_keys,), (1, num_queries, num_keys))):
        raise UserError(f"attention_mask={shape}: accepted is [batch, {num_keys}] or [batch, 1, {num_queries}, {num_keys}]")
    if attention_mask.ndim == 2:
        return padding_start(attention_mask)
    visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    kv_start = padding_start(visible[:, 0, -1])  # the last query sees every token of its sequence
    position = torch.arange(num_keys, device=visible.device)
    expected = position <= position[num_keys - num_queries :, None]
    if kv_start is not None:
        expected = expected & (position >= kv_start[:, None, None, None])
    if not torch.equal(visible, expected.expand_as(visible)):
        raise UserError("attention_mask: accepted is the causal mask of one sequence a row, padded on the left")
    return kv_start


def _check(attention: Any, kernel: tuple[int, int] | None, head_mixing: str | None) -> None:
    if not isinstance(attention, LlamaAttention):
        raise UserError(f"attention={type(attention).__name__}: accepted is LlamaAttention")
    if attention.attention_dropout:
        raise UserError(f"attention_dropout={attention.attention_dropout}: accepted is 0, multi-token attention drops nothing")
    if kernel is not None and (len(kernel) != 2 or min(kernel) < 1):
        raise UserError(f"kernel={kernel}: accepted are (queries, keys), 1 or more each, or None")
    if head_mixing not in (None, "scores", "group"):
        raise UserError(f"head_mixing={head_mixing!r}: accepted are 'scores', 'group', None")
    if head_mixing == "scores" and kernel is not None:
        raise UserError(
            f"head_mixing='scores', kernel={kernel}: accepted is one of them, with both every score would be made of as many "
            "products as the kernel has rows, times the heads; kernel=None, or head_mixing='group', which goes with a kernel"
        )
