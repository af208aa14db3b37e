"""Sizes of buckets that are kept from pass to pass, against new counts, also in a CUDA graph."""

import pytest
import torch

from msattn.kernels.paged import paged_bucket_sizes
from msattn.trainer.serving.paged.kept_sizes import BucketSizes

PAGE, PAGES, HEADS, BUCKETS, LAYERS = 4, 8, 2, 5, [1, 3]


@pytest.mark.parametrize("forgotten", [False, True])
def test_rows_keep_their_sizes_while_their_sequences_go_on(where: str, forgotten: bool) -> None:
    """Rows change places, end, and get the pages of others that were as long."""
    random = torch.Generator().manual_seed(0)
    buckets = torch.randint(
        -1, BUCKETS, (3 * PAGES, PAGE, HEADS), dtype=torch.int16, generator=random
    ).to(where)
    table = torch.randperm(3 * PAGES, generator=random).view(3, PAGES).int().to(where)
    kv_len = torch.tensor([9, 16, 3], dtype=torch.int32, device=where)
    kept = BucketSizes(LAYERS, 4, HEADS, BUCKETS, PAGE, torch.device(where))
    counted = torch.zeros_like(kv_len)

    def step() -> None:
        counted.copy_(kept.begin(table, kv_len))
        for layer in LAYERS:
            kept.count(layer, buckets, table, kv_len, counted)

    step()
    if where == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        step, eager = graph.replay, step
        eager()
    kept.forget()
    new_keys = []
    for token in range(8):
        if token == 3:  # two sequences change places
            for x in (table, kv_len):
                x.copy_(x[[1, 0, 2]])
        if token == 5:  # another prompt, as long, in the pages of a sequence that has ended
            buckets[table[0].long()] = (
                torch.randint(0, BUCKETS, (PAGES, PAGE, HEADS), generator=random).short().to(where)
            )
            kept.forget()
        if token == 7 and forgotten:
            kept.forget()
        kv_len += 1
        step()
        new_keys.append((kv_len - counted).tolist())
        want = paged_bucket_sizes(buckets, table, kv_len, num_buckets=BUCKETS)
        assert all(torch.equal(kept._sizes[layer, :3], want) for layer in range(len(LAYERS)))
    lengths = kv_len.tolist()
    assert new_keys[1:3] == [[1, 1, 1]] * 2
    assert new_keys[3][:2] != [1, 1]
    assert new_keys[3][2] == new_keys[4][0] == 1
    assert new_keys[5] == [length - 2 for length in lengths]
    assert new_keys[7] == (lengths if forgotten else [1, 1, 1])
