"""Tokenizer and text of the teachers' training, and sequences of text and tasks."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from msattn.trainer.config import DataConfig
from msattn.trainer.data.chunking import encode, warn_of_epochs
from msattn.trainer.data.overlap import refuse_shared, shared_windows
from msattn.trainer.data.sources import Document, documents, local_documents
from msattn.trainer.data.tasks.sequences import TaskSequences, TokenIds, crop_from
from msattn.trainer.errors import UserError
from msattn.trainer.models import tokenizer as tokenizers
from msattn.trainer.recipes.teachers.plans import Plan, Stage
from msattn.trainer.storage.model_files import ModelFiles

SHARES = {"books": 0.65, "code": 0.2, "library": 0.15}  # shares of the text crops
STANDARD_LIBRARY = "code-python-stdlib"  # begins the names of files with modules of the library, also of held-out ones
DEV_SHARE = 0.02  # share of every book, at its end, that is held out for the metrics during training


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Loads the tokenizer of ``--tokenizer`` from files that are checked first."""
    tokenizer = tokenizers.load_tokenizer(ModelFiles(f"--tokenizer={folder}", folder))
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or None in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        raise UserError(f"--tokenizer={folder}: expected a fast tokenizer with a BOS and an EOS token")
    return tokenizer


def read_sources(folders: Sequence[str]) -> dict[str, list[Document]]:
    """Returns the documents of ``folders``, files ``code-*`` apart from books, and those of the standard library."""
    found = [document for folder in folders for document in local_documents("--text", folder)]
    books = [each for each in found if not each.name.startswith("code-")]
    if not books:
        raise UserError(f"--text={' '.join(folders)}: no book; files whose names begin with code- are not books")
    return {
        "books": books,
        "code": [each for each in found if each.name.startswith("code-") and not each.name.startswith(STANDARD_LIBRARY)],
        "library": list(documents(DataConfig("stdlib"), heldout=False)),
    }


def check_unseen(sources: Mapping[str, Sequence[Document]], heldout: Mapping[str, str]) -> None:
    """Raises UserError if much of the text of a folder of ``heldout``, by option, is in ``sources``; warns of some."""
    for option, path in heldout.items():
        counts = shared_windows(chain.from_iterable(sources.values()), local_documents(option, path))
        refuse_shared(*counts, f"{option}={path}", "the training text")


def check_lengths(tokens: Mapping[str, np.ndarray], plan: Plan) -> None:
    """Raises UserError if ``tokens``, named by option and text, are too few for the longest sequences of ``plan``."""
    needed = plan.stages[-1].seq_len + 1
    for text, ids in tokens.items():
        if len(ids) < needed:
            raise UserError(f"{text}: {len(ids):,} tokens; --plan {plan.name} needs at least {needed:,}")


class Texts:
    """Tokens of the training text, for each source in :data:`SHARES`, and as ``dev`` tokens from the ends of the books."""

    def __init__(self, sources: Mapping[str, Iterable[Document]], tokenizer: PreTrainedTokenizerFast) -> None:
        books = list(sources["books"])
        splits = [int(len(book.text) * (1 - DEV_SHARE)) for book in books]
        heads = (Document(book.name, book.text[:split]) for book, split in zip(books, splits, strict=True))
        tails = (Document(book.name, book.text[split:]) for book, split in zip(books, splits, strict=True))
        self.dev = encode(tails, tokenizer)
        encoded = {name: encode(iter(found), tokenizer) for name, found in {**sources, "books": heads}.items()}
        self.tokens = {name: tokens for name, tokens in encoded.items() if len(tokens)}
        shares = np.array([SHARES[name] for name in self.tokens])
        self._shares = shares / shares.sum()

    def warn_of_repeats(self, plan: Plan) -> None:
        """Prints a line for each source that ``plan`` reads too often: all sequences are crops of text, or tasks within one."""
        for share, (name, tokens) in zip(self._shares, self.tokens.items(), strict=True):
            warn_of_epochs(f"the {len(tokens):,} tokens of {name}", share * plan.tokens / len(tokens), "--steps")

    def by_name(self) -> dict[str, np.ndarray]:
        sources = {f"--text, {name}": tokens for name, tokens in self.tokens.items()}
        return {**sources, f"--text, the last {DEV_SHARE:.0%} of each book": self.dev}

    def crop(self, rng: np.random.Generator, length: int) -> TokenIds:
        return crop_from(self.tokens[str(rng.choice(list(self.tokens), p=self._shares))])(rng, length)


class StageDataset(Dataset[dict[str, Tensor]]):
    """Sequences ``input_ids`` int32 and ``weights`` fp32 ``[seq_len + 1]``; item ``i`` depends on (seed, stage, i) alone."""

    def __init__(self, texts: Texts, tasks: TaskSequences, stage: Stage, *, seed: tuple[int, int], bos: int) -> None:
        self.texts = texts
        self.tasks = tasks
        self.stage = stage
        self.seed = seed
        self.bos = bos

    def __len__(self) -> int:
        return self.stage.steps * self.stage.batch_size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rng = np.random.default_rng((*self.seed, index))
        length = self.stage.seq_len + 1
        names, shares = list(self.stage.shares), np.cumsum(list(self.stage.shares.values()))
        choice = int(np.searchsorted(shares, rng.random(), side="right"))
        if choice < len(names):
            ids, weights = self.tasks.make(names[choice], rng, length)
        else:
            ids, weights = self.texts.crop(rng, length), np.ones(length, np.float32)
        if rng.random() < 0.5:
            ids[0] = self.bos  # so that the model works with and without bos
        return {"input_ids": torch.from_numpy(ids.astype(np.int32)), "weights": torch.from_numpy(weights)}
