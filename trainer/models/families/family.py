"""The supported families: where queries and keys before RoPE come from, and which channels rotate."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msattn.trainer.models.families.shape import text_config

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Family:
    """Differences of a family's decoders from Llama's, as the code of their attention modules has them.

    Attributes
    ----------
    llama_layers : a layer computes what Llama's does, up to biases and a norm of each query and key, so that the fused modules
        and the captured steps of :mod:`msattn.trainer.serving` may stand in for it.
    one_window : a ``sliding_window`` in the configuration holds for every layer; other families list ``layer_types``.
    heads_first : the norms of queries and keys run on ``[B, H, N, D]``, not on the outputs of the projections.
    interleaved : RoPE rotates neighbouring channels ``2 i`` and ``2 i + 1``, not ``i`` and ``i + r / 2`` of r rotated ones.
    half_angles : the rotary embedding returns each angle once, not for both channels of a pair.
    experts : MLPs are mixtures of experts, whose size is another number than ``intermediate_size``.
    hashed : keys of the configuration that attention depends on besides those of all families.
    """

    llama_layers: bool = False
    one_window: bool = False
    heads_first: bool = False
    interleaved: bool = False
    half_angles: bool = False
    experts: bool = False
    hashed: tuple[str, ...] = ()

    def modules_before_rope(self, attention: Any) -> tuple[Any, Any]:
        """Returns the modules whose outputs hold the queries and the keys before RoPE: norms, projections, or one for both."""
        if hasattr(attention, "qkv_proj"):
            return attention.qkv_proj, attention.qkv_proj
        return getattr(attention, "q_norm", None) or attention.q_proj, getattr(attention, "k_norm", None) or attention.k_proj

    def heads_before_rope(self, attention: Any, outputs: "tuple[Tensor, Tensor]", q: "Tensor") -> "tuple[Tensor, Tensor]":
        """Returns queries ``[B, Hq, N, D]`` and keys ``[B, Hkv, N, D]`` from the outputs of :meth:`modules_before_rope`.

        ``q`` are the queries after RoPE.
        """
        if self.heads_first:
            return outputs
        batch, heads, tokens, size = q.shape
        queries, keys = outputs
        if hasattr(attention, "qkv_proj"):
            queries, keys, _ = queries.tensor_split((heads * size, (queries.shape[-1] + heads * size) // 2), dim=-1)
        q_nope, k_nope = (each.reshape(batch, tokens, -1, size).transpose(1, 2) for each in (queries, keys))
        return q_nope, k_nope

    def cos_sin(self, position_embeddings: "tuple[Tensor, Tensor]") -> "tuple[Tensor, Tensor]":
        """Returns cos and sin of each rotated channel, ``[B or 1, N, r]``, from what the rotary embedding returned."""
        cos, sin = position_embeddings
        if self.half_angles:
            return cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)
        if self.interleaved:
            half = cos.shape[-1] // 2
            cos, sin = (each[..., :half].repeat_interleave(2, dim=-1) for each in (cos, sin))
        return cos, sin


MIXTURE = Family(one_window=True, experts=True, hashed=("sliding_window",))
FAMILIES: dict[str, Family] = {
    "llama": Family(llama_layers=True),
    "mistral": Family(llama_layers=True, one_window=True),
    "qwen2": Family(llama_layers=True),
    "qwen3": Family(llama_layers=True),
    "granite": Family(hashed=("attention_multiplier", "embedding_multiplier", "residual_multiplier")),
    "smollm3": Family(hashed=("no_rope_layers", "layer_types", "sliding_window")),
    "olmo2": Family(),
    "olmo3": Family(hashed=("layer_types", "sliding_window")),
    "mixtral": MIXTURE,
    "qwen3_moe": MIXTURE,
    "gemma3_text": Family(
        heads_first=True, hashed=("hidden_activation", "query_pre_attn_scalar", "layer_types", "sliding_window")
    ),
    "phi3": Family(one_window=True, hashed=("sliding_window",)),
    "glm": Family(interleaved=True),
    "glm4": Family(interleaved=True),
}


def family_of(config: "PreTrainedConfig") -> Family:
    """Returns the family of a supported model."""
    return FAMILIES[text_config(config).model_type]
