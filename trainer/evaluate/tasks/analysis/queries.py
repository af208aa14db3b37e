"""Decoding queries of a layer, in batches of bounded memory, with what each sees and reads
exactly.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from msattn.trainer.models.tap import LayerInputs

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # shares of the keys or blocks
# scores of a batch of queries; the largest of several temporary tensors holds int64 of as many
BATCH_SCORES = 2**23


class Window(NamedTuple):
    """Keys that every decoding query reads: the first ``sink`` and the last ``recent`` ones."""

    sink: int
    recent: int

    @property
    def size(self) -> int:
        return self.sink + self.recent


class Queries(NamedTuple):
    rows: slice  # among all queries of the chunk
    positions: Tensor  # int64 [n]
    logits: Tensor  # fp32 [group, n, M], scaled and capped scores of all keys
    visible: Tensor  # bool [n, M]
    far: Tensor  # bool [n, M], visible and outside the window
    sinks: Tensor | None = None  # fp32 [group], logits of attention sinks


def query_positions(length: int, window: Window, count: int) -> Tensor:
    """Returns up to ``count`` positions, evenly spaced over the second half of a chunk, each with a
    key outside the window.
    """
    first = max(window.size, length // 2)
    return torch.linspace(first, length - 1, min(count, length - first)).round().long()


def query_batches(
    x: LayerInputs, head: int, positions: Tensor, window: Window
) -> Iterator[Queries]:
    """Yields the queries at ``positions`` of the query heads of key/value head ``head``."""
    group, device = x.q.shape[1] // x.k.shape[1], x.q.device
    own = slice(head * group, (head + 1) * group)
    q = x.q[0, own].float()
    k = x.k[0, head].float()
    sinks = None if x.scoring.sinks is None else x.scoring.sinks[own].float()
    keys = torch.arange(x.num_keys, device=device)
    size = max(1, BATCH_SCORES // (group * x.num_keys))
    for number, batch in enumerate(positions.to(device).split(size)):
        rows, newest = slice(number * size, number * size + len(batch)), batch[:, None]
        visible = keys <= newest
        far = visible & (keys >= window.sink) & (keys <= newest - window.recent)
        yield Queries(rows, batch, x.capped(q[:, batch] @ k.T * x.scale), visible, far, sinks)


def counts_of(shares: tuple[float, ...], total: Tensor) -> Tensor:
    """Returns ``ceil(share * total)`` for int ``total [n]``: int64 ``[n, shares]``, at least 1."""
    of = torch.tensor(shares, dtype=torch.float64, device=total.device)
    return (of * total[:, None] - 1e-9).ceil().long().clamp(min=1)
