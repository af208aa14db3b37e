"""Multi-Token Attention (Golovneva et al., 2025, arXiv 2504.00927) for Llama models.

In plain attention a weight depends on one query and one key. Here the scores of neighboring
queries and keys, or of several heads, are mixed, so a head can attend to places where several
features occur together. All mixing starts as the identity, so a pretrained model is unchanged
before training::

    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B")
    model = convert(model, layers=(2, 6, 10, 14))

The new weights are fp32 parameters of the attention modules. A saved state loads into a model
converted with the same options. Every layer checks its attention mask and supports only causal
masks, with or without left padding.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, LlamaModel
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from msattn.kernels.multi_token.conv_attention import conv_attention
from msattn.kernels.multi_token.conv_decode import conv_decode
from msattn.kernels.multi_token.head_mix_attention import head_mix_attention
from msattn.kernels.types import ConvMask
from msattn.trainer.errors import UserError
from msattn.trainer.models.layer_attention import causal_attention
from msattn.trainer.models.tap import TAP, padding_start
from msattn.trainer.mta.cache import query_window_layer

HeadMixing = Literal["scores", "group"]


class MultiTokenAttention(nn.Module):
    """Replaces ``layer.self_attn`` and takes over its projections.

    Parameters
    ----------
    attention : LlamaAttention
    kernel : (c_q, c_k) or None
        Size of the convolution of the scores, with one kernel per head: over the ``c_q`` queries up
        to the current one and the ``c_k`` keys around each key.
    mask : {"query", "key"}
        Scores that count as 0 in the convolution; see
        :func:`~msattn.kernels.multi_token.conv_attention.conv_attention`.
    head_mixing : {"scores", "group"}, optional
        ``scores``: each head's scores become a weighted sum over all heads' scores, before the
        softmax. ``group``: the query heads of a key/value head mix their probabilities, after the
        softmax. As they share the values, mixing their outputs does this.
    group_norm : bool
        RMS norm of each head's output with weights per head, times
        ``1 - (0.8 - 0.6 exp(-0.3 layer))``, which is smaller in deeper layers. It changes the
        output of a pretrained model.

    Raises
    ------
    UserError : attention other than Llama's, dropout, options out of range; in the forward pass:
        padding not on the left, packed sequences, caches that do not grow, a tapped model.
    """

    def __init__(
        self,
        attention: LlamaAttention,
        *,
        kernel: tuple[int, int] | None = (6, 11),
        mask: ConvMask = "query",
        head_mixing: HeadMixing | None = None,
        group_norm: bool = False,
    ) -> None:
        super().__init__()
        _check(attention, kernel, mask, head_mixing)
        config: Any = attention.config
        self.mask = mask
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
            self.group_mix = nn.Parameter(
                torch.eye(heads // kv_heads, **new).repeat(kv_heads, 1, 1)
            )
        if group_norm:
            self.head_norm = HeadNorm(torch.ones(heads, self.head_dim, **new), self.layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,  # its name since transformers 5.24
        **kwargs: Any,  # transformers passes further arguments to every attention
    ) -> tuple[Tensor, None]:
        """Computes attention of ``hidden_states [B, N, hidden]``; the second output, the weights,
        is always None.
        """
        if TAP in kwargs:
            raise UserError("model: multi-token attention cannot be tapped (or attached to)")
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            project(hidden_states).view(shape).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast RoPE returns fp32
        window, cache = q, past_key_values if cache is None else cache
        if cache is not None:
            reach = 0 if self.score_kernel is None else self.score_kernel.shape[1] - 1
            window = query_window_layer(cache, self.layer_idx, reach).extend(q)
            k, v = cache.update(k, v, self.layer_idx)
        out = self._mixed_attention(
            window, q, k, v, kv_start_of(attention_mask, q.shape[2], k.shape[2])
        )
        if self.group_mix is not None:
            mix = self.group_mix.to(out.dtype)
            out = torch.einsum("kgh,bkhnd->bkgnd", mix, out.unflatten(1, mix.shape[:2])).flatten(
                1, 2
            )
        if self.head_norm is not None:
            out = self.head_norm(out)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None

    def _mixed_attention(
        self, window: Tensor, q: Tensor, k: Tensor, v: Tensor, kv_start: Tensor | None
    ) -> Tensor:
        """Returns ``[B, Hq, N, D]``; ``window`` holds the earlier queries that the convolution
        needs, followed by ``q``.
        """
        if self.score_mix is not None:
            return head_mix_attention(
                q, k, v, self.score_mix, scale=self.scaling, kv_start=kv_start
            )
        weight = self.score_kernel
        if weight is None:
            return causal_attention(q, k, v, scale=self.scaling, kv_start=kv_start)
        if q.shape[2] == 1 and not torch.is_grad_enabled():
            # zeros before the start of a sequence
            window = F.pad(window, (0, 0, weight.shape[1] - window.shape[2], 0))
            return conv_decode(
                window, k, v, weight, mask=self.mask, scale=self.scaling, kv_start=kv_start
            )
        out = conv_attention(
            window, k, v, weight, mask=self.mask, scale=self.scaling, kv_start=kv_start
        )
        return out[:, :, window.shape[2] - q.shape[2] :]


class HeadNorm(nn.Module):
    """RMS norm per head with ``weight [Hq, D]`` and a factor that falls with depth, as in
    differential attention.
    """

    EPS = 1e-5

    def __init__(self, weight: Tensor, layer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.scale = 1 - (0.8 - 0.6 * math.exp(-0.3 * layer))

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes ``x [B, Hq, N, D]`` in fp32 and returns its dtype."""
        normed = F.rms_norm(x.float(), x.shape[-1:], eps=self.EPS)
        return (normed * self.weight[:, None] * self.scale).to(x.dtype)


