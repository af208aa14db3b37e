"""Models in GGUF files, read by transformers; information that it would ignore is added here, or
the file is refused.
"""

import json
import struct
from collections.abc import Mapping
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from msattn.trainer.errors import UserError, first_line
from msattn.trainer.models.families import check_transformers
from msattn.trainer.storage.documents import check_regular

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

INSTALL = "pip install 'msattn[gguf]'"
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
# metadata that every file must have, and its names in config.json: defaults would be another
# model's
STATED = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
WINDOW = {"attention.sliding_window": "sliding_window"}
OPTIONAL = {
    "attention.key_length": "head_dim",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}
# of a text, a turn, a message
ENDS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
TOKENS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.unknown_token_id": "unk_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
ALIGNMENT = "general.alignment"  # of the place where the tensors begin
# layers: its scores are divided by the root of hidden size over heads, which files do not state
GEMMA2_27B = 46
# divisors of RoPE's frequencies: all that a file says of Llama 3.1's RoPE
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# ways to split text of which a known part is one token
WHOLE = ("llama-bpe", "llama3", "llama-v3", "tekken")
SPLITS = ("gpt-2", "smollm", "qwen2", "deepseek-r1-qwen", *WHOLE)
OF_DAMAGE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    ArithmeticError,
    MemoryError,
    AttributeError,
    struct.error,
)


class Header(NamedTuple):
    """The header of a file: metadata, with lists of texts replaced by their lengths, and the places
    of tensors.
    """

    metadata: dict[str, Any]
    # first byte of a tensor in the file, and the one after its last
    places: dict[str, tuple[int, int]]


