"""Invalid arguments of the operations on a paged cache."""

from typing import Any

import pytest
import torch

from msattn.kernels.paged import paged_block_sparse_attention, paged_bucket_decode, paged_flash_decode
from msattn.kernels.types import PagedKeys, SparseAttention

INT = torch.int32
BLOCK_SPARSE_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(1, 2, 5, 64)}, "q.shape=\\(1, 2, 5, 64\\): expected packed queries"),
    ({"q": torch.zeros(0, 2, 64)}, "q.shape=\\(0, 2, 64\\)"),
    ({"q": torch.zeros(5, 2, 64, dtype=INT)}, "q.dtype=torch.int32"),
    ({"q": torch.zeros(5, 3, 64)}, "q has 3 heads"),
    ({"q": torch.zeros(5, 2, 12)}, "head size 12"),
    ({"k": torch.zeros(6, 16, 2, 80)}, "cache.k has shape \\(6, 16, 2, 80\\)"),
    ({"k": torch.zeros(6, 16, 64, 2).mT}, "cache.k has shape"),
    ({"k": torch.zeros(6, 16, 2, 64, dtype=torch.float16)}, "cache.k.dtype=torch.float16"),
    ({"v": torch.zeros(6, 32, 2, 64)}, "cache.v.shape"),
    ({"table": torch.zeros(2, 3)}, "cache.table is torch.float32"),
    ({"kv_len": torch.zeros(3, dtype=INT)}, "cache.kv_len is torch.int32 \\(3,\\)"),
    ({"cu_queries": torch.zeros(2, dtype=INT)}, "cu_queries is torch.int32 \\(2,\\): expected int32 \\(3,\\)"),
    ({"cu_queries": torch.zeros(3, dtype=torch.int64)}, "cu_queries is torch.int64"),
    ({"cu_queries": torch.zeros(3, dtype=INT, device="meta")}, "cu_queries.device=meta"),
    ({"block_mask": torch.zeros(2, 1, 1, 3)}, "block_mask is torch.float32"),
    ({"block_mask": torch.zeros(1, 1, 1, 3, dtype=torch.bool)}, "batch must be 2"),
    ({"block_mask": torch.zeros(2, 3, 1, 3, dtype=torch.bool)}, "heads must be 2 or 2 or 1"),
    ({"block_mask": torch.zeros(2, 1, 2, 3, dtype=torch.bool)}, "row blocks must be 1"),
    ({"block_mask": torch.zeros(2, 1, 1, 2, dtype=torch.bool)}, "column blocks must be 3"),
    ({"block_mask": torch.zeros(2, 1, 1, 3, dtype=torch.bool, device="meta")}, "block_mask.device=meta"),
    ({"max_queries": 0}, "max_queries=0"),
    ({"block_size": 48}, "block_size=48"),
    ({"scale": -1.0}, "scale=-1.0"),
    ({"softcap": 0.0}, "softcap=0.0"),
    ({"backend": "cuda"}, "backend='cuda'"),
    # values, which the torch backend reads
    ({"kv_len": torch.tensor([49, 2], dtype=INT)}, "cache.kv_len=\\[49, 2\\]"),
    ({"kv_len": torch.tensor([2, 9], dtype=INT)}, "a sequence has 2 keys, fewer than its 3 queries"),
    ({"table": torch.tensor([[0, 6, -1], [1, -1, -1]], dtype=INT)}, "cache.table\\[0\\]=\\[0, 6\\]"),
    ({"cu_queries": torch.tensor([0, 3, 2], dtype=INT)}, "cu_queries=\\[0, 3, 2\\]"),
    ({"cu_queries": torch.tensor([1, 3, 5], dtype=INT)}, "cu_queries=\\[1, 3, 5\\]"),
    ({"cu_queries": torch.tensor([0, 3, 6], dtype=INT)}, "cu_queries=\\[0, 3, 6\\]"),
    ({"max_queries": 2}, "max_queries=2: a sequence has 3 queries"),
]


