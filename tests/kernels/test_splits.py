"""Tests of the split heuristics and of merging partial results."""

import math

import pytest
import torch

from msattn.kernels.common.splits import choose_splits, merge_splits, one_wave_splits


@pytest.mark.parametrize(
    ("blocks", "concurrent", "tiles", "extra", "splits"),
    [
        (8, 132, 256, 0, 16),
        (8, 132, 65, 0, 13),  # with 14 to 16 the longest split would have five tiles, too
        (40, 132, 64, 0, 3),  # one nearly full wave is better than several fuller ones
        (96, 132, 64, 0, 1),  # three quarters of the programs read nearly as fast as all of them
        (72, 132, 512, 0, 9),  # several waves, because one would leave half of the GPU free
        (1, 132, 65, 0, 65),
        (1000, 264, 1, 0, 1),
        (1, 1000, 9999, 0, 500),  # MAX_SPLITS is 512, and 500 give the same number of tiles
        # shorter splits that wait for the extra programs would take longer
        (8, 264, 64, 4, 32),  # 256 programs beside the 8 extra ones
        (16, 264, 64, 4, 13),  # 16 splits of four tiles would leave no room
        (64, 264, 64, 4, 3),
    ],
)
def test_splits_fill_the_gpu(
    blocks: int, concurrent: int, tiles: int, extra: int, splits: int
) -> None:
    """The choice balances waves, start and merge costs, and memory saturation."""
    assert choose_splits(blocks, concurrent, tiles, extra_tiles=extra) == splits


@pytest.mark.parametrize(
    ("blocks", "tiles", "limit", "splits"),
    [
        (8, 64, None, 33),
        (8, 20, None, 20),
        (1000, 64, None, 1),
        (1, 512, 128, 128),
        (8, 64, 128, 33),
    ],
)
def test_one_wave_splits_run_at_once(
    blocks: int, tiles: int, limit: int | None, splits: int
) -> None:
    assert one_wave_splits(blocks, 264, tiles, limit) == splits


@pytest.mark.parametrize(
    ("splits", "head_size", "rebase"),
    [(2, 8, True), (32, 256, False), (33, 80, True), (129, 256, True), (300, 80, False)],
)
def test_merge_agrees_with_fp64(splits: int, head_size: int, rebase: bool, device: str) -> None:
    """Some splits, and all splits of one row, have no visible key."""
    generator = torch.Generator().manual_seed(splits)
    part_max = torch.randn(3, splits, generator=generator) * 5
    part_sum = torch.rand(3, splits, generator=generator)
    part_out = torch.randn(3, splits, head_size, generator=generator)
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
