"""The weights of a GGUF file, unpacked, under the names that transformers gives them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from msattn.trainer.errors import UserError, first_line
from msattn.trainer.models.gguf.config import EMBEDDING, HEAD, ROPE_FACTORS
from msattn.trainer.storage.gguf_file import GgufFile, GgufTensor

if TYPE_CHECKING:
    import numpy as np
    import torch

INSTALL = "pip install 'msattn[gguf]'"
INTERLEAVED = "llama"  # the architecture whose files have the rows of queries and keys in the order of interleaved RoPE
SHIFTED = ("gemma2", "gemma3")  # the architectures whose files have 1 added to the weights of norms


def read_weights(
    file: GgufFile, num_layers: int, heads: tuple[int, int], dtype: "torch.dtype", where: str
) -> "dict[str, torch.Tensor]":
    """Returns the unpacked weights of a model, on the CPU, by their names in transformers.

    Parameters
    ----------
    heads : numbers of query heads and of key/value heads.
    dtype : of the weights; each tensor is unpacked in fp32 and then rounded.
    where : beginning of error messages.

    Raises
    ------
    UserError : the package ``gguf`` is not installed, the file ends before a tensor does, or it has a tensor of a type or of a
        name that is not known.
    """
    import torch

    try:
        import gguf
    except ImportError as error:
        raise UserError(f"{where}: the package gguf, which unpacks the weights, is not installed; {INSTALL}") from error
    import numpy as np

    content = np.memmap(file.path, mode="r")
    architecture, names, found = file.metadata["general.architecture"], dict(_names(file, num_layers)), {}
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        if name not in names:
            raise UserError(f"{where}: the tensor {name:.60} is none of the architecture {architecture}")
        values = _unpack(content, tensor, gguf, where)
        if architecture == INTERLEAVED and name.endswith(("attn_q.weight", "attn_k.weight")):
            values = _half_rotated(values, heads[name.endswith("attn_k.weight")])
        if architecture in SHIFTED and name.endswith("norm.weight"):
            values = values - 1
        found[names[name]] = torch.from_numpy(np.array(values, order="C")).to(dtype)
    return found


def _names(file: GgufFile, num_layers: int) -> Iterator[tuple[str, str]]:
    """Yields the names of the tensors that the architecture may have, and their names in transformers."""
    yield EMBEDDING, "model.embed_tokens.weight"
    yield "output_norm.weight", "model.norm.weight"
    yield HEAD, "lm_head.weight"
    gemma = file.metadata["general.architecture"] in SHIFTED
    modules = OF_A_LAYER | (GEMMA_NORMS if gemma else {"ffn_norm": "post_attention_layernorm"})
    for layer in range(num_layers):
        for name, module in modules.items():
            for part in ("weight", "bias"):
                yield f"blk.{layer}.{name}.{part}", f"model.layers.{layer}.{module}.{part}"


def _unpack(content: "np.ndarray[Any, Any]", tensor: GgufTensor, gguf: Any, where: str) -> "np.ndarray[Any, Any]":
    """Returns the values of a tensor in fp32."""
    try:
        kind = gguf.GGMLQuantizationType(tensor.kind)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if tensor.shape[-1] % block:
            raise ValueError(f"its rows of {tensor.shape[-1]} values are no multiple of {block}")
        stop = tensor.start + tensor.numel // block * size
        if stop > len(content):
            raise ValueError(f"the file ends at byte {len(content):,}, the tensor at {stop:,}")
        rows = content[tensor.start : stop].reshape(*tensor.shape[:-1], -1)
        return gguf.quants.dequantize(rows, kind).reshape(tensor.shape)
    except (ValueError, KeyError, IndexError, NotImplementedError) as error:
        raise UserError(f"{where}: the tensor {tensor.name:.60} cannot be unpacked ({first_line(error)})") from error


def _half_rotated(rows: "np.ndarray[Any, Any]", heads: int) -> "np.ndarray[Any, Any]":
    """Returns the rows of each head in the order of transformers: the first halves of all rotated pairs, then the second."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
