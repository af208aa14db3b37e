"""Tests block_sparse_attention alone: compiled shapes, block lists, what is read; see also
test_block_maps.py.
"""

import itertools

import pytest
import torch
from torch import Tensor

from msattn.kernels.block_sparse_attention import block_sparse_attention
from msattn.kernels.common import block_lists
from msattn.kernels.common.block_bits import pack_blocks
from msattn.kernels.common.block_lists import compact_columns, compact_rows
from msattn.kernels.common.checks import query_offset
from msattn.kernels.reference import block_sparse_attention as reference
from msattn.kernels.testing import random_block_mask, random_qkv, starts, visible
from msattn.kernels.types import Backend
from tests.kernels import shared
from tests.kernels.block_maps import BLOCK_SPARSE, check, random_mask
from tests.kernels.problems import Case, full_product
from tests.kernels.shared import BACKENDS


def test_reference_in_chunks_and_by_autograd(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Chunks of one row block give the same results as larger ones, and autograd the gradients of
    the operator.
    """
    case = Case(2, 4, 2, 100, 140, 16, padding=(0, 60), block_size=16)
    q, k, v = inputs = [x.requires_grad_() for x in case.qkv(device)]
    mask = random_block_mask(2, 4, *case.blocks, 0.4, device)
    mask[:, :, 2] = False  # empty rows have finite gradients
    want = block_sparse_attention(
        q, k, v, mask, **case.options(device), softcap=5.0, backend="torch"
    )
    wanted = torch.autograd.grad(want.out.square().sum() + want.lse.clamp(min=-1e9).sum(), inputs)
    monkeypatch.setattr("msattn.kernels.reference.common.LISTED_SCORES", 1)
    got = reference.block_sparse_attention(q, k, v, mask, **case.options(device), softcap=5.0)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got.out.square().sum() + got.lse.clamp(min=-1e9).sum(), inputs), wanted
    )


# Several blocks of keys in a tile, a row block of several key blocks and the other way round, lists
# that do not fill a tile.
KEY_BLOCKS = [
    Case(2, 4, 1, 63, 63, 80, torch.float16, True, (0, 40), 64, 16),
    Case(1, 7, 1, 129, 129, 64, torch.float16, True, None, 64, 32),
    Case(2, 3, 3, 70, 150, 64, torch.float16, True, (70, 3), 64, 16),
    Case(2, 4, 1, 65, 129, 16, torch.float32, False, (3, 129), 32, 16),
    Case(1, 3, 1, 130, 65, 64, torch.float16, False, (20,), 128, 32),
    Case(1, 2, 2, 130, 65, 64, torch.float16, True, None, 16, 64),
    Case(1, 4, 2, 111, 300, 32, torch.float32, True, (5,), 16, 128),
    Case(1, 2, 1, 40, 90, 64, torch.float16, True, (60,), 16, 16),
    Case(1, 2, 1, 80, 96, 64, torch.float16, True, None, 64, 16),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", range(len(KEY_BLOCKS)))
def test_blocks_of_other_sizes(number: int, backend: Backend, device: str, poisoned: None) -> None:
    """Blocks of fewer or more keys than queries."""
    case, softcap = KEY_BLOCKS[number], (5.0, None, None)[number % 3]
    mask = random_mask(
        case.batch if number % 2 else 1,
        (case.q_heads, case.kv_heads, 1)[number % 3],
        case.blocks,
        device=device,
    )
    mask[:, :, -1] &= number % 2 == 0
    with_gradients = device == "cuda" or backend == "torch" or number % 4 == 3
    check(BLOCK_SPARSE, case, mask, backend, device, with_gradients, softcap)


def test_lists_in_parts(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Row blocks whose lists are built and read some at a time give the same results."""
    case = Case(2, 4, 2, 150, 170, 64, torch.float16, True, (0, 40), 32, 16)
    mask = random_mask(1, 4, case.blocks, device=device)
    inputs = case.qkv(device)
    want = block_sparse_attention(*inputs, mask, **case.options(device), backend="triton")
    monkeypatch.setattr(block_lists, "PART_BYTES", 2 * 2 * 4 * 2 * case.blocks[1])  # two row blocks
    sizes = case.num_queries, case.num_keys, query_offset(150, 170, True), 32, 16, True
    assert [
        first for first, *_ in block_lists.compact_parts(mask, starts((0, 40), device), *sizes)
    ] == [4, 2, 0]
    got = block_sparse_attention(*inputs, mask, **case.options(device), backend="triton")
    shared.assert_same(got, want)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("heads", "block", "keys"), [(4, 32, 16), pytest.param(2, 16, 16, marks=pytest.mark.slow)]
)
def test_bits_are_a_mask(heads: int, block: int, keys: int, backend: Backend, device: str) -> None:
    """Results and gradients are the same, up to the order of PyTorch's sums on a GPU."""
    case = Case(2, 4, 2, 150, 600, 16, torch.float32, True, (0, 500), block, keys)
    q, k, v = (x.requires_grad_() for x in case.qkv(device))
    mask = random_mask(1, heads, case.blocks, device=device)
    assert mask.shape[3] > 32  # several words
    found = []
    for each in (mask, pack_blocks(mask)):
        out, lse = block_sparse_attention(q, k, v, each, **case.options(device), backend=backend)
        loss = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()
        found.append((out, lse, *torch.autograd.grad(loss, (q, k, v))))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_reads_only_selected_blocks(backend: Backend, device: str) -> None:
    """A tile that the list does not fill loads nothing else, nor does one at the end of the
    keys.
    """
    q, k, v = random_qkv(1, 2, 1, 150, head_size=64, dtype=torch.float16, device=device)
    mask = torch.zeros(1, 2, 3, 10, dtype=torch.bool, device=device)
    mask[:, :, :, 1] = mask[:, 1, 2, [4, 9]] = True
    want = block_sparse_attention(q, k, v, mask, key_block_size=16, backend=backend)
    unread = torch.ones(160, dtype=torch.bool, device=device).view(10, 16)
    unread[[1, 4, 9]] = False
    for x in (k, v):
        x[:, :, unread.flatten()[:150]] = torch.nan
    shared.assert_same(
        block_sparse_attention(q, k, v, mask, key_block_size=16, backend=backend), want
    )
    mask[:, 1, 2, 9] = False
    k[:, :, 144:] = v[:, :, 144:] = torch.nan
    assert (
        block_sparse_attention(q, k, v, mask, key_block_size=16, backend=backend)
        .out.isfinite()
        .all()
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("block_size", "keys"), [(64, 16), (128, 32), (16, 64)])
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_full_product_of_sizes(
    dtype: torch.dtype, head_size: int, block_size: int, keys: int, poisoned: None
) -> None:
    lengths = [(1, 1), (63, 63), (65, 65), (111, 300), (1100, 1100)]
    limits = itertools.cycle([None, 5.0, None])
    for square in full_product(head_size, dtype, lengths, block_size):
        case = square._replace(key_block_size=keys)
        mask = random_mask(1, case.q_heads, case.blocks, 0.3, "cuda")
        check(BLOCK_SPARSE, case, mask, "triton", "cuda", softcap=next(limits))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_size", "block_size"),
    [*itertools.product([64, 80, 128], [16, 64, 128]), (256, 64), (512, 64)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_full_product(dtype: torch.dtype, head_size: int, block_size: int, poisoned: None) -> None:
    lengths = [(1, 1), (63, 63), (65, 65), (111, 300), (1100, 1100), (130, 65)]
    long = Case(1, 4, 1, 4095, 4095, head_size, dtype, block_size=block_size)
    limits = itertools.cycle([None, 5.0, None, 50.0, None])
    for case in (*full_product(head_size, dtype, lengths, block_size), long):
        check(
            BLOCK_SPARSE,
            case,
            random_mask(1, case.q_heads, case.blocks, 0.3, "cuda"),
            "triton",
            "cuda",
            softcap=next(limits),
        )


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("rows", "keys"), [(16, 16), (64, 16), (16, 32)])
def test_compacted_lists(rows: int, keys: int, heads: int, causal: bool, device: str) -> None:
    """Lists hold the visible blocks in order and count the full ones."""
    num_queries, num_keys = 70, 100
    row_blocks, col_blocks = -(-num_queries // rows), -(-num_keys // keys)
    mask = random_block_mask(1, heads, row_blocks, col_blocks, 0.5, device)
    sizes = mask, None, num_queries, num_keys, num_keys - num_queries, rows, keys, causal
    (of_rows, row_lengths), (of_columns, column_lengths) = (
        compact_rows(*sizes),
        compact_columns(*sizes, 2, 2),
    )

    def tiles(missing_keys: bool, missing_queries: bool) -> Tensor:
        seen = visible(1, num_queries, num_keys, causal, None, device)[0, 0]
        seen = torch.nn.functional.pad(seen, (0, col_blocks * keys - num_keys), value=missing_keys)
        seen = torch.nn.functional.pad(
            seen, (0, 0, 0, row_blocks * rows - num_queries), value=missing_queries
        )
        return (
            seen.unflatten(1, (col_blocks, keys))
            .unflatten(0, (row_blocks, rows))
            .transpose(1, 2)
            .flatten(2)
        )

    on = mask[0].repeat_interleave(4 // heads, 0) & tiles(False, False).any(2)
    for h, r in itertools.product(range(heads), range(row_blocks)):
        listed = on[h * 4 // heads, r].nonzero()[:, 0]
        plain, count = row_lengths[0, h, r].tolist()
        assert of_rows[0, h, r, :count].tolist() == listed.tolist()
        assert plain == tiles(False, True).all(2)[r, listed].sum()
    for h, c in itertools.product(range(2), range(col_blocks)):
        listed = on[2 * h : 2 * h + 2, :, c].mT.flatten().nonzero()[:, 0]
        plain, count = column_lengths[0, h, c].tolist()
        assert of_columns[0, h, c, :count].tolist() == listed.tolist()
        assert plain == tiles(True, True).all(2)[listed // 2, c].sum()


@pytest.mark.gpu
@pytest.mark.parametrize("long", ["queries", "keys"])
def test_offsets_beyond_32_bits(long: str) -> None:
    """The first and last block of 2**31 elements give the same results as alone."""
    num_queries, num_keys = (2**23 + 64, 128) if long == "queries" else (128, 2**23 + 64)
    q = torch.randn(1, 2, num_queries, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    k, v = (
        torch.randn(1, 2, num_keys, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for _ in range(2)
    )
    mask = torch.zeros(
        1, 1, -(-num_queries // 64), -(-num_keys // 64), dtype=torch.bool, device="cuda"
    )
    mask[:, :, :: mask.shape[2] - 1, :: mask.shape[3] - 1] = True
    out = block_sparse_attention(q, k, v, mask, causal=False).out
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout)

    def outer_blocks(x: Tensor) -> Tensor:
        return torch.cat([x[:, :, :64], x[:, :, -64:]], 2).detach()

    q, k, v = small = [outer_blocks(x).requires_grad_() for x in (q, k, v)]
    everything = torch.ones(1, 1, 2, 2, dtype=torch.bool, device="cuda")
    want = block_sparse_attention(q, k, v, everything, causal=False).out
    torch.testing.assert_close(outer_blocks(out), want.detach())
    for x, y in zip(gradients, torch.autograd.grad(want, small, outer_blocks(dout)), strict=True):
        torch.testing.assert_close(outer_blocks(x), y)
        assert not x[:, :, 64:-64].any()
