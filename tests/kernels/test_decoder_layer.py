"""Tests of the kernels of a decoder layer, against the modules of transformers."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from msattn.kernels import decoder_layer as module
from msattn.kernels.decoder_layer import gated_silu, rms_norm, rotate_and_append
from msattn.kernels.types import Backend
from tests.kernels import shared
from tests.kernels.shared import BACKENDS

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
EPS = 1e-5


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def assert_same(got: Tensor, want: Tensor, backend: Backend) -> None:
    """Asserts equality; of two roundings in a row, Triton's may each go to the neighboring
    number.
    """
    if backend == "torch":
        assert torch.equal(got, want)
        return
    limits = torch.finfo(got.dtype)
    # In fp32 the order of a sum and the rounded argument of exp2 show too.
    ulps = 16 if got.dtype == torch.float32 else 2
    torch.testing.assert_close(
        got, want, rtol=ulps * limits.eps, atol=8 * limits.smallest_normal * limits.eps
    )


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    norm = LlamaRMSNorm(x.shape[-1], EPS).to(x.device, x.dtype)
    norm.weight.copy_(weight)
    return norm(x)


def random(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def layouts(x: Tensor, other: Tensor) -> dict[str, Tensor]:
    """Views of ``x [B, N, H, D]``: contiguous, slices of a fused projection, transposed, every
    second element.
    """
    fused = torch.cat([other, x, other], dim=2)
    pairs = torch.stack([x, other], dim=-1)
    return {
        "contiguous": x,
        "slice": fused[:, :, x.shape[2] : 2 * x.shape[2]],
        "rows": fused[0, 0, 1 : x.shape[2] + 2 : 2],
        "transposed": x.transpose(1, 2),
        "every second": pairs[..., 0],
        "token": fused[:, 0, 1],
        "vector": x[0, 0, 0],
        "none": x[:, :0],
    }


LAYOUTS = list(layouts(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 4096), (3, 7, 64), (2, 5, 3, 80), (1, 1, 9, 128), (5, 1), (2, 5120), (16384,)]
)
def test_norm_equals_that_of_transformers(
    shape: tuple[int, ...], dtype: torch.dtype, backend: Backend, device: str
) -> None:
    x = 3 * random(*shape, dtype=dtype, device=device)
    weight = random(shape[-1], dtype=dtype, device=device)
    got = rms_norm(x, weight, EPS, backend=backend)
    assert got.dtype == dtype
    assert_same(got, llama_norm(x, weight), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_and_gated_silu_of_strided_rows(layout: str, backend: Backend, device: str) -> None:
    x, other = (random(3, 4, 5, 72, dtype=torch.float16, device=device) for _ in range(2))
    weight = random(144, dtype=torch.float16, device=device)[::2]
    gate, up = layouts(x, other)[layout], layouts(other, x)[layout].contiguous()
    assert_same(rms_norm(gate, weight, EPS, backend=backend), llama_norm(gate, weight), backend)
    for left, right in ((gate, up), (up, gate), (gate, gate)):
        assert_same(
            gated_silu(left, right, backend=backend),
            torch.nn.functional.silu(left) * right,
            backend,
        )


def test_slices_of_a_projection_are_not_copied() -> None:
    x = torch.zeros(3, 4, 5, 72)
    views = layouts(x, x)
    copied = {
        name
        for name in LAYOUTS
        if module._row_layout(views[name])[0].data_ptr() != views[name].data_ptr()
    }
    assert copied == {"transposed", "every second"}


@pytest.mark.parametrize("few", [True, False])
def test_tiles_for_many_rows(few: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles for prompts, also on few rows: the last program is not full."""
    monkeypatch.setattr(module, "MAX_SMALL_TILE_ELEMENTS", 2**20 if few else 0)
    x, up = (random(61, 200, dtype=torch.float16, device=device) for _ in range(2))
    weight = random(200, dtype=torch.float16, device=device)
    assert_same(rms_norm(x, weight, EPS, backend="triton"), llama_norm(x, weight), "triton")
    assert_same(gated_silu(x, up, backend="triton"), torch.nn.functional.silu(x) * up, "triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1536), (2, 3, 515), (1,), (7, 1)])
def test_gated_silu_equals_that_of_pytorch(
    shape: tuple[int, ...], dtype: torch.dtype, backend: Backend, device: str
) -> None:
    gate, up = (4 * random(*shape, dtype=dtype, device=device) for _ in range(2))
    got = gated_silu(gate, up, backend=backend)
    assert got.dtype == dtype
    assert_same(got, torch.nn.functional.silu(gate) * up, backend)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, for infinities
@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_silu_of_extreme_numbers(backend: Backend, device: str) -> None:
    gate = torch.tensor(
        [-torch.inf, -1e30, -104.0, -0.0, 0.0, 104.0, 1e30, torch.inf, torch.nan], device=device
    )
    got, want = (
        f(gate)
        for f in (
            lambda x: gated_silu(x, torch.ones_like(x), backend=backend),
            torch.nn.functional.silu,
        )
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-38, equal_nan=True)


def step(
    batch: int,
    q_heads: int,
    kv_heads: int,
    head: int,
    dtype: torch.dtype,
    device: str,
    angles: int = 1,
    tokens: int = 1,
) -> dict[str, Any]:
    """Returns arguments of `rotate_and_append`: slices of a fused projection, and a cache of NaN
    that is a view itself.
    """
    capacity = tokens + 5
    fused = random(
        batch, tokens, q_heads + 2 * kv_heads, head, dtype=dtype, device=device
    ).transpose(1, 2)
    q, k, v = fused.split([q_heads, kv_heads, kv_heads], dim=1)
    angle = torch.randn(angles, tokens, head // 2, device=device).repeat(1, 1, 2)
    keys = torch.full((batch, kv_heads, capacity, head), torch.nan, dtype=dtype, device=device)
    values = torch.full(
        (capacity, batch, kv_heads + 1, head + 8), torch.nan, dtype=dtype, device=device
    )
    return {
        "q": q,
        "k": k,
        "v": v,
        "cos": angle.cos().to(dtype),
        "sin": angle.sin().to(dtype),
        "keys": keys,
        "values": values.permute(1, 2, 0, 3)[:, 1:, :, :head],
        "position": torch.tensor([2], device=device),
    }


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "q_heads", "kv_heads", "head", "angles", "tokens"),
    [
        (1, 4, 4, 64, 1, 1),
        (2, 8, 2, 80, 2, 37),
        (3, 7, 1, 128, 1, 1),
        (1, 4, 1, 256, 1, 16),
        (2, 1, 1, 8, 2, 2),
    ],
)
def test_rotation_equals_that_of_transformers(
    batch: int,
    q_heads: int,
    kv_heads: int,
    head: int,
    angles: int,
    tokens: int,
    dtype: torch.dtype,
    backend: Backend,
    device: str,
) -> None:
    """Bit for bit, with both backends; the cache is written at the positions alone."""
    given = step(batch, q_heads, kv_heads, head, dtype, device, angles, tokens)
    want_q, want_k = apply_rotary_pos_emb(*(given[name] for name in ("q", "k", "cos", "sin")))
    want_keys, want_values = given["keys"].clone(), given["values"].clone()
    want_keys[:, :, 2 : 2 + tokens], want_values[:, :, 2 : 2 + tokens] = want_k, given["v"]
    whole = given["values"]._base.clone()  # with the elements that are not in the view
    whole.permute(1, 2, 0, 3)[:, 1:, :, :head].copy_(want_values)
    got = rotate_and_append(**given, backend=backend)
    assert got.transpose(1, 2).is_contiguous()
    assert torch.equal(got, want_q)
    torch.testing.assert_close(given["keys"], want_keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(given["values"]._base, whole, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("position", "written"), [(0, True), (5, True), (-1, False), (6, False), (2**40, False)]
)
def test_positions_outside_the_cache_are_not_written(
    position: int, written: bool, backend: Backend, device: str
) -> None:
    given = step(2, 4, 2, 64, torch.float32, device)
    given["position"].fill_(position)
    got = rotate_and_append(**given, backend=backend)
    assert not got.isnan().any()
    for cache in (given["keys"], given["values"]):
        filled = ~cache.isnan().flatten(0, 1).any(-1).any(0)
        assert filled.tolist() == [written and n == position for n in range(6)]
        assert cache.isnan().sum() == cache[:, :, 0].numel() * (5 if written else 6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_past_the_end_of_the_cache_are_not_written(backend: Backend, device: str) -> None:
    given, same = (step(2, 4, 2, 64, torch.float32, device, tokens=20) for _ in range(2))
    same["q"], same["k"], same["v"] = (given[name] for name in "qkv")
    rotate_and_append(**given | {"position": 9}, backend=backend)
    rotate_and_append(**same | {"position": torch.tensor([9], device=device)}, backend=backend)
    assert given["keys"].isnan().flatten(0, 1).all(-1).all(0).tolist() == [n < 9 for n in range(25)]
    for name in ("keys", "values"):
        torch.testing.assert_close(
            given[name][:, :, 9:].isnan(), torch.zeros_like(given[name][:, :, 9:], dtype=torch.bool)
        )
    torch.testing.assert_close(given["values"][:, :, 9:], given["v"][:, :, :16], rtol=0, atol=0)
    torch.testing.assert_close(same["values"][:, :, 9:], given["v"][:, :, :16], rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_gradient(backend: Backend, device: str) -> None:
    x, weight = torch.ones(2, 8, device=device), torch.ones(8, device=device, requires_grad=True)
    given = step(1, 2, 1, 64, torch.float32, device)
    with torch.enable_grad():
        for call in (
            lambda: rms_norm(x, weight, EPS, backend=backend),
            lambda: gated_silu(x, x * weight, backend=backend),
            lambda: rotate_and_append(
                **given | {"k": given["k"].clone().requires_grad_()}, backend=backend
            ),
        ):
            with pytest.raises(NotImplementedError, match="for inference"):
                call()
    assert not rms_norm(x, weight, EPS, backend=backend).requires_grad


@pytest.mark.gpu
def test_more_than_2_31_elements() -> None:
    x = torch.zeros(2**19 + 2, 4096, dtype=torch.bfloat16, device="cuda")
    x[-1].normal_()
    got = gated_silu(x, x)
    assert_same(got[-1], torch.nn.functional.silu(x[-1]) * x[-1], "triton")
    assert not got[:-1].any()
    del got
    got = rms_norm(x, x[-1].clone(), EPS)
    assert_same(got[-1], llama_norm(x[-1], x[-1]), "triton")
    assert not got[:-1].any()


@pytest.mark.gpu
def test_cuda_graph() -> None:
    """A replayed graph writes at the position that the tensor holds then."""
    given = step(2, 8, 2, 128, torch.bfloat16, "cuda")
    x = torch.randn(2, 1, 4096, device="cuda").bfloat16()
    weight = torch.randn(4096, device="cuda").bfloat16()

    def layer() -> tuple[Tensor, ...]:
        given["keys"].fill_(7)
        return (
            gated_silu(rms_norm(x, weight, EPS), x),
            rotate_and_append(**given),
            given["keys"].clone(),
        )

    shared.assert_cuda_graph(layer, lambda: given["position"].fill_(4))
    assert (given["keys"] != 7).any(-1).nonzero()[:, 2].unique().tolist() == [4]
