"""splits: how many of them a decoding step takes, and what merges them."""

import math

import pytest
import torch

from msattn.kernels.common.splits import choose_splits, merge_splits


@pytest.mark.parametrize(
    ("blocks", "slots", "tiles", "splits"),
    [
        (8, 132, 256, 16),
        (8, 132, 65, 13),  # 14 to 16 would leave five tiles to the longest, too
        (40, 132, 64, 3),  # one wave nearly full, rather than several that are fuller
        (96, 132, 64, 1),  # three quarters of the slots read nearly as fast as all
        (72, 132, 512, 9),  # where one wave would leave half of the slots free, several
        (1, 132, 65, 65),
        (1000, 264, 1, 1),
        (1, 1000, 9999, 500),  # no more than 512
    ],
)
def test_splits_fill_the_gpu(blocks: int, slots: int, tiles: int, splits: int) -> None:
    """Few splits of few waves of programs that draw what the memory gives."""
    assert choose_splits(blocks, slots, tiles) == splits


@pytest.mark.parametrize(
    ("blocks", "splits"),
    [
        (8, 32),  # 256 programs, and the first 8
        (16, 13),  # 16 splits of four tiles would leave no room
        (64, 3),
    ],
)
def test_splits_leave_room_for_the_first(blocks: int, splits: int) -> None:
    """Splits that are shorter, but wait for what comes first, take longer."""
    assert choose_splits(blocks, 264, 64, first=4) == splits


@pytest.mark.parametrize("rebase", [True, False])
@pytest.mark.parametrize("head_size", [8, 80, 256])
@pytest.mark.parametrize("splits", [2, 32, 33, 129, 300])
def test_merging(splits: int, head_size: int, rebase: bool, device: str) -> None:
    """Against the definition in fp64; some splits, and all of one row, saw nothing."""
    generator = torch.Generator().manual_seed(splits)
    part_max = torch.randn(3, splits, generator=generator) * 5
    part_sum, part_out = torch.rand(3, splits, generator=generator), torch.randn(3, splits, head_size, generator=generator)
    if not rebase:
        part_max[:] = part_max[:, :1]
    empty = torch.rand(3, splits, generator=generator) < 0.3
    empty[0], empty[1, 0], empty[2, 0] = True, False, False
    part_max[empty], part_sum[empty], part_out[empty] = -math.inf, 0, 0

    total_max = part_max.double().amax(1, keepdim=True)
    weight = torch.exp2(part_max - total_max).nan_to_num(0)
    total = (weight * part_sum).sum(1)
    want = ((weight[..., None] * part_out).sum(1) / total[:, None]).nan_to_num(0)
    want_lse = (total_max[:, 0] + total.log2()) * math.log(2)

    out, lse = torch.empty(3, head_size, device=device), torch.empty(3, device=device)
    merge_splits(part_max.to(device), part_sum.to(device), part_out.to(device), out, lse, rebase)
    torch.testing.assert_close(out.cpu(), want.float())
    torch.testing.assert_close(lse.cpu(), want_lse.float())
