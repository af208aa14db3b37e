"""Models in GGUF files, read by transformers; information that it would ignore is added here, or the file is refused."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from msattn.trainer.errors import UserError, first_line
from msattn.trainer.storage.documents import check_regular

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

INSTALL = "pip install 'msattn[gguf]'"
TRANSFORMERS_NEEDED = (5, 23)  # earlier versions build other tokenizers
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text"}
STATED = (  # a default of transformers would be another model's
    *("max_position_embeddings", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta"),
)
LEFT_OUT = {  # each architecture's metadata that transformers ignores
    "attention.key_length": "head_dim",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}
ENDS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))  # of a text, a turn, a message
GEMMA2_27B = 46  # layers: its scores are divided by the root of hidden size over heads, which files do not state
ROPE_FACTORS = "rope_freqs.weight"  # divisors of RoPE's frequencies: all that a file says of Llama 3.1's RoPE
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
WHOLE = ("llama-bpe", "llama3", "llama-v3", "tekken")  # ways to split text of which a known part is one token
SPLITS = ("gpt-2", "smollm", "qwen2", "deepseek-r1-qwen", *WHOLE)
OF_DAMAGE = (OSError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError, AttributeError, struct.error)


def gguf_metadata(path: Path, where: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the metadata of a file, with lists of texts replaced by their lengths, and the names of its tensors.

    Raises UserError, which begins with ``where``, if a package is missing or too old, if the file is damaged or only a part of
    a model, or if transformers would misread its architecture, RoPE or tokenizer.
    """
    check_regular(path, where)
    _check_packages(where)
    from transformers.integrations.gguf import read_gguf_metadata

    try:
        metadata, names = read_gguf_metadata(str(path))
    except OF_DAMAGE as error:
        raise UserError(f"{where}: damaged, cut off, or no GGUF file ({first_line(error)})") from error
    if reason := _refusal(metadata):
        raise UserError(f"{where}: {reason}")
    return metadata, names


def gguf_config(path: Path, where: str) -> dict[str, Any]:
    """Returns the keys of ``config.json`` for a GGUF file; their values are not checked."""
    from transformers import PreTrainedConfig

    metadata, names = gguf_metadata(path, where)
    architecture = metadata["general.architecture"]
    own = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    try:
        document, _ = PreTrainedConfig.get_config_dict(path.parent, gguf_file=path.name)
        document["model_type"] = ARCHITECTURES[architecture]
        document |= {name: own[key] for key, name in LEFT_OUT.items() if key in own}
        document["eos_token_id"] = [metadata[key] for key in ENDS if key in metadata] or None
        for name in STATED:
            if name not in document:
                raise ValueError(f"it does not state {name}")
        size = document.get("head_dim") or document["hidden_size"] // document["num_attention_heads"]
        if (rotated := own.get("rope.dimension_count", size)) != size:
            raise UserError(f"{where}: {architecture}.rope.dimension_count={rotated}: expected {size}, the channels of a head")
        if architecture.startswith("gemma"):
            large = (architecture, document["num_hidden_layers"]) == ("gemma2", GEMMA2_27B)
            heads = document["num_attention_heads"]
            document["query_pre_attn_scalar"] = document["hidden_size"] // heads if large else document["head_dim"]
        if ROPE_FACTORS in names:
            document["rope_scaling"] = _llama3_rope(path, document["rope_theta"], where)
        elif own.get("rope.scaling.type") == "linear":
            document["rope_scaling"] = {"rope_type": "linear", "factor": own["rope.scaling.factor"]}
    except UserError:
        raise
    except OF_DAMAGE as error:
        raise UserError(f"{where}: damaged, cut off, or no GGUF file ({first_line(error)})") from error
    return document


def gguf_tokenizer(path: Path) -> "PreTrainedTokenizerBase":
    """Returns the tokenizer of a file that :func:`gguf_metadata` accepts, with its chat template; damage raises any error."""
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
    """Raises UserError if a file has tensors that the model does not use, which transformers would silently skip."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

    _, names = gguf_metadata(path, where)
    with torch.device("meta"):
        taken = get_gguf_hf_weights_map(AutoModelForCausalLM.from_config(config), TensorProcessor())
    if left_over := sorted({*names} - {*taken, ROPE_FACTORS}):
        raise UserError(f"{where}: by its metadata the model has no {', '.join(left_over[:3])}, which the file has")


def _refusal(metadata: Mapping[str, Any]) -> str | None:
    """Returns the reason why a file is refused; in all these cases transformers would read a different model."""
    architecture, parts = metadata["general.architecture"], metadata.get("split.count", 0)
    if str(architecture) not in ARCHITECTURES:
        return f"general.architecture={architecture!s:.60}: expected in GGUF files: {', '.join(ARCHITECTURES)}"
    if parts not in (0, 1):
        return f"one of {parts} parts: join them with llama-gguf-split --merge"
    of_old_files = metadata.get(f"{architecture}.rope.scale_linear", "none")
    scaling = metadata.get(f"{architecture}.rope.scaling.type", of_old_files)
    if scaling not in ("none", "linear"):
        return f"{architecture}.rope.scaling.type={scaling!s:.40}: expected none or linear in GGUF files"
    if not metadata.get(f"{architecture}.attention.causal", True):
        return f"{architecture}.attention.causal=false: expected true"
    kind, split = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind not in ("gpt2", "llama"):
        return f"tokenizer.ggml.model={kind!s:.40}: expected gpt2 or llama"
    if kind == "gpt2" and split not in SPLITS:
        return f"tokenizer.ggml.pre={split!s:.40}: expected {', '.join(SPLITS)}"
    if kind == "llama" and architecture == "llama" and not metadata.get("tokenizer.ggml.add_space_prefix", True):
        return "tokenizer.ggml.add_space_prefix=false: expected true with architecture llama"
    return None


def _check_packages(where: str) -> None:
    import transformers

    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(f"{where}: the package gguf, which reads GGUF files, is not installed; {INSTALL}") from error
    if tuple(map(int, transformers.__version__.split(".")[:2])) < TRANSFORMERS_NEEDED:
        needed = ".".join(map(str, TRANSFORMERS_NEEDED))
        raise UserError(f"{where}: needs transformers {needed} or newer, {transformers.__version__} is installed; {INSTALL}")


def _llama3_rope(path: Path, base: float, where: str) -> dict[str, Any]:
    """Returns the parameters of Llama 3.1's RoPE, if the divisors in the file are those of it."""
    from gguf.gguf_reader import GGUFReader
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    (found,) = (torch.tensor(tensor.data) for tensor in GGUFReader(path).tensors if tensor.name == ROPE_FACTORS)
    scaling = {"rope_type": "llama3", "factor": found.max().item(), **LLAMA3}
    config = LlamaConfig(head_dim=2 * len(found), rope_parameters={**scaling, "rope_theta": base})
    plain = base ** -(torch.arange(len(found)) / len(found))
    if not torch.allclose(plain / found, LlamaRotaryEmbedding(config).inv_freq, rtol=1e-3, atol=0):
        raise UserError(f"{where}: {ROPE_FACTORS} has frequencies of another RoPE than Llama 3.1's")
    return scaling


def _as_trained(backend: "Tokenizer", size: int, split: str) -> "Tokenizer":
    """Returns byte-level BPE as used in training, which differs from transformers' version."""
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < size]  # it adds GPT-2's <|endoftext|>
    state["model"]["ignore_merges"] = split in WHOLE
    if split == "smollm":
        digits = {"type": "Digits", "individual_digits": True}
        state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, state["pre_tokenizer"]]}
    return Tokenizer.from_str(json.dumps(state))
