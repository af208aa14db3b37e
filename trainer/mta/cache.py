"""A cache layer that also keeps the latest queries, which the convolution of later scores needs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from msattn.trainer.errors import UserError

# tokens that crop() can remove; assisted decoding proposes about 20 at a time by default
ROLLBACK = 32


class QueryWindowLayer(DynamicLayer):
    """Cache layer with the keys and values of all tokens and the queries of the latest ones.

    The attention of a token needs the queries of the ``reach`` tokens before it. ``query_window``,
    ``[B, Hq, n, D]`` or None, has the latest queries after RoPE: up to ``reach``, plus
    :data:`ROLLBACK` so that :meth:`crop` can remove tokens.
    """

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.query_window: Tensor | None = None

    def extend(self, q: Tensor) -> Tensor:
        """Adds the queries ``q [B, Hq, N, D]``; call it before :meth:`update` with the same tokens.

        Returns the r preceding queries, at most ``reach``, followed by ``q``:
        ``[B, Hq, r + N, D]``. Raises UserError if :meth:`crop` has removed more tokens than the
        kept queries allow.
        """
        if self.reach == 0:
            return q
        needed = min(self.reach, self.get_seq_length())
        earlier = q[:, :, :0] if self.query_window is None else self.query_window
        if earlier.shape[2] < needed:
            raise UserError(
                f"past_key_values: cropped by more than {ROLLBACK} tokens, earlier queries are "
                f"not kept"
            )
        keep = self.reach + ROLLBACK
        self.query_window = torch.cat([earlier, q[:, :, -keep:]], dim=2)[:, :, -keep:]
        return torch.cat([earlier[:, :, earlier.shape[2] - needed :], q], dim=2) if needed else q

    def reset(self) -> None:
        """Removes all tokens."""
        self.keys = self.values = self.query_window = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens; the sign convention is that of the installed transformers."""
        before = self.get_seq_length()
        super().crop(tokens_to_remove)
        if self.query_window is not None:
            kept = self.query_window.shape[2] - (before - self.get_seq_length())
            self.query_window = self.query_window[:, :, : max(kept, 0)]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replaces row b by row ``beam_idx[b]``."""
        super().reorder_cache(beam_idx)
        self._map_window(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row ``repeats`` times."""
        super().batch_repeat_interleave(repeats)
        self._map_window(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps only the rows ``indices``."""
        super().batch_select_indices(indices)
        self._map_window(lambda x: x[indices, ...])

    def _map_window(self, select: Callable[[Tensor], Tensor]) -> None:
        if self.query_window is not None:
            self.query_window = select(self.query_window)


def query_window_layer(cache: Cache, layer: int, reach: int) -> QueryWindowLayer:
    """Returns the :class:`QueryWindowLayer` of ``layer``, which replaces an empty ``DynamicLayer``.

    Raises UserError if the layer holds tokens whose queries are unknown, or has another type.
    """
    existing: Any = cache.layers[layer] if layer < len(cache.layers) else DynamicLayer()
    if isinstance(existing, QueryWindowLayer):
        return existing
    if type(existing) is not DynamicLayer:
        raise UserError(
            f"past_key_values: expected a growing cache (DynamicCache), not a "
            f"{type(existing).__name__}"
        )
    if existing.get_seq_length():
        raise UserError(
            f"past_key_values: layer {layer} was filled by another attention without queries; "
            f"expected an empty DynamicCache"
        )
    cache.layers[layer : layer + 1] = [QueryWindowLayer(reach)]
    return cache.layers[layer]  # pyrefly: ignore[bad-return]
