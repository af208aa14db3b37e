"""Records of the cases of each function of kernels, and arguments that several share."""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from msattn.kernels.testing import random_pages, random_qkv, starts
from msattn.kernels.types import PagedKeys

Arguments = dict[str, Any]
Refused = list[tuple[Arguments, str]]
Find = Callable[[Arguments], Tensor]
Variant = TypeVar("Variant")
INT, LONG, SHORT, HALF = torch.int32, torch.int64, torch.int16, torch.float16
NAN, INF = float("nan"), float("inf")
zeros = torch.zeros
CAPS = (None, 30.0)
SIZES = (64, 128, 256, 512)
Shared = Literal["operator", "strides"]
SLOW: tuple[Shared, ...] = ("operator", "strides")


def token(place: int, *, name: str = "k", sequence: int = 0) -> Find:
    """Returns a function that finds a token of the first head."""
    return lambda given: given[name][sequence, 0, place]


def slot(position: int) -> Find:
    """Returns a function that finds the key of a position in the first sequence's pages, of the
    first head.
    """

    def find(given: Arguments) -> Tensor:
        cache = given["cache"]
        return cache.k[cache.table[0, position // cache.k.shape[1]], position % cache.k.shape[1], 0]

    return find


class Cases(NamedTuple):
    """Cases of an operation, or of another function of kernels.

    Attributes
    ----------
    arguments : returns small valid ones on a device.
    launch : launches the kernels with tensors of a dtype and head size, which compiles them for a
        compute capability; see test_compile.py. None: the launch of another function does.
    refused : changes of the arguments, each with what the message says. Of a paged cache they may
        be changes of its fields.
    variants : returns changes of the arguments to other types, and to those of the function's
        other operators.
    differentiable : the function has a backward pass.
    read : finds an element whose NaN makes those rows of the results NaN that read it. None: it
        makes none NaN, as in integers.
    unread : finds elements that no row reads, such as padding, keys past a length or in blocks and
        buckets that are not read, parts without keys. None: there are none.
    contiguous : tensors that may be refused unless their last dimension is contiguous. Vectors
        always may be.
    full_precision : tensors that stay in float32 if the others are in half precision.
    slow : shared tests that take seconds with this function: test_operators.py, test_strides.py.
    """

    function: Callable[..., Any]
    arguments: Callable[[str], Arguments]
    launch: Callable[[torch.dtype, int, int], None] | None
    refused: Refused
    variants: Callable[[Arguments], Sequence[Arguments]] = lambda given: ()
    differentiable: bool = False
    read: Find | None = token(20)
    unread: Find | None = None
    contiguous: tuple[str, ...] = ()
    full_precision: tuple[str, ...] = ()
    slow: tuple[Shared, ...] = ()

    @property
    def parameters(self) -> set[str]:
        """Names of the function's parameters."""
        return {*inspect.signature(self.function).parameters}

    @property
    def operators(self) -> dict[str, OpOverload]:
        """Custom operators of the function's module, by name."""
        module = vars(sys.modules[self.function.__module__])
        return {name: x for name, x in module.items() if isinstance(x, OpOverload)}


def drawn(device: str, **shapes: tuple[int, ...]) -> Arguments:
    """Returns random tensors of the shapes."""
    return {name: torch.randn(shape, device=device) for name, shape in shapes.items()}


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
