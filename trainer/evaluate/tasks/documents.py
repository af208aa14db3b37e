"""Perplexity of whole documents from their beginning, by length, as in papers on long contexts
(PG-19, Proof-pile).
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from msattn.trainer import data
from msattn.trainer.config import EvalRunConfig
from msattn.trainer.data.chunking import encode_texts
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.compared import Compared
from msattn.trainer.evaluate.job import Job
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.evaluate.task import TOKENS, Task
from msattn.trainer.evaluate.tasks.perplexity import COLUMNS, above_dense, compare
from msattn.trainer.models.loading import Described, Loaded


def run(job: Job) -> list[EvalRow]:
    """Returns the rows of :func:`msattn.trainer.evaluate.tasks.perplexity.compare` at each length,
    of the same documents.
    """
    settings, tokenizer = job.cfg.eval.documents, job.loaded.tokenizer
    documents = list(islice(beginnings(job.cfg, tokenizer), settings.num_documents))
    rows: list[EvalRow] = []
    for length in settings.lengths:
        texts = [ids[:length] for ids in documents]
        decoded = tokenizer.batch_decode(
            [ids[1:].tolist() for ids in texts], skip_special_tokens=True
        )
        num_bytes = sum(len(text.encode()) for text in decoded)
        rows += compare(job, "documents", texts, num_bytes, settings.sparsities)
    return rows


def check_sizes(cfg: EvalRunConfig, model: Described | Loaded, methods: Compared) -> None:
    """Raises UserError if no held-out document is long enough."""
    if next(beginnings(cfg, model.tokenizer), None) is None:
        settings = cfg.eval.documents
        name = "lengths" if settings.min_tokens is None else "min_tokens"
        raise UserError(
            f"eval.documents.{name}={settings.least_tokens}: no held-out document has as many "
            f"tokens"
        )


def beginnings(cfg: EvalRunConfig, tokenizer: Any) -> Iterator[Tensor]:
    """Yields the first tokens, as many as the longest length, of each held-out document that is
    long enough.

    BOS is the first of them if there is one.
    """
    settings = cfg.eval.documents
    least = settings.least_tokens
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for document in data.documents(cfg.data, heldout=True):
        if len(document.text) < least - len(first):  # a token has a character at least
            continue
        ids = [*first, *encode_texts(tokenizer, [document.text])[0]]
        if len(ids) >= least:
            yield torch.tensor(ids[: max(settings.lengths)])


TASK = Task(
    heading="Perplexity of documents from their beginning",
    unit="documents per row",
    columns=TOKENS | COLUMNS,
    reads=("blocks",),
    text="heldout",
    form="{:.3f}",
    quality=above_dense("perplexity of documents above dense"),
)
