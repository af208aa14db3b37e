"""Cases of the operations on a paged cache."""

import itertools

import torch

import msattn
from msattn.kernels.common.fp8 import FP8
from msattn.kernels.common.paged_checks import FP8_CAPABILITY
from msattn.kernels.paged import (
    block_sparse_attention,
    bucket_decode,
    bucket_sizes,
    flash_decode,
    read,
    write,
)
from msattn.kernels.testing import random_block_mask, random_pages, random_qkv, starts
from msattn.kernels.types import PagedKeys
from tests.kernels.cases.decoding import bucket_decode_arguments, counting
from tests.kernels.cases.records import (
    CAPS,
    HALF,
    INT,
    LONG,
    NAN,
    SHORT,
    SLOW,
    Arguments,
    Cases,
    Refused,
    block_size_for,
    choose,
    decoding,
    drawn,
    pages,
    slot,
    zeros,
)
from tests.kernels.problems import random_buckets

IN_FP8 = {name: zeros(12, 16, 2, 16).to(torch.float8_e4m3fn) for name in "kv"}


PAGED: Refused = [  # changes of the cache
    ({"k": zeros(10, 16, 2, 80)}, r"cache.k has shape \(10, 16, 2, 80\)"),
    ({"k": zeros(10, 16, 16, 2).mT}, "cache.k has shape .* strides"),
    ({"k": zeros(10, 16, 2, 16, dtype=HALF)}, "cache.k.dtype=torch.float16"),
    ({"v": zeros(12, 32, 2, 16)}, "cache.v.shape"),
    ({"v": zeros(10, 16, 2, 16).half()}, "cache.v.dtype"),
    ({"table": zeros(2, 3)}, "cache.table is torch.float32"),
    ({"table": zeros(2, 0, dtype=INT)}, "cache.table is"),
    ({"kv_len": zeros(3, dtype=INT)}, r"cache.kv_len is torch.int32 \(3,\)"),
    ({"kv_len": zeros(2, dtype=INT, device="meta")}, "cache.kv_len.device=meta"),
    # values, which the torch backend reads
    ({"kv_len": torch.tensor([81, 30], dtype=INT)}, r"cache.kv_len=\[81, 30\]: expected 0 to 80"),
    ({"kv_len": torch.tensor([-1, 30], dtype=INT)}, r"cache.kv_len=\[-1, 30\]|fewer than its 20"),
    (
        {"table": torch.tensor([[0, 12, 1, 2, 3], [0] * 5], dtype=INT)},
        r"cache.table\[0\]=\[0, 12, 1, 2, 3\]: expected pages",
    ),
    ({"table": torch.tensor([[-1, 3, 1, 2, 3], [0] * 5], dtype=INT)}, "cache.table"),
    ({"k": IN_FP8["k"]}, "cache.v.dtype=torch.float32: expected .* the same for cache.k and"),
    ({"v": IN_FP8["v"]}, "cache.v.dtype=torch.float8_e4m3fn"),
    ({name: x.to(torch.float8_e5m2) for name, x in IN_FP8.items()}, "dtype=torch.float8_e5m2"),
    ({"k_scale": torch.ones(1)}, "cache.k_scale: expected None for .* in torch.float32"),
    (IN_FP8 | {"k_scale": torch.ones(3)}, r"cache.k_scale is torch.float32 \(3,\): .* or \(2,\)"),
    (IN_FP8 | {"v_scale": torch.ones(2).half()}, "cache.v_scale is torch.float16"),
    (IN_FP8 | {"v_scale": zeros(1, device="meta")}, "cache.v_scale.device=meta"),
    (IN_FP8 | {"v_scale": zeros(1)}, r"cache.v_scale=\[0.0\]: expected positive"),
    (IN_FP8 | {"k_scale": torch.tensor([1.0, NAN])}, r"cache.k_scale=\[1.0, nan\]"),
]


