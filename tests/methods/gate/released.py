"""Folders of SeerAttention's released gates, and their definition in fp64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from msattn.trainer.errors import UserError
from msattn.trainer.methods.gate.official import import_gate
from tests.factory import tiny_config
from tests.methods.gate.random_gates import BLOCK, FUNCTIONS

SIZE, HEADS, KV_HEADS = 16, 4, 2


def released(
    folder: Path,
    family: str = "llama",
    rope: str = "default",
    hidden: int = SIZE,
    pools: str = "Qavg_Kmaxminavg",
    **keys: Any,
) -> dict[str, Tensor]:
    """Writes a folder of the layout of gates for prefill with random weights, and returns them."""
    q_pools, k_pools = (
        len(part) // 3 for part in (pools.split("_")[0][1:], pools.split("_")[1][1:])
    )
    double = q_pools > 1 or hidden != SIZE or keys.get("seerattn_gate_force_double", False)
    tensors = {}
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.attn_gate"
        tensors[f"{name}.mask_linear_k.weight"] = (
            torch.randn(KV_HEADS if double else HEADS, k_pools * SIZE, hidden) / 4
        )
        if double:
            tensors[f"{name}.mask_linear_q.weight"] = torch.randn(HEADS, q_pools * SIZE, hidden) / 4
    own = {
        "seerattn_gate_type": pools,
        "seerattn_gate_force_double": False,
        "seerattn_threshold": 0.0,
    }
    return write(folder, family, rope, hidden, own | keys, tensors)


def write(
    folder: Path,
    family: str,
    rope: str,
    hidden: int,
    keys: dict[str, Any],
    tensors: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Writes weights in bfloat16, and a configuration with ``keys``; returns the weights."""
    folder.mkdir(exist_ok=True)
    document = tiny_config(family, rope).to_dict() | {"base_model": "someone/base"}
    if family == "qwen2":
        del document["head_dim"]
    sizes = {"seerattn_gate_block_size": BLOCK, "seerattn_gate_hidden_size": hidden}
    (folder / "config.json").write_text(json.dumps(document | sizes | keys))
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    torch.save(tensors, folder / "attn_gate_weights.pth")
    return tensors


def their_rope(family: str, rope: str, hidden: int) -> tuple[Tensor, float]:
    """Angles of a step of one token for gates of this width, and the factor of what is rotated,
    which YaRN has.
    """
    angles = 1 / 10000.0 ** (torch.arange(0, hidden, 2) / hidden)
    if rope in ("llama3", "yarn"):  # their definition is transformers' own
        angles, factor = ROPE_INIT_FUNCTIONS[rope](
            tiny_config(family, rope, head_dim=hidden), "cpu"
        )
        assert (factor > 1.1) == (rope == "yarn")
        return angles.double(), factor
    return {"default": angles, "linear": angles / 2, "none": 0 * angles}[rope].double(), 1.0


def pooled(block: Tensor, pools: str) -> Tensor:
    """Pools a block ``[n, D]`` as a name such as ``Kmaxmin`` says: ``[pools * D]``."""
    return torch.cat([FUNCTIONS[pools[i : i + 3]](block) for i in range(1, len(pools), 3)])


def edited(folder: Path, **keys: Any) -> None:
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in (document | keys).items() if v is not None})
    )


def assert_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    """Asserts that gates in ``folder / "theirs"`` are refused in one line; nothing is written and
    no code runs.
    """
    monkeypatch.chdir(folder)
    with pytest.raises(UserError) as refused:
        import_gate("theirs", folder / "gate")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert [path.name for path in folder.iterdir()] == ["theirs"]
