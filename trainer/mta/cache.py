"""A layer's cache that remembers the newest queries too: the convolution of a later token's scores reaches back to them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from msattn.trainer.errors import UserError

ROLLBACK = 32  # tokens that can be taken back; assisted decoding proposes some 20 at once, by default


class QueryWindowLayer(DynamicLayer):
    """Keys and values of all tokens, queries of the last ones.

    Parameters
    ----------
    reach : queries before a token's own that its attention needs.

    Attributes
    ----------
    query_window : Tensor [B, Hq, n, D] or None
        The last queries, after RoPE: ``reach`` and some to spare for :meth:`crop`; fewer while the sequence is shorter.
    """

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.query_window: Tensor | None = None

    def extend(self, q: Tensor) -> Tensor:
        """Remember the queries ``q [B, Hq, N, D]`` of the tokens that :meth:`update` is about to add.

        Returns
        -------
        Tensor [B, Hq, r + N, D] : with the r queries before them, ``reach`` or as many as there are.

        Raises
        ------
        UserError : more tokens were taken back than there are queries to spare.
        """
        if self.reach == 0:
            return q
        needed = min(self.reach, self.get_seq_length())
        held = q[:, :, :0] if self.query_window is None else self.query_window
        if held.shape[2] < needed:
            raise UserError(f"past_key_values: cropped by more than {ROLLBACK} tokens, the queries before them are gone")
        keep = self.reach + ROLLBACK
        self.query_window = torch.cat([held, q[:, :, -keep:]], dim=2)[:, :, -keep:]
        return torch.cat([held[:, :, held.shape[2] - needed :], q], dim=2) if needed else q

    def reset(self) -> None:
        """Forgets everything."""
        self.keys = self.values = self.query_window = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last tokens, by the sign convention of the installed transformers."""
        before = self.get_seq_length()
        super().crop(tokens_to_remove)
        if self.query_window is not None:
            kept = self.query_window.shape[2] - (before - self.get_seq_length())
            self.query_window = self.query_window[:, :, : max(kept, 0)]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row b becomes what row ``beam_idx[b]`` was."""
        super().reorder_cache(beam_idx)
        self._rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times."""
        super().batch_repeat_interleave(repeats)
        self._rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows ``indices``."""
        super().batch_select_indices(indices)
        self._rows(lambda x: x[indices, ...])

    def _rows(self, select: Callable[[Tensor], Tensor]) -> None:
        if self.query_window is not None:
            self.query_window = select(self.query_window)


def query_window_layer(cache: Cache, layer: int, reach: int) -> QueryWindowLayer:
    """The :class:`QueryWindowLayer` of ``layer``, put in the place of an empty layer that grows.

    Raises
    ------
    UserError : the layer holds tokens whose queries are unknown, or does not keep all tokens.
    """
    held: Any = cache.layers[layer] if layer < len(cache.layers) else DynamicLayer()
    if isinstance(held, QueryWindowLayer):
        return held
    if type(held) is not DynamicLayer:
        raise UserError(f"past_key_values: accepted is a cache that grows (DynamicCache), not a {type(held).__name__}")
    if held.get_seq_length():
        raise UserError(
            f"past_key_values: layer {layer} was filled by other attention, without queries; accepted is an empty DynamicCache"
        )
    cache.layers[layer : layer + 1] = [QueryWindowLayer(reach)]
    return cache.layers[layer]  # pyright: ignore[reportReturnType]
