"""Buckets and scores of a routing without a cache, for queries at any positions of a text."""

from torch import Tensor

from msattn.trainer.evaluate.methods import BucketRoutingMethod
from msattn.trainer.models.tap import LayerInputs
from msattn.trainer.saap.pages import PageRouter, num_pages, only_far, page_of_keys


def buckets_of_keys(x: LayerInputs, method: BucketRoutingMethod) -> tuple[Tensor, int]:
    """Returns the bucket of each key, int32 ``[1, Hkv, M]``, and the number of buckets; ``x`` holds one text."""
    if isinstance(method.router, PageRouter):
        pages = page_of_keys(0, x.num_keys, None, x.k.device)
        return pages.expand(1, x.k.shape[1], -1).contiguous(), num_pages(x.num_keys)
    return method.router.assign(x.layer, x.k_nope, x.k), method.router.num_buckets


def bucket_scores(x: LayerInputs, method: BucketRoutingMethod, positions: Tensor, *, by_head: bool = False) -> Tensor:
    """Returns the bucket scores of the queries at ``positions [n]``: fp32 ``[n, Hkv, C]``, ``[n, Hq, C]`` with ``by_head``."""
    q, q_nope = (queries[0, :, positions].transpose(0, 1)[:, :, None] for queries in (x.q, x.q_nope))  # [n, Hq, 1, D]
    router = method.router
    if isinstance(router, PageRouter):
        score = router.head_scores if by_head else router.scores
        return only_far(score(router.summarize(x.k, None), q), positions + 1 - method.recent)
    return (router.head_scores if by_head else router.scores)(x.layer, q_nope, q)