def gguf_header(path: Path, where: str) -> Header:
    """Reads the header of a file, in a fraction of a second.

    Raises UserError, which begins with ``where``, if a package is missing or too old, if the file
    is damaged, cut off or only a part of a model, or if transformers would misread its
    architecture, RoPE or tokenizer.
    """
    check_regular(path, where)
    if find_spec("gguf") is None:
        raise UserError(
            f"{where}: the package gguf, which reads GGUF files, is not installed; {INSTALL}"
        )
    check_transformers(where)
    from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

    # The public functions refuse types of weights that the loader accepts; llama.cpp's package
    # takes ten seconds.
    from transformers.integrations.gguf.reader import _read_metadata, _read_tensor_table

    try:
        content = np.memmap(path, mode="r", dtype=np.uint8)
        metadata, count, table = _read_metadata(content, str(path))
        tensors, end = _read_tensor_table(content, count, table)
        alignment = metadata.get(ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)
        data, places = -(-end // alignment) * alignment, {}
        for name, shape, kind, offset in tensors:
            values, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            places[name] = (data + offset, data + offset + prod(shape) // values * size)
        last = max(end for _, end in places.values())
        if last > len(content):
            raise ValueError(f"its tensors end at byte {last:,} of {len(content):,}")
    except OF_DAMAGE as error:
        raise UserError(
            f"{where}: damaged, cut off, or no GGUF file ({first_line(error)})"
        ) from error
    if reason := _refusal(metadata):
        raise UserError(f"{where}: {reason}")
    return Header(metadata, places)


def gguf_config(path: Path, where: str) -> dict[str, Any]:
    """Returns the keys of ``config.json`` for a GGUF file, from its header alone; their values are
    not checked.
    """
    metadata, places = gguf_header(path, where)
    architecture = metadata["general.architecture"]
    own = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    try:
        stated = STATED | (WINDOW if architecture.startswith("gemma") else {})
        document = {
            name: own[key] for key, name in (stated | OPTIONAL | TOKENS).items() if key in own
        }
        for key, name in stated.items():
            if name not in document:
                raise ValueError(f"it does not state {architecture}.{key}")
        document["model_type"] = ARCHITECTURES[architecture]
        document["vocab_size"] = own.get("vocab_size", metadata["tokenizer.ggml.tokens"])
        ends = [metadata[key] for key in ENDS if key in metadata]
        # others: none
        document["eos_token_id"] = [
            token for token in ends if 0 <= token < document["vocab_size"]
        ] or None
        document["tie_word_embeddings"] = "output.weight" not in places
        if architecture == "llama" and "rope.dimension_count" in own:
            document.setdefault("head_dim", own["rope.dimension_count"])
        size = (
            document.get("head_dim") or document["hidden_size"] // document["num_attention_heads"]
        )
        if (rotated := own.get("rope.dimension_count", size)) != size:
            raise UserError(
                f"{where}: {architecture}.rope.dimension_count={rotated}: expected {size}, the "
                f"channels of a head"
            )
        if architecture.startswith("gemma"):
            large = (architecture, document["num_hidden_layers"]) == ("gemma2", GEMMA2_27B)
            heads = document["num_attention_heads"]
            document["query_pre_attn_scalar"] = (
                document["hidden_size"] // heads if large else document["head_dim"]
            )
        if ROPE_FACTORS in places:
            begin, end = places[ROPE_FACTORS]
            factors = np.fromfile(path, np.float32, count=(end - begin) // 4, offset=begin)
            document["rope_scaling"] = _llama3_rope(
                torch.from_numpy(factors), document["rope_theta"], where
            )
        elif own.get("rope.scaling.type") == "linear":
            document["rope_scaling"] = {"rope_type": "linear", "factor": own["rope.scaling.factor"]}
    except UserError:
        raise
    except OF_DAMAGE as error:
        raise UserError(
            f"{where}: damaged, cut off, or no GGUF file ({first_line(error)})"
        ) from error
    return document


def gguf_tokenizer(path: Path) -> "PreTrainedTokenizerBase":
    """Returns the tokenizer of a file that :func:`gguf_header` accepts, with its chat template;
    damage raises any error.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, vocabulary, options = get_gguf_tokenizer(str(path))
    backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
    if vocabulary["tokenizer_type"] == "gpt2":
        split = vocabulary["pre_tokenizer_type"]
        options.setdefault("add_bos_token", split in WHOLE)
        backend = _as_trained(backend, len(vocabulary["tokens"]), split)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def check_tensors(path: Path, config: "PreTrainedConfig", where: str) -> None:
    """Raises UserError if a file has tensors that the model does not use, which transformers would
    silently skip.
    """
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

    _, places = gguf_header(path, where)
    with torch.device("meta"):
        taken = get_gguf_hf_weights_map(AutoModelForCausalLM.from_config(config), TensorProcessor())
    if left_over := sorted({*places} - {*taken, ROPE_FACTORS}):
        raise UserError(
            f"{where}: by its metadata the model has no {', '.join(left_over[:3])}, which the "
            f"file has"
        )


def _refusal(metadata: Mapping[str, Any]) -> str | None:
    """Returns the reason why a file is refused; in all these cases transformers would read a
    different model.
    """
    architecture, parts = metadata["general.architecture"], metadata.get("split.count", 0)
    if str(architecture) not in ARCHITECTURES:
        return (
            f"general.architecture={architecture!s:.60}: expected in GGUF files: "
            f"{', '.join(ARCHITECTURES)}"
        )
    if parts not in (0, 1):
        return f"one of {parts} parts: join them with llama-gguf-split --merge"
    of_old_files = metadata.get(f"{architecture}.rope.scale_linear", "none")
    scaling = metadata.get(f"{architecture}.rope.scaling.type", of_old_files)
    if scaling not in ("none", "linear"):
        return (
            f"{architecture}.rope.scaling.type={scaling!s:.40}: expected none or linear in "
            f"GGUF files"
        )
    if not metadata.get(f"{architecture}.attention.causal", True):
        return f"{architecture}.attention.causal=false: expected true"
    kind, split = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind not in ("gpt2", "llama"):
        return f"tokenizer.ggml.model={kind!s:.40}: expected gpt2 or llama"
    if kind == "gpt2" and split not in SPLITS:
        return f"tokenizer.ggml.pre={split!s:.40}: expected {', '.join(SPLITS)}"
    if (
        kind == "llama"
        and architecture == "llama"
        and not metadata.get("tokenizer.ggml.add_space_prefix", True)
    ):
        return "tokenizer.ggml.add_space_prefix=false: expected true with architecture llama"
    tokens = metadata["tokenizer.ggml.tokens"]
    for key in (ENDS[0], *TOKENS):  # others are no tokens of the tokenizer
        if (token := metadata.get(key, 0)) not in range(tokens):
            return f"{key}={token!s:.40}: expected 0 to {tokens - 1}, or no such key"
    return None


def _llama3_rope(divisors: torch.Tensor, base: float, where: str) -> dict[str, Any]:
    """Returns the parameters of Llama 3.1's RoPE, if the ``divisors`` in the file are those of
    it.
    """
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {"rope_type": "llama3", "factor": divisors.max().item(), **LLAMA3}
    config = LlamaConfig(
        head_dim=2 * len(divisors), rope_parameters={**scaling, "rope_theta": base}
    )
    plain = base ** -(torch.arange(len(divisors)) / len(divisors))
    if not torch.allclose(
        plain / divisors, LlamaRotaryEmbedding(config).inv_freq, rtol=1e-3, atol=0
    ):
        raise UserError(f"{where}: {ROPE_FACTORS} has frequencies of another RoPE than Llama 3.1's")
    return scaling


def _as_trained(backend: "Tokenizer", size: int, split: str) -> "Tokenizer":
    """Returns byte-level BPE as used in training, which differs from transformers' version."""
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    # it adds GPT-2's <|endoftext|>
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < size]
    state["model"]["ignore_merges"] = split in WHOLE
    if split == "smollm":
        digits = {"type": "Digits", "individual_digits": True}
        state["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [digits, state["pre_tokenizer"]],
        }
    return Tokenizer.from_str(json.dumps(state))
