"""Records of the cases of each function of kernels, and arguments that several share."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from msattn.kernels.testing import random_pages, random_qkv, starts
from msattn.kernels.types import PagedKeys

Arguments = dict[str, Any]
Refused = list[tuple[Arguments, str]]
Variant = TypeVar("Variant")
INT, LONG, SHORT, HALF = torch.int32, torch.int64, torch.int16, torch.float16
NAN, INF = float("nan"), float("inf")
zeros = torch.zeros
CAPS = (None, 30.0)
SIZES = (64, 128, 256, 512)


class Cases(NamedTuple):
    """Cases of an operation, or of another function of kernels.

    Attributes
    ----------
    arguments : returns small valid ones on a device.
    launch : launches the kernels with tensors of a dtype and head size, which compiles them for a
        compute capability; see test_compile.py. None: the launch of another function does.
    refused : changes of the arguments, each with what the message says. Of a paged cache they may
        be changes of its fields.
    """

    function: Callable[..., Any]
    arguments: Callable[[str], Arguments]
    launch: Callable[[torch.dtype, int, int], None] | None
    refused: Refused


def attention(device: str, **others: Any) -> Arguments:
    """One sequence of 40 tokens, 3 of them padding, with 4 query heads and 2 key/value heads."""
    q, k, v = random_qkv(1, 4, 2, 40, head_size=16, device=device)
    return {"q": q, "k": k, "v": v, "kv_start": starts([3], device), "scale": 0.1, **others}


def decoding(device: str, queries: int = 1, **others: Any) -> Arguments:
    """Two sequences of 70 and 30 cached tokens."""
    q, k, v = random_qkv(2, 4, 2, queries, 70, 16, device=device)
    return {"q": q, "k": k, "v": v, "kv_len": starts([70, 30], device), "scale": 0.1, **others}


def pages(device: str, *by_position: Tensor) -> tuple[PagedKeys, list[Tensor]]:
    """Returns sequences of 70 and 30 tokens in pages of 16, and other tensors by slot."""
    _, k, v = random_qkv(2, 4, 2, 1, 70, 16, device=device)
    return random_pages(k, v, starts([70, 30], device), 16, by_position)


def choose(variants: Sequence[Variant], head_size: int, sm: int) -> Variant:
    """Returns one variant, so that head sizes and GPUs cover them in rotation."""
    return variants[(SIZES.index(head_size) + (sm == 80)) % len(variants)]


def compiles_backward(head_size: int, sm: int) -> bool:
    """Returns False on sm_80 for the first shape: its backward passes compile with the further
    shapes.
    """
    return sm == 90 or head_size != 128


def block_size_for(head_size: int) -> int:
    """Returns a block size below, equal to or above the rows of a tile, by head size."""
    return {64: 16, 256: 128}.get(head_size, 64)
