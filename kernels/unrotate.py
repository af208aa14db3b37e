"""The inverse of RoPE, for inference.

    a' = (a cos + b sin) / (cos^2 + sin^2)
    b' = (b cos - a sin) / (cos^2 + sin^2)

for each pair of channels (a, b).

Engines that hand over queries and keys after their rotation (vLLM), and caches, hold them so. The
division also removes an attention factor. In eager PyTorch a layer launches some 25 kernels for it;
this is one for its queries and one for its keys.

A plain function of tensors, not a registered operation; its form in PyTorch is in this file too.
Tiles: BN tokens, BP pairs of channels, BR channels that do not rotate. Prefixes: o_ offset, m_
mask. Grid: (block of tokens, head, sequence).
"""

import torch
from torch import Tensor

from msattn.kernels.common.checks import (
    check_device,
    check_no_gradient,
    check_tokens,
    resolve_backend,
    statistics_dtype,
)
from msattn.kernels.common.primitives import (
    pdl_args,
    pdl_launch_dependents,
    pdl_wait,
    row_tile,
    tl,
    triton,
)
from msattn.kernels.types import Backend


def unrotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    backend: Backend | None = None,
) -> Tensor:
    """Inverts the rotation of queries or keys ``x [B, H, N, D]``, computing in fp32; returns them
    in the dtype of x.

    ``x`` is fp32, fp16 or bf16 (fp64 on the torch backend); strided views are not copied. ``cos``
    and ``sin [B | 1, N, r]``, in any of these dtypes, are of each rotated channel, attention factor
    included; r is even, up to D, and the channels after the first r stay. A pair is channels ``d``
    and ``d + r/2``, or if ``interleaved`` ``2 d`` and ``2 d + 1``. Raises ValueError for an invalid
    argument, NotImplementedError if a gradient is required.
    """
    check_no_gradient("unrotate", x, cos, sin)
    check_tokens("x", x)
    batch, _, tokens, size = x.shape
    for name, part in (("cos", cos), ("sin", sin)):
        ok = (
            part.is_floating_point()
            and part.dim() == 3
            and len(part) in (batch, 1)
            and part.shape[1] == tokens
        )
        if not ok or part.shape[2] % 2 or part.shape[2] > size or part.shape[2] != cos.shape[-1]:
            expected = (
                f"floating point [{batch} or 1, {tokens}, r], r even and up to {size}, one "
                f"shape for both"
            )
            raise ValueError(f"{name} is {part.dtype} {tuple(part.shape)}: expected {expected}")
        check_device(name, part, "x", x)
    if not cos.shape[-1]:
        return x
    if resolve_backend(backend, x, "x") == "triton":
        with torch.cuda.device_of(x):
            return launch(x, cos, sin, interleaved)
    rotated, full = cos.shape[-1], statistics_dtype(x)
    dim, sizes = (-1, (-1, 2)) if interleaved else (-2, (2, -1))
    pairs, cos, sin = (
        part.to(full).unflatten(-1, sizes)
        for part in (x[..., :rotated], cos.unsqueeze(1), sin.unsqueeze(1))
    )
    a, b = pairs.unbind(dim)
    before = (pairs * cos + torch.stack((b, -a), dim) * sin) / (cos * cos + sin * sin)
    return torch.cat((before.flatten(-2).to(x.dtype), x[..., rotated:]), dim=-1)


def launch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Launches the kernel; the grid depends only on shapes."""
    batch, heads, tokens, size = x.shape
    out, pairs = torch.empty_like(x), cos.shape[-1] // 2
    rows, _ = row_tile(size)
    if out.numel():
        _unrotate_kernel[(triton.cdiv(tokens, rows), heads, batch)](
            x, cos, sin, out, tokens, *x.stride(), *out.stride(),
            *(stride for part in (cos, sin) for stride in (part.stride(0) if len(part) > 1 else 0,
                *part.stride()[1:])),
            SIZE=size, PAIRS=pairs, STEP=2 if interleaved else 1, GAP=1 if interleaved else pairs,
            BN=rows, BP=triton.next_power_of_2(pairs),
            BR=triton.next_power_of_2(max(1, size - 2 * pairs)),
            **pdl_args(x.device),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])
def _unrotate_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, tokens,
    stride_xb, stride_xh, stride_xn, stride_xd, stride_ob, stride_oh, stride_on, stride_od,
    stride_cb, stride_cn, stride_cd, stride_sb, stride_sn, stride_sd,
    SIZE: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr, GAP: tl.constexpr,
    BN: tl.constexpr, BP: tl.constexpr, BR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    token, pair = (
        (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)[:, None],
        tl.arange(0, BP)[None, :],
    )
    m_token = token < tokens
    mask = m_token & (pair < PAIRS)
    first, second = STEP * pair, STEP * pair + GAP
    x_ptr += batch * stride_xb + head * stride_xh + token * stride_xn
    out_ptr += batch * stride_ob + head * stride_oh + token * stride_on
    cos_ptr += batch * stride_cb + token * stride_cn
    sin_ptr += batch * stride_sb + token * stride_sn
    a = tl.load(x_ptr + first * stride_xd, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + second * stride_xd, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + first * stride_cd, mask=mask, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + first * stride_sd, mask=mask, other=0.0).to(tl.float32)
    out = (a * cos + b * sin) / (cos * cos + sin * sin)
    tl.store(out_ptr + first * stride_od, out.to(out_ptr.dtype.element_ty), mask=mask)
    cos = tl.load(cos_ptr + second * stride_cd, mask=mask, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + second * stride_sd, mask=mask, other=0.0).to(tl.float32)
    out = (b * cos - a * sin) / (cos * cos + sin * sin)
    tl.store(out_ptr + second * stride_od, out.to(out_ptr.dtype.element_ty), mask=mask)
    if SIZE > 2 * PAIRS:
        rest = 2 * PAIRS + tl.arange(0, BR)[None, :]
        m_rest = m_token & (rest < SIZE)
        tl.store(
            out_ptr + rest * stride_od,
            tl.load(x_ptr + rest * stride_xd, mask=m_rest, other=0.0),
            mask=m_rest,
        )
