"""A dataset that mixes synthetic retrieval tasks, which natural text seldom contains, into chunks of text."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from msattn.trainer.data.chunking import Chunks
from msattn.trainer.data.retrieval import ANSWER_WEIGHT, TASKS, PhraseEncoder, Tokens
from msattn.trainer.errors import UserError


class RetrievalMixture(Dataset[dict[str, Tensor]]):
    """Chunks of text, of which a share is replaced by needles, key-value lists and copied passages.

    Item ``i`` depends on (seed, i) alone. Its tensors are ``input_ids`` int64 ``[seq_len]`` and loss ``weights`` fp32
    ``[seq_len]``: 1 in text, more in answers, 0 for tokens that cannot be predicted.

    Parameters
    ----------
    chunks : source of the text, also of the text around the tasks.
    share : probability that an item is a task, in [0, 1].
    length : number of items.

    Raises
    ------
    UserError : the tokenizer is not byte-level.
    """

    def __init__(self, chunks: Chunks, tokenizer: Any, *, share: float, length: int, seed: int) -> None:
        self.chunks = chunks
        self.phrases = PhraseEncoder(tokenizer)
        self.share = share
        self.length = length
        self.seed = seed
        if not len(self.phrases.vocabulary_words):
            raise UserError(f"tasks={share}: needs a byte-level tokenizer, such as that of Llama 3, Qwen or the embedded model")

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rng = np.random.default_rng((self.seed, index))
        ids = self._tokens(index % len(self.chunks))
        weights = np.ones(len(ids), np.float32)
        if rng.random() < self.share:
            ids, weights = TASKS[str(rng.choice(list(TASKS)))](rng, len(ids), self._crop, self.phrases, ANSWER_WEIGHT)
        return {"input_ids": torch.from_numpy(ids), "weights": torch.from_numpy(weights)}

    def _tokens(self, index: int) -> Tokens:
        return self.chunks[index]["input_ids"].numpy()

    def _crop(self, rng: np.random.Generator, length: int) -> Tokens:
        chunk = self._tokens(int(rng.integers(len(self.chunks))))
        start = int(rng.integers(len(chunk) - length + 1))
        return chunk[start : start + length]
