"""Folders of SeerAttention's released gates."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.factory import tiny_config

BLOCK, SIZE, HEADS, KV_HEADS = 16, 16, 4, 2
REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda t: t.max(0)[0],
    "min": lambda t: t.min(0)[0],
    "avg": lambda t: t.mean(0),
}


def released(
    folder: Path, family: str = "llama", rope: str = "default", hidden: int = SIZE, pools: str = "Qavg_Kmaxminavg", **keys: Any
) -> dict[str, Tensor]:
    """Writes a folder of the released layout with random gates, and returns their weights."""
    folder.mkdir(exist_ok=True)
    document = tiny_config(family, rope).to_dict()
    document |= {"base_model": "someone/base", "seerattn_gate_type": pools, "seerattn_gate_block_size": BLOCK}
    document |= {"seerattn_gate_hidden_size": hidden, "seerattn_gate_force_double": False, "seerattn_threshold": 0.0}
    if family == "qwen2":
        del document["head_dim"]
    (folder / "config.json").write_text(json.dumps(document | keys))
    q_pools, k_pools = (len(part) // 3 for part in (pools.split("_")[0][1:], pools.split("_")[1][1:]))
    double = q_pools > 1 or hidden != SIZE or keys.get("seerattn_gate_force_double", False)
    tensors = {}
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.attn_gate"
        tensors[f"{name}.mask_linear_k.weight"] = torch.randn(KV_HEADS if double else HEADS, k_pools * SIZE, hidden)
        if double:
            tensors[f"{name}.mask_linear_q.weight"] = torch.randn(HEADS, q_pools * SIZE, hidden)
    tensors = {name: (tensor / 4).bfloat16() for name, tensor in tensors.items()}
    torch.save(tensors, folder / "attn_gate_weights.pth")
    return tensors


def edited(folder: Path, **keys: Any) -> None:
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (document | keys).items() if v is not None}))