def convert(
    model: LlamaForCausalLM | LlamaModel,
    *,
    layers: Iterable[int] | None = None,
    kernel: tuple[int, int] | None = (6, 11),
    mask: ConvMask = "query",
    head_mixing: HeadMixing | None = None,
    group_norm: bool = False,
) -> Any:
    """Replaces the attention of ``layers`` (default: all) by :class:`MultiTokenAttention`, in
    place; returns the model.

    Raises UserError for an index out of range, or like :class:`MultiTokenAttention`; the model is
    then unchanged.
    """
    decoder: Any = model.base_model.layers
    indices = range(len(decoder)) if layers is None else sorted(set(layers))
    if not all(0 <= index < len(decoder) for index in indices):
        raise UserError(f"layers={tuple(indices)}: expected 0 to {len(decoder) - 1}")
    options: Any = {
        "kernel": kernel,
        "mask": mask,
        "head_mixing": head_mixing,
        "group_norm": group_norm,
    }
    replacements = {
        index: MultiTokenAttention(decoder[index].self_attn, **options) for index in indices
    }
    for index, attention in replacements.items():
        decoder[index].self_attn = attention
    return model


def kv_start_of(attention_mask: Tensor | None, num_queries: int, num_keys: int) -> Tensor | None:
    """Converts the mask that transformers passes to a layer to ``kv_start``: int32 [B], or None
    without padding.

    The mask is ``[B, M]``, or ``[B, 1, N, M]`` (boolean or additive); None is a plain causal mask.
    Raises UserError for any mask but the causal one of left-padded sequences.
    """
    if attention_mask is None:
        return None
    shape = (
        tuple(attention_mask.shape)
        if isinstance(attention_mask, Tensor)
        else type(attention_mask).__name__
    )
    if not (isinstance(shape, tuple) and shape[1:] in ((num_keys,), (1, num_queries, num_keys))):
        raise UserError(
            f"attention_mask={shape}: expected [batch, {num_keys}] or [batch, 1, {num_queries}, "
            f"{num_keys}]"
        )
    if attention_mask.ndim == 2:
        return padding_start(attention_mask)
    visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    kv_start = padding_start(visible[:, 0, -1])  # the last query sees every token of its sequence
    position = torch.arange(num_keys, device=visible.device)
    expected = position <= position[num_keys - num_queries :, None]
    if kv_start is not None:
        expected = expected & (position >= kv_start[:, None, None, None])
    if not torch.equal(visible, expected.expand_as(visible)):
        raise UserError(
            "attention_mask: expected the causal mask of one left-padded sequence per row"
        )
    return kv_start


def _check(
    attention: Any, kernel: tuple[int, int] | None, mask: str, head_mixing: str | None
) -> None:
    if not isinstance(attention, LlamaAttention):
        raise UserError(f"attention={type(attention).__name__}: expected LlamaAttention")
    if attention.attention_dropout:
        raise UserError(
            f"attention_dropout={attention.attention_dropout}: expected 0, multi-token attention "
            f"has no dropout"
        )
    if kernel is not None and (len(kernel) != 2 or min(kernel) < 1):
        raise UserError(f"kernel={kernel}: expected (queries, keys), 1 or more each, or None")
    if mask not in get_args(ConvMask):
        raise UserError(f"mask={mask!r}: expected one of {', '.join(get_args(ConvMask))}")
    if head_mixing not in (None, "scores", "group"):
        raise UserError(f"head_mixing={head_mixing!r}: expected 'scores', 'group', None")
    if head_mixing == "scores" and kernel is not None:
        raise UserError(
            f"head_mixing='scores', kernel={kernel}: these cannot be combined, as each score would "
            "need (rows of the kernel) x (heads) products; use kernel=None, or "
            "head_mixing='group', which can be combined with a kernel"
        )
