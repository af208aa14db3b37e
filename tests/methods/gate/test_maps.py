"""Pictures of block maps: the layers and heads stored, their size, and the file written."""

import pytest
import torch

from msattn.trainer.methods.gate.maps import MAX_SIDE, BlockMaps, evenly_spaced
from msattn.trainer.training.pictures import save_maps


def visible(size: int) -> torch.Tensor:
    return torch.ones(1, 1, size, size, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("count", "shown"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (32, [0, 16, 31])]
)
def test_stored_layers_are_evenly_spaced(count, shown):
    assert evenly_spaced(count, 3) == shown


@pytest.mark.slow
def test_stored_maps_are_those_of_the_head_without_invisible_blocks(tmp_path):
    maps = BlockMaps(list(range(5)), num_heads=4)
    size = 6
    true = torch.rand(1, 4, size, size).tril()
    gate = torch.rand(1, 2, size, size).tril()  # one per query group
    read = torch.eye(size, dtype=torch.bool).expand(1, 1, -1, -1)
    for layer in range(5):
        maps.add(layer, visible(size), true + layer, gate, read)
    assert list(maps.maps) == [(layer, head) for layer in (0, 2, 4) for head in (0, 3)]
    kept = maps.maps[2, 3]
    unseen = torch.ones(size, size).triu(1).bool()
    for each, expected in zip(kept, (true[0, 3] + 2, gate[0, 1], read[0, 0].float()), strict=True):
        assert each[unseen].isnan().all()
        assert torch.equal(each[~unseen], expected[~unseen])
    picture = tmp_path / "maps" / "step.png"
    save_maps(picture, maps.maps, ("attention", "gate", "read"))
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_large_maps_are_max_pooled():
    maps, size = BlockMaps([0], num_heads=1), 2 * MAX_SIDE
    true = torch.zeros(1, 1, size, size)
    true[0, 0, size - 1, 7] = 0.5
    maps.add(0, visible(size), true, true, true > 0)
    shown, _, read = maps.maps[0, 0]
    assert shown.shape == (MAX_SIDE, MAX_SIDE)
    assert shown[-1, 3] == 0.5
    assert read.nansum() == 1
