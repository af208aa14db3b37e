"""Tests of `unrotate` against fp64 and against the rotation of models."""

import itertools

import pytest
import torch
from torch import Tensor

from msattn.kernels.types import Backend
from msattn.kernels.unrotate import unrotate
from msattn.trainer.models.rope import cos_sin
from tests.kernels import shared
from tests.kernels.shared import BACKENDS


def angles(
    batch: int, tokens: int, rotated: int, device: str, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns cos and sin, with an attention factor, as they are for positions that differ by
    sequence: fp32 ``[B, N, r]``.
    """
    positions = (
        torch.arange(tokens, device=device) + 1000 * torch.arange(batch, device=device)[:, None]
    )
    cos, sin = cos_sin(
        1e4 ** -torch.linspace(0, 1, rotated // 2, device=device),
        positions,
        interleaved=interleaved,
    )
    return 1.3 * cos, 1.3 * sin


def exactly(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Inverts each pair in fp64, as a complex number."""
    cos, sin, out = cos.double()[:, None], sin.double()[:, None], x.double().clone()
    rotated = cos.shape[-1]
    half, channels = rotated // 2, torch.arange(rotated)
    one, other = (
        (channels[::2], channels[1::2]) if interleaved else (channels[:half], channels[half:])
    )
    before = torch.complex(out[..., one], out[..., other]) / torch.complex(
        cos[..., one], sin[..., one]
    )
    out[..., one], out[..., other] = before.real, before.imag
    return out


def assert_agrees(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    backend: Backend | None = None,
) -> None:
    got = unrotate(x, cos, sin, interleaved=interleaved, backend=backend)
    assert (got.dtype, got.shape) == (x.dtype, x.shape)
    exact = exactly(x, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(got.double(), exact, rtol=1.01 * torch.finfo(x.dtype).eps, atol=4e-6)


@pytest.mark.interpreted
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(
    ("shape", "rotated", "interleaved"),
    [
        ((2, 3, 65, 64), 64, True),
        ((1, 7, 1, 128), 128, False),
        ((3, 1, 63, 80), 40, False),
        ((1, 2, 111, 24), 12, True),
    ],
    ids=str,
)
def test_agrees_with_fp64(
    shape: tuple[int, ...],
    rotated: int,
    interleaved: bool,
    dtype: torch.dtype,
    backend: Backend,
    device: str,
    poisoned: None,
) -> None:
    """cos and sin have the dtype of x, as in a model, and one sequence or as many."""
    x = torch.randn(shape, device=device).to(dtype)
    for batch in {1, shape[0]}:
        cos, sin = (
            part.to(dtype)
            for part in angles(batch, shape[2], rotated, device, interleaved=interleaved)
        )
        assert_agrees(x, cos, sin, interleaved=interleaved, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 63, 65, 111, 4095])
def test_full_product(dtype: torch.dtype, tokens: int, poisoned: None) -> None:
    for size, heads, interleaved in itertools.product(
        [64, 80, 96, 128, 256], [1, 4, 7], [False, True]
    ):
        for rotated in {size, size // 2, size // 4}:
            x = torch.randn(2, heads, tokens, size, device="cuda").to(dtype)
            cos, sin = angles(2, tokens, rotated, "cuda", interleaved=interleaved)
            assert_agrees(x, cos.to(dtype), sin.to(dtype), interleaved=interleaved)


def test_without_rotation(device: str) -> None:
    x, none = torch.randn(1, 2, 5, 16, device=device), torch.empty(1, 5, 0, device=device)
    assert unrotate(x, none, none) is x


@pytest.mark.parametrize("backend", BACKENDS)
def test_has_no_gradient(backend: Backend, device: str) -> None:
    x, (cos, sin) = (
        torch.randn(1, 1, 5, 16, device=device, requires_grad=True),
        angles(1, 5, 16, device),
    )
    with torch.enable_grad(), pytest.raises(NotImplementedError, match="unrotate is for inference"):
        unrotate(x, cos, sin, backend=backend)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    """A captured step follows in-place changes of its inputs."""
    x, (cos, sin) = torch.randn(1, 8, 33, 128, device="cuda"), angles(1, 33, 128, "cuda")
    shared.assert_cuda_graph(lambda: unrotate(x, cos, sin), lambda: x.copy_(torch.randn_like(x)))
