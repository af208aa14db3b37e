"""Buckets and scores of a routing without a cache, for queries at any positions of a text."""

from torch import Tensor

from msattn.trainer.methods.buckets import Router
from msattn.trainer.methods.key_blocks import BlockRouter, block_of_keys, count_blocks, only_far
from msattn.trainer.models.tap import LayerInputs


def buckets_of_keys(x: LayerInputs, router: Router | BlockRouter) -> tuple[Tensor, int]:
    """Returns the bucket of each key, int32 ``[1, Hkv, M]``, and the number of buckets; ``x`` holds one text."""
    if isinstance(router, BlockRouter):
        blocks = block_of_keys(0, x.num_keys, None, router.block_size, x.k.device)
        return blocks.expand(1, x.k.shape[1], -1).contiguous(), count_blocks(x.num_keys, router.block_size)
    return router.assign(x.layer, x.k_nope, x.k), router.num_buckets


def bucket_scores(
    x: LayerInputs, router: Router | BlockRouter, positions: Tensor, recent: int, *, by_head: bool = False
) -> Tensor:
    """Returns the bucket scores of the queries at ``positions [n]``: fp32 ``[n, Hkv, C]``, ``[n, Hq, C]`` with ``by_head``.

    ``recent`` is the number of last keys that a query always reads: of blocks, only those before are scored.
    """
    q, q_nope = (queries[0, :, positions].transpose(0, 1)[:, :, None] for queries in (x.q, x.q_nope))  # [n, Hq, 1, D]
    if isinstance(router, BlockRouter):
        score = router.head_scores if by_head else router.scores
        found = score(x.layer, router.summarize(x), q_nope, q, positions)
        return only_far(found, positions + 1 - recent, router.block_size)
    return (router.head_scores if by_head else router.scores)(x.layer, q_nope, q)