def paged_block_sparse_attention_arguments(device: str) -> Arguments:
    """Of the first sequence 20 queries, of the second 3; a page is a block."""
    block_mask = torch.rand(2, 4, 2, 5, device=device) < 0.5
    block_mask[0, :2, :, 0] = False
    return {
        "q": torch.randn(23, 4, 16, device=device),
        "cache": pages(device)[0],
        "cu_queries": torch.tensor([0, 20, 23], dtype=torch.int32, device=device),
        "block_mask": block_mask,
        "max_queries": 20,
        "block_size": 16,
        "softcap": 5.0,
    }


def compile_paged_block_sparse_attention(dtype: torch.dtype, head_size: int, sm: int) -> None:
    q, k, v = random_qkv(1, 4, 2, 200, 200, head_size, dtype)
    block_size, page_size = block_size_for(head_size), choose([256, 64, 16], head_size, sm)
    cache, _ = random_pages(k, v, starts([200]), page_size)
    row_blocks, col_blocks = -(-200 // block_size), -(-cache.table.shape[1] * page_size // 16)
    mask, rows = (
        random_block_mask(1, 2, row_blocks, col_blocks, 0.5),
        torch.tensor([0, 200], dtype=torch.int32),
    )
    variants = zip((None, mask), (block_size, 16), CAPS, strict=True)
    caches = _with_fp8(cache, sm)
    for (block_mask, key_block_size, softcap), each in itertools.product(variants, caches):
        block_sparse_attention.launch(
            q[0].transpose(0, 1),
            *each,
            rows,
            block_mask,
            200,
            block_size,
            key_block_size,
            0.1,
            softcap,
        )


def paged_bucket_decode_arguments(device: str) -> Arguments:
    (cache, (slots,)), others = (
        pages(device, random_buckets(2, 2, 70, 10, device).short()),
        bucket_decode_arguments(device),
    )
    given = {name: others[name] for name in ("q", "probes", "recent", "softcap", "scale")}
    return given | {"cache": cache, "buckets": slots}


def compile_paged_bucket_decode(dtype: torch.dtype, head_size: int, sm: int) -> None:
    counts = torch.zeros(2, 2, dtype=torch.int64)
    variants = (256, starts([5, 9]), 30.0, None), (16, None, None, counts)
    page_size, recent_of, softcap, counts = choose(variants, head_size, sm)
    q, cache = _paged_cache(dtype, head_size, page_size)
    buckets, probes = (
        torch.zeros(40, page_size, 2, dtype=torch.int16),
        torch.zeros(2, 2, 5, dtype=torch.int32),
    )
    for each in _with_fp8(cache, sm):
        bucket_decode.launch(q, *each, buckets, probes, recent_of, 9, 1, 0.1, softcap, counts)


def paged_bucket_sizes_arguments(device: str) -> Arguments:
    cache, (slots,) = pages(device, random_buckets(2, 2, 70, 10, device).short())
    given = {"buckets": slots, "table": cache.table, "kv_len": cache.kv_len}
    return given | {"num_buckets": 10, "counted": starts([60, 0], device)}


def compile_paged_bucket_sizes(dtype: torch.dtype, head_size: int, sm: int) -> None:
    num_buckets, page_size = choose([(1024, 16), (100, 64), (2**15, 256)], head_size, sm)
    ids, table = (
        torch.zeros(40, page_size, 2, dtype=torch.int16),
        torch.zeros(2, 20, dtype=torch.int32),
    )
    kv_len = table[:, 0].contiguous()
    counted, sizes = (
        choose([None, kv_len, kv_len], head_size, sm),
        torch.zeros(2, 2, num_buckets, dtype=torch.int32),
    )
    bucket_sizes.launch(ids, table, kv_len, counted, sizes)


def paged_flash_decode_arguments(device: str) -> Arguments:
    given = decoding(device, queries=3, softcap=2.0)
    return {name: given[name] for name in ("q", "softcap", "scale")} | {"cache": pages(device)[0]}


def compile_paged_flash_decode(dtype: torch.dtype, head_size: int, sm: int) -> None:
    page_size, softcap = choose([(16, 30.0), (256, None)], head_size, sm)
    q, cache = _paged_cache(dtype, head_size, page_size)
    for each in _with_fp8(cache, sm):
        flash_decode.launch(q.expand(-1, -1, 3, -1), *each, 0.1, softcap)


def _paged_cache(dtype: torch.dtype, head_size: int, page_size: int):
    """Returns queries of two sequences, and the views of one layer in a buffer of two."""
    k, v = torch.zeros(2, 40, 2, page_size, 2, head_size, dtype=dtype)[:, :, 0]
    table, kv_len = torch.zeros(2, 20, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    return torch.zeros(2, 4, 1, head_size, dtype=dtype), PagedKeys(k, v, table, kv_len)


def _with_fp8(cache: PagedKeys, sm: int) -> list[PagedKeys]:
    """Returns a cache, and the same one in FP8 if the GPU can read it."""
    if sm < FP8_CAPABILITY:
        return [cache]
    scales = {"k_scale": torch.ones(2), "v_scale": torch.ones(1)}
    return [cache, cache._replace(k=cache.k.to(FP8), v=cache.v.to(FP8), **scales)]


def compile_write_pages(dtype: torch.dtype, head_size: int, sm: int) -> None:
    cache, buckets = (
        torch.zeros(9, 16, 2, head_size, dtype=dtype),
        torch.zeros(9, 16, 2, dtype=torch.int16),
    )
    for tokens in (1, 100):
        new, slots = (
            torch.zeros(2, tokens, head_size, dtype=dtype),
            torch.zeros(tokens, dtype=torch.int64),
        )
        write.launch(new, new, cache, cache, slots, slots, slots.int().expand(2, tokens), buckets)
        write.launch(new, new, cache, cache, slots, slots, None, None)
        if sm >= FP8_CAPABILITY:
            scale, held = torch.ones(2), cache.to(FP8)
            write.launch(new, new, held, held, slots, slots, None, None, scale, scale[0])
            write.launch_rounding(new, scale)


def compile_read_pages(dtype: torch.dtype, head_size: int, sm: int) -> None:
    stored, table = torch.zeros(9, 16, 2, head_size, dtype=dtype), zeros(9, dtype=INT)
    for tokens in (1, 100):
        out = torch.zeros(2, tokens, head_size, dtype=dtype)
        read.launch(stored, table, 5, out, None)
        if sm >= FP8_CAPABILITY:
            read.launch(stored.to(FP8), table, 5, out, torch.ones(2))


CASES = {
    "paged_block_sparse_attention": Cases(
        msattn.paged_block_sparse_attention,
        paged_block_sparse_attention_arguments,
        compile_paged_block_sparse_attention,
        [
            *PAGED,
            ({"q": zeros(1, 4, 23, 16)}, r"q.shape=\(1, 4, 23, 16\): expected packed queries"),
            ({"q": zeros(0, 4, 16)}, r"q.shape=\(0, 4, 16\)"),
            ({"q": zeros(23, 4, 16, dtype=INT)}, "q.dtype=torch.int32"),
            ({"q": zeros(23, 3, 16)}, "q has 3 heads"),
            ({"q": zeros(23, 4, 12)}, "head size 12"),
            (
                {"cu_queries": zeros(2, dtype=INT)},
                r"cu_queries is torch.int32 \(2,\): expected int32 \(3,\)",
            ),
            ({"cu_queries": zeros(3, dtype=LONG)}, "cu_queries is torch.int64"),
            ({"cu_queries": zeros(3, dtype=INT, device="meta")}, "cu_queries.device=meta"),
            ({"block_mask": zeros(2, 1, 2, 5)}, "block_mask is torch.float32"),
            ({"block_mask": zeros(1, 1, 2, 5, dtype=torch.bool)}, "batch must be 2"),
            ({"block_mask": zeros(2, 3, 2, 5, dtype=torch.bool)}, "heads must be 4 or 2 or 1"),
            ({"block_mask": zeros(2, 1, 3, 5, dtype=torch.bool)}, "row blocks must be 2"),
            ({"block_mask": zeros(2, 1, 2, 2, dtype=torch.bool)}, "column blocks must be 5"),
            (
                {"block_mask": zeros(2, 1, 2, 5, dtype=torch.bool, device="meta")},
                "block_mask.device=meta",
            ),
            ({"max_queries": 0}, "max_queries=0"),
            # values, which the torch backend reads
            (
                {"kv_len": torch.tensor([70, 2], dtype=INT)},
                "a sequence has 2 keys, fewer than its 3 queries",
            ),
            ({"cu_queries": torch.tensor([0, 20, 2], dtype=INT)}, r"cu_queries=\[0, 20, 2\]"),
            ({"cu_queries": torch.tensor([1, 20, 23], dtype=INT)}, r"cu_queries=\[1, 20, 23\]"),
            ({"cu_queries": torch.tensor([0, 20, 24], dtype=INT)}, r"cu_queries=\[0, 20, 24\]"),
            ({"max_queries": 19}, "max_queries=19: a sequence has 20 queries"),
        ],
        variants=lambda given: [{"block_mask": None}],
        read=slot(20),
        unread=slot(5),
        contiguous=("cache.k", "cache.v"),
        slow=SLOW,
    ),
    "paged_bucket_decode": Cases(
        msattn.paged_bucket_decode,
        paged_bucket_decode_arguments,
        compile_paged_bucket_decode,
        [
            *PAGED,
            ({"q": zeros(2, 4, 2, 16)}, "one query"),
            ({"q": zeros(2, 3, 1, 16)}, "q has 3 heads"),
            ({"q": zeros(1, 4, 1, 16)}, r"cache.table.shape=\(2, 5\)"),
            ({"q": zeros(2, 4, 1, 72)}, "cache.k has shape"),
            ({"buckets": zeros(12, 16, 2, dtype=INT)}, "buckets is torch.int32"),
            ({"buckets": zeros(12, 16, 1).short()}, r"buckets is torch.int16 \(12, 16, 1\)"),
            ({"probes": zeros(2, 1, 4, dtype=INT)}, "probes is torch.int32"),
            ({"recent": -1}, "recent=-1"),
            ({"recent": zeros(1)}, "recent is torch.float32"),
            ({"sink": -2}, "sink=-2"),
            ({"counts": zeros(2, 2)}, "counts is torch.float32"),
        ],
        variants=counting,
        read=slot(68),
        unread=slot(5),
        contiguous=("cache.k", "cache.v"),
        slow=SLOW,
    ),
    "paged_bucket_sizes": Cases(
        msattn.paged_bucket_sizes,
        paged_bucket_sizes_arguments,
        compile_paged_bucket_sizes,
        [
            ({"buckets": zeros(12, 16, 2, dtype=INT)}, "buckets is torch.int32"),
            ({"buckets": zeros(12, 16).short()}, r"buckets is torch.int16 \(12, 16\)"),
            ({"buckets": zeros(12, 0, 2).short()}, "each at least 1"),
            ({"table": zeros(2, 5)}, "table is torch.float32"),
            (
                {"table": zeros(2, 5, dtype=INT, device="meta")},
                "table.device=meta: expected buckets's device",
            ),
            ({"num_buckets": 0}, "num_buckets=0"),
            ({"num_buckets": 2**15 + 1}, "num_buckets=32769: expected 1 to 32,768"),
            ({"counted": zeros(3, dtype=INT)}, r"counted is torch.int32 \(3,\)"),
            ({"sizes": zeros(2, 2, 11, dtype=INT)}, r"sizes is torch.int32 \(2, 2, 11\)"),
            ({"sizes": zeros(2, 10, 2, dtype=INT).mT}, "contiguous"),
            ({"kv_len": starts([81, 30])}, r"kv_len=\[81, 30\]"),
            (
                {"table": torch.tensor([[0, 12, 1, 2, 3], [0] * 5], dtype=INT)},
                r"table\[0\]=\[0, 12, 1, 2, 3\]",
            ),
        ],
        read=None,
    ),
    "paged_flash_decode": Cases(
        msattn.paged_flash_decode,
        paged_flash_decode_arguments,
        compile_paged_flash_decode,
        [
            *PAGED,
            ({"q": zeros(2, 4, 16)}, "q.shape"),
            ({"q": zeros(2, 3, 1, 16)}, "q has 3 heads"),
        ],
        read=slot(20),
        contiguous=("cache.k", "cache.v"),
    ),
    "write_pages": Cases(
        write.write_pages,
        lambda device: (
            drawn(device, k=(2, 3, 16), v=(2, 3, 16), keys=(5, 8, 2, 16), values=(5, 8, 2, 16))
            | {
                "buckets": zeros(5, 8, 2, dtype=SHORT, device=device),
                "pages": torch.tensor([4, 0, 4], device=device),
                "offsets": torch.tensor([0, 7, 1], device=device),
                "ids": torch.arange(6, device=device).view(2, 3),
            }
        ),
        compile_write_pages,
        [
            ({"k": zeros(2, 3)}, r"k is torch.float32 \(2, 3\)"),
            ({"v": zeros(2, 4, 16)}, "v is"),
            ({"v": zeros(2, 3, 16).half()}, "v is torch.float16"),
            ({"keys": zeros(5, 8, 1, 16)}, "keys is"),
            ({"values": zeros(5, 9, 2, 16)}, "values is"),
            ({"values": zeros(5, 8, 2, 16).double()}, "values is torch.float64"),
            (
                {"values": zeros(5, 8, 2, 16).to(torch.float8_e4m3fn)},
                "values is torch.float8_e4m3fn",
            ),
            ({"v_scale": torch.ones(())}, "v_scale: expected None for keys and values in"),
            ({"pages": zeros(3).int()}, "pages is torch.int32"),
            ({"offsets": zeros(4, dtype=LONG)}, r"offsets is torch.int64 \(4,\)"),
            ({"ids": None}, "ids and buckets: expected both or neither"),
            ({"ids": zeros(2, 3)}, "ids is torch.float32"),
            ({"buckets": zeros(5, 8, 2, dtype=INT)}, "buckets is torch.int32"),
            ({"buckets": zeros(5, 8, 2, dtype=SHORT, device="meta")}, "buckets.device=meta"),
        ],
    ),
    "round_keys": Cases(
        write.round_keys,
        lambda device: drawn(device, k=(2, 3, 16)) | {"k_scale": torch.ones(2, device=device)},
        None,
        [
            ({"k": zeros(2, 3)}, r"k is torch.float32 \(2, 3\)"),
            ({"k": zeros(2, 3, 16, dtype=INT)}, "k is torch.int32"),
            ({"k_scale": torch.ones(3)}, r"k_scale is torch.float32 \(3,\): expected .* \(2,\)"),
        ],
        full_precision=("k_scale",),
    ),
    "read_pages": Cases(
        read.read_pages,
        lambda device: (
            drawn(device, stored=(5, 8, 2, 16))
            | {"table": torch.tensor([4, 0, 2], dtype=INT, device=device)}
            | {"first": 3, "end": 21}
        ),
        compile_read_pages,
        [
            ({"stored": zeros(8, 2, 16)}, r"stored.shape=\(8, 2, 16\)"),
            ({"stored": zeros(5, 8, 2, 16).to(FP8)}, "dtype=torch.float8_e4m3fn: expected"),
            ({"stored": zeros(5, 8, 2, 16, dtype=INT)}, "dtype=torch.int32: expected"),
            ({"dtype": HALF}, "dtype=torch.float16: expected that of the result"),
            ({"table": zeros(3, dtype=LONG)}, "table is torch.int64"),
            ({"end": 25}, "end=25: expected 0 <= first < end <= 24"),
            ({"first": 21}, "first=21, end=21"),
            ({"stored_scale": torch.ones(2)}, "stored_scale: expected None for stored"),
            (
                {
                    "stored": zeros(5, 8, 2, 16).to(FP8),
                    "dtype": HALF,
                    "stored_scale": torch.ones(3),
                },
                r"stored_scale is torch.float32 \(3,\)",
            ),
        ],
    ),
}
