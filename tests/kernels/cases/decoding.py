"""Cases of attention of new tokens, and of the choice of their buckets."""

import torch

import msattn
from msattn.kernels import bucket_decode, probe_buckets, probe_centroids
from msattn.kernels.common import dense_decode
from msattn.kernels.common.bucket_index import build_bucket_index
from msattn.kernels.flash_decode import score_mod
from msattn.kernels.multi_token import conv_decode
from msattn.kernels.testing import random_qkv, starts
from msattn.kernels.types import BucketIndex
from tests.kernels.cases.records import (
    CAPS,
    HALF,
    INT,
    LONG,
    NAN,
    SLOW,
    Arguments,
    Cases,
    choose,
    decoding,
    drawn,
    token,
    zeros,
)
from tests.kernels.problems import random_buckets


def compile_flash_decode(dtype: torch.dtype, head_size: int, sm: int) -> None:
    plain, biased = (
        ("partial", None, 1, False, 2),
        ("global", score_mod.alibi(torch.ones(4)), 64, False, 40),
    )
    capped, windowed = (
        ("partial", score_mod.softcap(30.0), 16, True, 1),
        ("global", score_mod.sliding_window(7), 32, True, 1),
    )
    for variant, mod, num_queries, causal, splits in choose(
        [(plain, biased), (capped, windowed)], head_size, sm
    ):
        q, k, v = random_qkv(2, 4, 2, num_queries, 5200, head_size, dtype)
        dense_decode.launch(
            q,
            k,
            v,
            mod,
            starts([8, 0]) if causal else None,
            starts([200, 7]),
            variant,
            causal,
            0.1,
            splits,
        )


def modified_scores(given: Arguments) -> list[Arguments]:
    alibi = score_mod.alibi(torch.rand(4, device=given["q"].device))
    return [
        {"score_mod": mod} for mod in (score_mod.softcap(2.0), score_mod.sliding_window(20), alibi)
    ]


def conv_decode_arguments(device: str) -> Arguments:
    return {
        "q_window" if name == "q" else name: x for name, x in decoding(device, queries=2).items()
    } | {
        "weight": torch.randn(4, 2, 3, device=device),
        "splits": 2,
    }


def compile_conv_decode(dtype: torch.dtype, head_size: int, sm: int) -> None:
    usual, least, widest = (1, (6, 11), "query"), (2, (1, 1), "query"), (4, (3, 32), "key")
    kv_heads, taps, mask = {64: least, 128: usual}.get(head_size, widest)
    q, k, v = random_qkv(2, 4, kv_heads, taps[0], 200, head_size, dtype)
    conv_decode.launch(
        q, k, v, torch.ones(4, *taps), starts([8, 0]), starts([200, 7]), 0.1, mask, None
    )


def bucket_decode_arguments(device: str) -> Arguments:
    """The first head reads its newest keys alone."""
    index = build_bucket_index(random_buckets(2, 2, 70, 10, device), 10)
    probes = torch.randint(-1, 10, (2, 2, 4), dtype=torch.int32).to(device)
    probes[0, 0] = -1
    recent = starts([5, 9], device)
    return decoding(device, index=index, probes=probes, recent=recent, softcap=5.0)


def counting(given: Arguments) -> list[Arguments]:
    return [{"recent": 6, "counts": given["q"].new_zeros(2, 2, dtype=LONG)}]


def compile_bucket_decode(dtype: torch.dtype, head_size: int, sm: int) -> None:
    q, k, v = random_qkv(2, 4, 2, 1, 200, head_size, dtype)
    offsets, order = build_bucket_index(random_buckets(2, 2, 200, 8), 8)
    counts = torch.zeros(2, 2, dtype=torch.int64)
    few, many = (
        (5, None, None, None, None),
        (100, starts([9, 3]), starts([8, 0]), starts([200, 7]), counts),
    )
    probes, recent, kv_start, kv_len, counts = choose([few, many], head_size, sm)
    chosen = torch.zeros(2, 2, probes, dtype=torch.int32)
    for softcap in CAPS:
        bucket_decode.launch(
            q,
            k,
            v,
            offsets,
            order,
            chosen,
            recent,
            16,
            1,
            0.1,
            softcap,
            kv_start,
            kv_len,
            False,
            counts,
        )


