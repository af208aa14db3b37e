"""Cases of the functions that partition keys, and of sums over partitions."""

import torch

import msattn
from msattn.kernels import merge_states, nearest_centroid
from msattn.kernels.bucket_mass import forward as bucket_mass
from msattn.kernels.testing import random_qkv
from tests.kernels.cases.records import (
    CAPS,
    INF,
    INT,
    Arguments,
    Cases,
    choose,
    drawn,
    token,
    zeros,
)
from tests.kernels.problems import random_buckets


def bucket_mass_arguments(device: str) -> Arguments:
    q, k, _ = random_qkv(1, 4, 2, 20, 70, 64, device=device)
    buckets = random_buckets(1, 2, 70, 10, device)
    buckets[0, 0, 30] = -1
    options = {"num_buckets": 10, "causal": True, "scale": 0.1, "softcap": 5.0, "min_distance": 3}
    return {"q": q, "k": k, "buckets": buckets, **options}


def compile_bucket_mass(dtype: torch.dtype, head_size: int, sm: int) -> None:
    prompt, token = (200, 200, 8, False, None), (1, 3000, 5, True, 3)
    num_queries, num_keys, num_buckets, causal, min_distance = choose(
        [prompt, token], head_size, sm
    )
    q, k, _ = random_qkv(1, 4, 2, num_queries, num_keys, head_size, dtype)
    buckets = torch.zeros(1, 2, num_keys, dtype=torch.int32)
    for softcap in CAPS:
        bucket_mass.launch(
            q, k, buckets, None, None, num_buckets, causal, 0.1, softcap, min_distance
        )


def merge_states_arguments(device: str) -> Arguments:
    """The first part has no key of one row."""
    given = drawn(device, outs=(3, 2, 1, 5, 16), lses=(3, 2, 1, 5))
    given["lses"][0, 0, 0, 1] = -INF
    return given


def compile_merge_states(dtype: torch.dtype, head_size: int, sm: int) -> None:
    merge_states.launch(torch.zeros(3, 1, 2, 5, head_size, dtype=dtype), torch.zeros(3, 1, 2, 5))


def compile_nearest_centroid(dtype: torch.dtype, head_size: int, sm: int) -> None:
    k, num_buckets = (
        torch.zeros(1, 2, 200, head_size, dtype=dtype),
        choose([256, 10], head_size, sm),
    )
    nearest_centroid.launch(k, torch.zeros(2, num_buckets, head_size))


def bucket_sums_arguments(device: str) -> Arguments:
    buckets = random_buckets(1, 2, 40, 7, device)
    return {"k": torch.randn(1, 2, 40, 64, device=device), "buckets": buckets, "num_buckets": 7}


def compile_bucket_sums(dtype: torch.dtype, head_size: int, sm: int) -> None:
    k, buckets = torch.zeros(1, 2, 200, head_size, dtype=dtype), zeros(1, 2, 200, dtype=INT)
    nearest_centroid.launch_sums(k, buckets, choose([256, 10], head_size, sm))


CASES = {
    "bucket_mass": Cases(
        msattn.bucket_mass,
        bucket_mass_arguments,
        compile_bucket_mass,
        [
            ({"num_buckets": 0}, "num_buckets=0"),
            ({"min_distance": -1}, "min_distance=-1"),
            ({"q": zeros(1, 3, 5, 64)}, "q has 3 heads"),
            ({"buckets": zeros(1, 2, 70)}, "buckets is torch.float32"),
            ({"buckets": zeros(1, 1, 70, dtype=INT)}, "buckets is torch.int32"),
            ({"buckets": torch.full((1, 2, 70), 10, dtype=INT)}, "buckets: 10 to 10"),
            ({"q_pos": zeros(6, dtype=INT)}, "q_pos is torch.int32"),
            ({"k_pos": zeros(70)}, "k_pos is torch.float32"),
        ],
        unread=token(30),
        slow=("strides",),
    ),
    "merge_states": Cases(
        msattn.merge_states,
        merge_states_arguments,
        compile_merge_states,
        [
            ({"lses": zeros(3, 2, 1, 4)}, "lses is"),
            ({"lses": zeros(3, 2, 1, 5, dtype=torch.float64)}, "lses is"),
            ({"outs": zeros(3, 2, 5, 16)}, "outs is"),
            ({"outs": zeros(0, 2, 1, 5, 16), "lses": zeros(0, 2, 1, 5)}, "outs is"),
        ],
        read=lambda given: given["lses"][0, 0, 0, 2],
        unread=lambda given: given["outs"][0, 0, 0, 1],
        full_precision=("lses",),
    ),
    "nearest_centroid": Cases(
        msattn.nearest_centroid,
        lambda device: drawn(device, k=(1, 2, 40, 64), centroids=(2, 7, 64)),
        compile_nearest_centroid,
        [
            ({"k": zeros(2, 40, 64)}, r"k.shape=\(2, 40, 64\): expected \[batch"),
            ({"k": zeros(1, 2, 40, 64).int()}, "k.dtype=torch.int32"),
            ({"k": zeros(1, 2, 40, 60)}, "head size 60: expected a multiple of 8"),
            (
                {"centroids": zeros(3, 7, 64)},
                r"centroids.shape=\(3, 7, 64\): expected \[2, C, 64\]",
            ),
            (
                {"centroids": zeros(2, 7, 64).half()},
                "centroids.dtype=torch.float16: expected torch.float32",
            ),
        ],
        full_precision=("centroids",),
    ),
    "bucket_sums": Cases(
        msattn.bucket_sums,
        bucket_sums_arguments,
        compile_bucket_sums,
        [
            ({"buckets": zeros(1, 2, 40)}, "buckets is torch.float32"),
            (
                {"buckets": zeros(1, 2, 41).int()},
                r"buckets is torch.int32 \(1, 2, 41\): expected int32 \(1, 2, 40\)",
            ),
            ({"num_buckets": 0}, "num_buckets=0"),
            ({"k": zeros(1, 2, 40, 520)}, "head size 520"),
        ],
        read=None,  # products of tiles spread NaN over the sums of all buckets
    ),
}
