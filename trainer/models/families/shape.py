"""Access to the numbers of a configuration; those of a model with images or audio are in its text configuration."""

from typing import TYPE_CHECKING, Any

from msattn.trainer.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def decoder(model: "PreTrainedModel") -> Any:
    """Returns the module with the embedding, ``layers`` and the final norm, also of a PEFT model."""
    return model.get_decoder()


def text_config(config: "PreTrainedConfig") -> Any:
    """Returns the configuration of the decoder of text; it is ``config`` itself for a language model."""
    return config.get_text_config(decoder=True)


def num_layers(config: "PreTrainedConfig") -> int:
    return text_config(config).num_hidden_layers


def num_heads(config: "PreTrainedConfig") -> int:
    return text_config(config).num_attention_heads


def num_kv_heads(config: "PreTrainedConfig") -> int:
    return getattr(text_config(config), "num_key_value_heads", None) or num_heads(config)


def head_dim(config: "PreTrainedConfig") -> int:
    return getattr(text_config(config), "head_dim", None) or text_config(config).hidden_size // num_heads(config)


def rope_parameters(config: "PreTrainedConfig") -> dict[str, Any]:
    """Returns the parameters of RoPE, of full-attention layers where each type of layer has its own."""
    rope = text_config(config).rope_parameters
    return rope.get("full_attention", rope)


def max_length(config: "PreTrainedConfig") -> int:
    """Returns the longest sequence in tokens.

    Dynamic RoPE scales the context at run time; for the other types ``max_position_embeddings`` is already scaled.
    """
    rope, positions = rope_parameters(config), int(text_config(config).max_position_embeddings)
    return int(positions * rope["factor"]) if rope["rope_type"] == "dynamic" else positions


def check_length(config: "PreTrainedConfig", seq_len: int, given: str = "") -> None:
    """Checks that a sequence fits the model's positions.

    Parameters
    ----------
    given : the argument that asks for so many tokens, for the message; by default ``data.seq_len`` and its value.

    Raises
    ------
    UserError : ``seq_len`` exceeds :func:`max_length`.
    """
    longest = max_length(config)
    if seq_len > longest:
        raise UserError(
            f"{given or f'data.seq_len={seq_len}'}: the model has positions for {longest} tokens; "
            "shorten it, or extend the context with model.rope_scaling={rope_type: yarn, factor: ...}"
        )


def output_logits(model: "PreTrainedModel", hidden: "Tensor") -> "Tensor":
    """Returns the logits ``[..., vocabulary]`` of the last hidden states ``[..., hidden]``, as the model's own head."""
    config, head = text_config(model.config), model.get_output_embeddings()
    assert head is not None
    logits = head(hidden)
    if divisor := getattr(config, "logits_scaling", None):  # of Granite
        logits = logits / divisor
    if softcap := getattr(config, "final_logit_softcapping", None):  # of Gemma
        logits = (logits / softcap).tanh() * softcap
    return logits