def probe_buckets_arguments(device: str) -> Arguments:
    q, *_ = random_qkv(1, 4, 2, 1, head_size=64, device=device)
    sizes = {"weight_in": (64, 32), "bias_in": (1, 32), "weight_out": (32, 20), "bias_out": (1, 20)}
    return {"q": q, "kv_heads": 2, "probes": 3} | {
        name: torch.randn(2, *size, device=device) for name, size in sizes.items()
    }


def compile_probe_buckets(dtype: torch.dtype, head_size: int, sm: int) -> None:
    classifiers, num_buckets = choose([(2, 1024), (4, 10)], head_size, sm)
    weight_in = torch.zeros(classifiers, head_size, 100, dtype=dtype)
    weight_out = torch.zeros(classifiers, 100, num_buckets, dtype=dtype)
    bias_in, bias_out = (
        torch.zeros(classifiers, 1, size, dtype=dtype) for size in (100, num_buckets)
    )
    given = (
        torch.zeros(2, 4, 1, head_size, dtype=dtype),
        weight_in,
        bias_in,
        weight_out,
        bias_out,
        2,
        5,
    )
    probe_buckets.launch(*given, None, None)
    probe_buckets.launch(*given, torch.zeros(2, 2, num_buckets, dtype=torch.int32), 1.5)


def compile_probe_centroids(dtype: torch.dtype, head_size: int, sm: int) -> None:
    for num_buckets, tokens, probes in ((1024, 1, 32), (10, 60, 1)):
        x = torch.zeros(2, 4, tokens, head_size, dtype=dtype)
        probe_centroids.launch(x, torch.zeros(2, num_buckets, head_size), probes)


