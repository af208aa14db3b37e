"""Buckets and scores of a routing without a cache, for queries at any positions of a text."""

from torch import Tensor

from msattn.trainer.methods.buckets import Router
from msattn.trainer.methods.pages import PageRouter, num_pages, only_far, page_of_keys
from msattn.trainer.models.tap import LayerInputs


def buckets_of_keys(x: LayerInputs, router: Router | PageRouter) -> tuple[Tensor, int]:
    """Returns the bucket of each key, int32 ``[1, Hkv, M]``, and the number of buckets; ``x`` holds one text."""
    if isinstance(router, PageRouter):
        pages = page_of_keys(0, x.num_keys, None, router.page_size, x.k.device)
        return pages.expand(1, x.k.shape[1], -1).contiguous(), num_pages(x.num_keys, router.page_size)
    return router.assign(x.layer, x.k_nope, x.k), router.num_buckets


def bucket_scores(
    x: LayerInputs, router: Router | PageRouter, positions: Tensor, recent: int, *, by_head: bool = False
) -> Tensor:
    """Returns the bucket scores of the queries at ``positions [n]``: fp32 ``[n, Hkv, C]``, ``[n, Hq, C]`` with ``by_head``.

    ``recent`` is the number of last keys that a query always reads: of pages, only those before are scored.
    """
    q, q_nope = (queries[0, :, positions].transpose(0, 1)[:, :, None] for queries in (x.q, x.q_nope))  # [n, Hq, 1, D]
    if isinstance(router, PageRouter):
        score = router.head_scores if by_head else router.scores
        found = score(x.layer, router.summarize(x), q_nope, q, positions)
        return only_far(found, positions + 1 - recent, router.page_size)
    return (router.head_scores if by_head else router.scores)(x.layer, q_nope, q)
