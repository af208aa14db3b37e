"""Keys that routers without training read for one token, by definition."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msattn.trainer.methods.untrained.routers.clusters import ITERATIONS

PAGE, SCALE = 16, 0.25


def capped_products(q: Tensor, k: Tensor, softcap: float | None) -> Tensor:
    """Returns the scores of queries ``[n, D]`` and keys ``[M, D]``, capped as those of Gemma 2."""
    scores = q @ k.mT * SCALE
    return scores if softcap is None else softcap * (scores / softcap).tanh()


def number_to_read(far: int, probes: int, buckets: int) -> int:
    """Returns the number of pages, keys or clusters out of ``far`` that stand for the probes."""
    return min(far, max(min(probes, 1), int(probes * far / buckets + 0.5)))


class Head(NamedTuple):
    """A key/value head of one sequence: ``keys [M, D]`` in the order of their positions, and the
    ``queries [n, D]`` of its group for the newest key; ``window`` keys are read anyway.
    """

    keys: Tensor
    queries: Tensor
    window: int
    probes: int
    num_buckets: int
    softcap: float | None = None
    router: Any = None

    @property
    def far(self) -> int:
        """The number of keys before the window."""
        return max(0, len(self.keys) - self.window)

    def count(self, far: int) -> int:
        return number_to_read(far, self.probes, self.num_buckets)

    def best_pages(self, scores: Tensor) -> Tensor:
        """Returns the keys of the pages with the best ``scores [far pages]``."""
        best = scores.argsort(descending=True)[: self.count(len(scores))]
        return torch.isin(torch.arange(len(self.keys)) // PAGE, best)


def window(head: Head) -> Tensor:
    return head.best_pages(torch.arange(-(-head.far // PAGE)))


def quest(head: Head) -> Tensor:
    pages = head.keys[:-1].split(PAGE)[: -(-head.far // PAGE)]  # without the newest key
    bounds = [
        torch.maximum(head.queries * page.amax(0), head.queries * page.amin(0)).sum()
        for page in pages
    ]
    return head.best_pages(torch.stack(bounds) if bounds else torch.zeros(0))


def random(head: Head) -> Tensor:
    """Keys are assigned one by one."""
    keys, queries = head.keys[None, None], head.queries[None, :, None]
    buckets = torch.cat([head.router.assign(0, key, key) for key in keys.split(1, dim=2)], dim=2)
    scores = head.router.head_scores(0, queries, queries)[0].sum(0)
    return torch.isin(buckets[0, 0], scores.argsort(descending=True)[: head.probes].int())


def lsh(head: Head) -> Tensor:
    prompt = (head.keys[:-1] - head.keys[:-1].mean(0)).float()  # without the newest key
    collides = head.router.codes(prompt) == head.router.codes(head.queries)[:, None]
    second = (collides.cumsum(-1) >= 2).sum(-1).amax(0)[: head.far]
    best = second.argsort(descending=True, stable=True)[: head.count(head.far)]
    return torch.isin(torch.arange(len(head.keys)), best[second[best] > 0])


def clusters(head: Head) -> Tensor:
    prompt = head.keys[: max(1, len(head.keys) - 1)]  # without the newest key
    means, nearest = prompt[::8], torch.zeros(0)
    for _ in range(ITERATIONS):
        nearest = torch.cdist(prompt, means).argmin(-1)
        members = [prompt[nearest == number] for number in range(len(means))]
        means = torch.stack(
            [part.mean(0) if len(part) else old for part, old in zip(members, means, strict=True)]
        )
    sizes = nearest.bincount(minlength=len(means))
    weights = capped_products(head.queries, means, head.softcap).exp()
    density = (weights / (weights * sizes).sum(-1, keepdim=True)).sum(0)
    best = density.masked_fill(sizes == 0, -1).argsort(descending=True)
    unassigned = torch.full((len(head.keys) - len(prompt),), -1)
    return torch.isin(torch.cat([nearest, unassigned]), best[: head.count(int((sizes > 0).sum()))])


def twilight(head: Head) -> Tensor:
    far = head.keys[: head.far]
    low, high = far.amin(1, keepdim=True), far.amax(1, keepdim=True)
    rounded = ((far - low) / (high - low) * 15).round() / 15 * (high - low) + low
    mass = capped_products(head.queries, rounded, head.softcap).softmax(-1).mean(0)
    best = mass.argsort(descending=True)[: head.count(head.far)]
    return torch.isin(torch.arange(len(head.keys)), best[mass[best].cumsum(0) - mass[best] < 0.95])


# the keys that a head reads outside the sink and the window, bool [M]
DEFINITIONS: dict[str, Callable[[Head], Tensor]] = {
    "window": window,
    "random": random,
    "quest": quest,
    "lsh": lsh,
    "clusters": clusters,
    "twilight": twilight,
}


def keys_of_a_token(name: str, head: Head, sink: int) -> Tensor:
    """Returns bool ``[M]``, with the sink and the window."""
    position = torch.arange(len(head.keys))
    return DEFINITIONS[name](head) | (position < sink) | (position >= head.far)