CASES = {
    "flash_decode": Cases(
        msattn.flash_decode,
        lambda device: decoding(
            device, queries=2, kv_start=starts([3, 0], device), variant="global", causal=True
        ),
        compile_flash_decode,
        [
            ({"variant": "both"}, "variant='both'"),
            ({"kv_len": starts([71, 30])}, r"kv_len=\[71, 30\]"),
            ({"kv_start": starts([-1, 0])}, r"kv_start=\[-1, 0\]"),
            ({"score_mod": score_mod.alibi(zeros(3))}, "3 slopes"),
            (
                {"score_mod": score_mod.alibi(zeros(4, device="meta"))},
                r"score_mod.tensors\[0\].device=meta",
            ),
        ],
        variants=modified_scores,
        unread=token(40, sequence=1),
        slow=SLOW,
    ),
    "conv_decode": Cases(
        msattn.conv_decode,
        conv_decode_arguments,
        compile_conv_decode,
        [
            ({"weight": zeros(4, 3, 3)}, r"q_window.shape=\(2, 4, 2, 16\): expected 3 queries"),
            ({"weight": zeros(3, 2, 3)}, r"weight.shape=\(3, 2, 3\)"),
            ({"mask": "keys"}, "mask='keys'"),
            ({"kv_len": starts([71, 30])}, "kv_len=71"),
            ({"kv_start": starts([-1, 0])}, "kv_start=-1"),
        ],
        unread=token(40, sequence=1),
        slow=SLOW,
    ),
    "bucket_decode": Cases(
        msattn.bucket_decode,
        bucket_decode_arguments,
        compile_bucket_decode,
        [
            ({"recent": -1}, "recent=-1"),
            ({"recent": zeros(1)}, "recent is torch.float32"),
            ({"sink": -2}, "sink=-2"),
            ({"counts": zeros(2, 2)}, "counts is torch.float32"),
            ({"counts": zeros(2, 1, dtype=LONG)}, r"counts is torch.int64 \(2, 1\)"),
            ({"counts": zeros(2, 4, dtype=LONG)[:, ::2]}, "contiguous"),
            ({"counts": zeros(2, 2, dtype=LONG, device="meta")}, "counts.device=meta"),
            ({"q": zeros(2, 4, 2, 16)}, "one query"),
            ({"q": zeros(2, 3, 1, 16)}, "q has 3 heads"),
            ({"probes": zeros(2, 2, 4)}, "probes is torch.float32"),
            ({"probes": zeros(2, 1, 4, dtype=INT)}, "probes is torch.int32"),
            ({"index": BucketIndex(zeros(2, 2, 1).int(), zeros(2, 2, 9).int())}, "index.offsets"),
            ({"index": BucketIndex(zeros(2, 2, 3).int(), zeros(2, 2, 9))}, "index.order"),
            # values, which the torch backend reads
            ({"probes": torch.full((2, 2, 1), 10, dtype=INT)}, "probes: 10 to 10"),
            ({"probes": torch.full((2, 2, 1), -2, dtype=INT)}, "probes: -2"),
            ({"kv_len": starts([71, 30])}, r"kv_len=\[71, 30\]"),
            ({"kv_start": starts([-1, 0])}, r"kv_start=\[-1, 0\]"),
            ({"recent": starts([-1, 0])}, r"recent=\[-1, 0\]"),
            *(
                (
                    {
                        "index": BucketIndex(offsets.expand(2, 2, -1), zeros(2, 2, 70).int()),
                        "probes": zeros(2, 2, 1).int(),
                    },
                    "index.offsets",
                )
                for offsets in torch.tensor([[0, 71], [5, 2]], dtype=INT)
            ),
        ],
        variants=counting,
        read=token(68),
        unread=token(30),
    ),
    "probe_buckets": Cases(
        msattn.probe_buckets,
        probe_buckets_arguments,
        compile_probe_buckets,
        [
            ({"probes": 21}, "probes=21"),
            ({"kv_heads": 3}, "kv_heads=3"),
            ({"threshold": 0.5}, "threshold=0.5: expected a number with sizes"),
            ({"sizes": torch.ones(1, 2, 20, dtype=INT)}, "threshold=None"),
            ({"sizes": torch.ones(1, 2, 20), "threshold": 0.5}, "sizes is torch.float32"),
            (
                {"sizes": torch.ones(1, 2, 19, dtype=INT), "threshold": 0.5},
                r"sizes is torch.int32 \(1, 2, 19\)",
            ),
            ({"sizes": torch.ones(1, 2, 20, dtype=INT), "threshold": NAN}, "threshold=nan"),
            (
                {"sizes": torch.ones(1, 2, 20, dtype=INT, device="meta"), "threshold": 0.5},
                "sizes.device=meta",
            ),
            ({"bias_in": zeros(2, 1, 31)}, "bias_in is torch.float32"),
            ({"weight_out": zeros(2, 32, 20, dtype=HALF)}, "weight_out is torch.float16"),
        ],
        variants=lambda given: [
            {"sizes": given["q"].new_full((1, 2, 20), 7, dtype=INT), "threshold": 1.5}
        ],
        read=None,
    ),
    "probe_centroids": Cases(
        msattn.probe_centroids,
        lambda device: drawn(device, x=(2, 4, 3, 64), centroids=(2, 7, 64)) | {"probes": 3},
        compile_probe_centroids,
        [
            ({"probes": 8}, "probes=8: expected 0 to 7"),
            ({"x": zeros(4, 3, 64)}, r"x.shape=\(4, 3, 64\): expected \[batch"),
            ({"centroids": zeros(3, 7, 64)}, r"centroids.shape=\(3, 7, 64\): expected \[Hkv, C"),
            ({"centroids": zeros(2, 7, 32)}, r"centroids is torch.float32 \(2, 7, 32\)"),
            ({"centroids": zeros(2, 7, 64, dtype=HALF)}, "centroids is torch.float16"),
        ],
        read=lambda given: given["x"][1, 1, 2],
        full_precision=("centroids",),
    ),
}
