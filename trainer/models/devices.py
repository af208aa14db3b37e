"""Resolution of the ``device`` and ``dtype`` settings."""

import os
from itertools import chain
from typing import TYPE_CHECKING

import torch

from msattn.trainer.config import nearest
from msattn.trainer.errors import UserError

if TYPE_CHECKING:
    from torch import nn

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def resolve_device(device: str) -> torch.device:
    """Returns the device; ``auto`` is CUDA if available. Under ``torchrun`` each rank gets its own
    GPU.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: PyTorch sees no CUDA GPU; use device=cpu")
    return (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        if device == "cuda"
        else torch.device(device)
    )


def compute_devices(model: "nn.Module") -> list[torch.device]:
    """Returns the devices on which ``model`` computes, in the order of its weights, even if these
    are offloaded.
    """
    devices = dict.fromkeys(tensor.device for tensor in chain(model.parameters(), model.buffers()))
    return [device for device in devices if device.type != "meta"]


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Returns the dtype; ``auto`` is bfloat16 on CUDA, float32 elsewhere."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise UserError(
            f"dtype={dtype}: expected auto, {', '.join(DTYPES)}{nearest(dtype, list(DTYPES))}"
        )
    return DTYPES[dtype]
