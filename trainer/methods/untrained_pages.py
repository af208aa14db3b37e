"""Base of the routers of pages that have no weights."""

from torch import Tensor

from msattn.trainer.methods.pages import PageRouter
from msattn.trainer.methods.untrained_router import UntrainedRouter

PAGE_SIZE = 16  # keys


class UntrainedPages(UntrainedRouter, PageRouter):
    """A router of pages of :data:`PAGE_SIZE` keys, whose number of buckets is only a unit.

    The number of pages grows with the sequence: a query with ``p`` probes visits ``p / num_buckets`` of the far pages, at least
    one, as it reads about this share of the far keys with other routers.
    """

    page_size = PAGE_SIZE

    def visited(self, far: Tensor, probes: Tensor) -> Tensor:
        """Returns the number of pages that are visited with ``probes``, of ``far`` pages."""
        rounded = (2 * probes * far + self.num_buckets) // (2 * self.num_buckets)
        return rounded.maximum(probes.clamp(max=1)).minimum(far)