@pytest.mark.parametrize(("change", "message"), BLOCK_SPARSE_REFUSED, ids=[message for _, message in BLOCK_SPARSE_REFUSED])
def test_block_sparse_attention_refuses(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(5, 2, 64),
        "k": torch.zeros(6, 16, 2, 64),
        "v": torch.zeros(6, 16, 2, 64),
        "table": torch.tensor([[0, 5, -1], [1, -1, -1]], dtype=INT),
        "kv_len": torch.tensor([30, 9], dtype=INT),
        "cu_queries": torch.tensor([0, 3, 5], dtype=INT),
        "block_mask": torch.zeros(2, 1, 1, 3, dtype=torch.bool),
        "max_queries": 3,
        "block_size": 16,
    }

    def call(**arguments: Any) -> SparseAttention:
        cache = PagedKeys(*(arguments.pop(name) for name in PagedKeys._fields))
        q, cu_queries, block_mask = (arguments.pop(name) for name in ("q", "cu_queries", "block_mask"))
        return paged_block_sparse_attention(q, cache, cu_queries, block_mask, **arguments)

    assert call(**arguments).out.shape == (5, 2, 64)
    with pytest.raises(ValueError, match=message):
        call(**arguments | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 2, 2, 64)}, "one query"),
        ({"q": torch.zeros(1, 3, 1, 64)}, "q has 3 heads"),
        ({"q": torch.zeros(2, 2, 1, 64)}, "cache.table.shape=\\(1, 2\\)"),
        ({"q": torch.zeros(1, 2, 1, 72)}, "cache.k has shape"),
        ({"k": torch.zeros(5, 16, 64, 2).mT}, "cache.k has shape .* strides"),
        ({"v": torch.zeros(5, 8, 2, 64)}, "cache.v.shape"),
        ({"v": torch.zeros(5, 16, 2, 64).half()}, "cache.v.dtype"),
        ({"table": torch.zeros(1, 2)}, "cache.table is torch.float32"),
        ({"table": torch.zeros(1, 0, dtype=INT)}, "cache.table is"),
        ({"kv_len": torch.zeros(2, dtype=INT)}, "cache.kv_len is"),
        ({"kv_len": torch.zeros(1, dtype=INT, device="meta")}, "cache.kv_len.device=meta"),
        ({"buckets": torch.zeros(5, 16, 2, dtype=INT)}, "buckets is torch.int32"),
        ({"buckets": torch.zeros(5, 16, 1).short()}, "buckets is torch.int16 \\(5, 16, 1\\)"),
        ({"probes": torch.zeros(1, 1, 4, dtype=INT)}, "probes is torch.int32"),
        ({"recent": -1}, "recent=-1"),
        ({"recent": torch.zeros(1)}, "recent is torch.float32"),
        ({"sink": -2}, "sink=-2"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"counts": torch.zeros(1, 2)}, "counts is torch.float32"),
        ({"backend": "cuda"}, "backend='cuda'"),
        # the values of tensors, by the reference alone
        ({"kv_len": torch.tensor([33], dtype=INT)}, "cache.kv_len=\\[33\\]: expected 0 to 32"),
        ({"kv_len": torch.tensor([-1], dtype=INT)}, "cache.kv_len=\\[-1\\]"),
        ({"table": torch.tensor([[0, 5]], dtype=INT)}, "cache.table\\[0\\]=\\[0, 5\\]: expected pages"),
        ({"table": torch.tensor([[-1, 3]], dtype=INT)}, "cache.table"),
    ],
)
def test_bucket_decode_refuses(change: dict, message: str) -> None:
    k, v = torch.zeros(2, 5, 16, 2, 64)
    tables: dict[str, Any] = {"table": torch.tensor([[2, 4]], dtype=INT), "kv_len": torch.tensor([20], dtype=INT)}
    arguments: dict[str, Any] = {"q": torch.zeros(1, 2, 1, 64), "k": k, "v": v, "recent": 3, **tables}
    arguments |= {"buckets": torch.zeros(5, 16, 2).short(), "probes": torch.zeros(1, 2, 4, dtype=INT), **change}
    cache = PagedKeys(*(arguments.pop(name) for name in PagedKeys._fields))
    q, buckets, probes = (arguments.pop(name) for name in ("q", "buckets", "probes"))
    with pytest.raises(ValueError, match=message):
        paged_bucket_decode(q, cache, buckets, probes, **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 2, 64)}, "q.shape"),
        ({"q": torch.zeros(1, 3, 1, 64)}, "q has 3 heads"),
        ({"q": torch.zeros(1, 2, 1, 64).half()}, "cache.k.dtype"),
        ({"scale": -1.0}, "scale=-1.0"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"backend": "cuda"}, "backend='cuda'"),
        ({"kv_len": torch.tensor([33], dtype=INT)}, "cache.kv_len=\\[33\\]: expected 0 to 32"),
    ],
)
def test_flash_decode_refuses(change: dict, message: str) -> None:
    k, v = torch.zeros(2, 5, 16, 2, 64)
    table, kv_len = torch.tensor([[2, 4]], dtype=INT), torch.tensor([20], dtype=INT)
    arguments: dict[str, Any] = {"q": torch.zeros(1, 2, 1, 64), "k": k, "v": v, "table": table, "kv_len": kv_len} | change
    cache = PagedKeys(*(arguments.pop(name) for name in PagedKeys._fields))
    with pytest.raises(ValueError, match=message):
        paged_flash_decode(arguments.pop("q"), cache, **arguments)
