"""A dataset that mixes synthetic retrieval tasks, which natural text seldom contains, into chunks
of text.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from msattn.trainer.data.chunking import Chunks
from msattn.trainer.data.tasks.sequences import (
    MOST_WORDS,
    NAMES,
    TaskSequences,
    TokenIds,
    crop_from,
)
from msattn.trainer.errors import UserError


class RetrievalMixture(Dataset[dict[str, Tensor]]):
    """Chunks of text; a ``share`` of the items are tasks of :mod:`msattn.trainer.data.tasks`
    instead.

    Item ``i`` depends only on (seed, i). Its tensors are ``input_ids`` int64 ``[seq_len]`` and loss
    ``weights`` fp32 ``[seq_len]``: 1 in text, more in answers, 0 for tokens that cannot be
    predicted.
    """

    def __init__(
        self, chunks: Chunks, tokenizer: Any, *, share: float, length: int, seed: int
    ) -> None:
        self.chunks = chunks
        self.tasks = TaskSequences(tokenizer, self._crop)
        self.share = share
        self.length = length
        self.seed = seed
        if len(self.tasks.words) < MOST_WORDS:
            raise UserError(
                f"tasks={share}: needs a tokenizer whose tokens are words with the space before "
                f"them"
            )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rng = np.random.default_rng((self.seed, index))
        ids = self._tokens(index % len(self.chunks))
        weights = np.ones(len(ids), np.float32)
        if rng.random() < self.share:
            ids, weights = self.tasks.make(str(rng.choice(NAMES)), rng, len(ids))
        return {"input_ids": torch.from_numpy(ids), "weights": torch.from_numpy(weights)}

    def _tokens(self, index: int) -> TokenIds:
        return self.chunks[index]["input_ids"].numpy()

    def _crop(self, rng: np.random.Generator, length: int) -> TokenIds:
        return crop_from(self._tokens(int(rng.integers(len(self.chunks)))))(rng, length)
