"""Documents to chunks of tokens.

Documents are encoded in a fixed order, joined with the tokenizer's end-of-text token between them, cut into chunks of
``seq_len`` tokens and shuffled by the seed: chunk ``i`` is the same on every machine, in every process, after every resume.
"""

import hashlib
import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import Dataset

from msattn.trainer.config import DataConfig
from msattn.trainer.data.sources import Document, documents
from msattn.trainer.errors import UserError, print_once

_ENCODE_AT_ONCE = 64  # documents


class Chunks(Dataset[dict[str, Tensor]]):
    """Chunks of ``seq_len`` tokens; item ``i`` is ``{"input_ids": int64 [seq_len]}``.

    Attributes
    ----------
    fingerprint : hash of the tokens of all chunks in their order; manifests carry it.
    """

    def __init__(self, tokens: np.ndarray, tokenizer: Any) -> None:
        self._tokens = tokens  # [chunks, seq_len]
        self._tokenizer = tokenizer
        digest = hashlib.sha256(repr(tokens.shape).encode())
        digest.update(np.ascontiguousarray(tokens, dtype="<u4").tobytes())
        self.fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.from_numpy(self._tokens[index].astype(np.int64))}

    def num_bytes(self, index: int) -> int:
        """UTF-8 bytes of chunk ``index`` after its first token: what its next-token losses are spread over."""
        chunk = self._tokens[index].tolist()
        whole, first = self._tokenizer.batch_decode(
            [chunk, chunk[:1]], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return len(whole.encode()) - len(first.encode())


def chunks(
    cfg: DataConfig,
    tokenizer: Any,
    *,
    seed: int,
    heldout: bool = False,
    seq_len: int | None = None,
    num_chunks: int | None = None,
) -> Chunks:
    """Cut the documents of ``cfg`` into chunks, in an order drawn from ``seed``.

    Parameters
    ----------
    tokenizer : a Hugging Face tokenizer.
    seq_len, num_chunks : instead of those of ``cfg``; ``num_chunks`` takes that many of the shuffled chunks, or all where there
        are fewer, and says so. A ``hub`` source is read only as far as they need.

    Raises
    ------
    UserError : as :func:`documents`; fewer tokens than one chunk; a ``hub`` source without ``num_chunks``.
    """
    seq_len, num_chunks = seq_len or cfg.seq_len, num_chunks or cfg.num_chunks
    if cfg.source == "hub" and num_chunks is None:
        raise UserError("data.num_chunks=null: a streamed data set needs a number of chunks")
    needed = num_chunks * seq_len if cfg.source == "hub" and num_chunks else None
    tokens = encode(documents(cfg, heldout=heldout), tokenizer, at_least=needed)
    count = len(tokens) // seq_len
    what = "held-out documents" if heldout else "documents"
    hint = "; data.heldout_path names others" if heldout and cfg.source == "text" else ""
    where = f"data.path={cfg.path}" if cfg.path else f"data={cfg.source}"
    if heldout and cfg.heldout_path is not None:
        what, hint, where = "documents", "", f"data.heldout_path={cfg.heldout_path}"
    if count == 0:
        raise UserError(f"data.seq_len={seq_len}: the {what} of {where} hold only {len(tokens)} tokens{hint}")
    if num_chunks is not None and count < num_chunks:
        print_once(f"the {what} of {where} hold {count} chunks of {seq_len} tokens, not the {num_chunks} that were to be used")
    order = np.random.default_rng(seed).permutation(count)[:num_chunks]
    return Chunks(tokens[: count * seq_len].reshape(count, seq_len)[order], tokenizer)


def encode(found: Iterator[Document], tokenizer: Any, *, at_least: int | None = None) -> np.ndarray:
    """Tokens of the documents, int32 [n], each document followed by the end-of-text token.

    Stops once there are ``at_least`` tokens; shows on a terminal how far it is.
    """
    pieces: list[np.ndarray] = []
    total = 0
    console = Console(stderr=True)
    shown = console.is_terminal and os.environ.get("RANK", "0") == "0"
    with Progress(console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task("tokens of text", total=at_least)
        while batch := list(islice(found, _ENCODE_AT_ONCE)):
            encoded = tokenizer([document.text for document in batch], add_special_tokens=False, verbose=False)["input_ids"]
            pieces += [np.asarray([*ids, tokenizer.eos_token_id], np.int32) for ids in encoded]
            total += sum(len(ids) + 1 for ids in encoded)
            progress.update(task, completed=total)
            if at_least is not None and total >= at_least:
                break
    return np.concatenate(pieces) if pieces else np.empty(0, np.int32)
