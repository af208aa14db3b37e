"""Perplexity of whole documents from their beginning, by length, as in papers on long contexts (PG-19, Proof-pile)."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from msattn.trainer import data
from msattn.trainer.config import EvalRunConfig
from msattn.trainer.data.chunking import encode_texts
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.job import Job
from msattn.trainer.evaluate.methods import ComparedMethods
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.evaluate.task import TOKENS, Task
from msattn.trainer.evaluate.tasks.perplexity import COLUMNS, above_dense, compare
from msattn.trainer.models.loading import Loaded


def run(job: Job) -> list[EvalRow]:
    """Returns the rows of :func:`msattn.trainer.evaluate.tasks.perplexity.compare` at each length."""
    settings, tokenizer = job.cfg.eval.documents, job.loaded.tokenizer
    rows: list[EvalRow] = []
    for length in settings.lengths:
        texts = list(islice(beginnings(job.cfg, tokenizer, length), settings.num_documents))
        decoded = tokenizer.batch_decode([ids[1:].tolist() for ids in texts], skip_special_tokens=True)
        num_bytes = sum(len(text.encode()) for text in decoded)
        rows += compare(job, "documents", texts, num_bytes, settings.sparsities)
    return rows


def check_sizes(cfg: EvalRunConfig, loaded: Loaded, methods: ComparedMethods) -> None:
    """Raises UserError if no held-out document has as many tokens as a length."""
    for length in cfg.eval.documents.lengths:
        if next(beginnings(cfg, loaded.tokenizer, length), None) is None:
            raise UserError(f"eval.documents.lengths={length}: no held-out document has as many tokens")


def beginnings(cfg: EvalRunConfig, tokenizer: Any, length: int) -> Iterator[Tensor]:
    """Yields the first ``length`` tokens of each held-out document that has as many; BOS is the first if there is one."""
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for document in data.documents(cfg.data, heldout=True):
        if len(document.text) < length - len(first):  # a token has a character at least
            continue
        ids = [*first, *encode_texts(tokenizer, [document.text])[0]]
        if len(ids) >= length:
            yield torch.tensor(ids[:length])


TASK = Task(
    heading="Perplexity of documents from their beginning",
    unit="documents per row",
    columns=TOKENS | COLUMNS,
    reads=("blocks",),
    text="heldout",
    form="{:.3f}",
    quality=above_dense("perplexity of documents above dense"),
)
