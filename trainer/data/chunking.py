"""Encoding of documents into chunks of tokens.

Documents are encoded in a fixed order, joined by the tokenizer's end-of-text token, cut into chunks
of ``seq_len`` tokens and shuffled by the seed. Chunk ``i`` is the same on every machine, on every
rank and after every resume. Tokens are kept on disk (:mod:`msattn.trainer.data.cache`), so that a
text is encoded once.
"""

import hashlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.utils.data import Dataset

from msattn.trainer.config import DataConfig, text_files
from msattn.trainer.data.cache import cached
from msattn.trainer.data.overlap import check_heldout
from msattn.trainer.data.sources import Document, batched, documents, source_identity
from msattn.trainer.errors import UserError, first_line, print_once
from msattn.trainer.progress import Progress
from msattn.trainer.storage.hashes import file_hash

MOST_EPOCHS = 3  # training warns of more passes over a text
# A batch of documents that are encoded at once is complete from these sizes on: encoding takes much
# memory, here about 600 MiB.
_BATCH_SIZE, _BATCH_CHARACTERS = 64, 2**23


class Chunks(Dataset[dict[str, Tensor]]):
    """Chunks of tokens; item ``i`` is ``{"input_ids": int64 [seq_len]}``."""

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

    def split_off(self, number: int) -> tuple["Chunks", "Chunks"]:
        """Splits off the last ``number`` chunks, at most a tenth of all; returns the others and
        these. With fewer than ten chunks, both parts are all chunks.
        """
        end = len(self) - min(number, len(self) // 10)
        if end == len(self):
            return self, self
        return Chunks(self._tokens[:end], self._tokenizer), Chunks(
            self._tokens[end:], self._tokenizer
        )

    def num_bytes(self, index: int) -> int:
        """Returns the UTF-8 bytes of a chunk after its first token, for bits per byte."""
        chunk = self._tokens[index].tolist()
        text, first = self._tokenizer.batch_decode(
            [chunk, chunk[:1]], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return len(text.encode()) - len(first.encode())


def chunks(
    cfg: DataConfig,
    tokenizer: Any,
    *,
    seed: int,
    heldout: bool = False,
    seq_len: int | None = None,
    num_chunks: int | None = None,
) -> Chunks:
    """Cuts documents of ``cfg`` into chunks, in an order drawn from ``seed``.

    ``seq_len`` and ``num_chunks`` override those of ``cfg``. With ``num_chunks`` only that many of
    the shuffled chunks are used; if there are fewer, all are used and a message is printed. A
    ``hub`` source is read only as far as needed. Raises UserError like :func:`documents`, and for
    too few tokens, a ``hub`` source without ``num_chunks``, or a missing BOS token.
    """
    seq_len, num_chunks = seq_len or cfg.seq_len, num_chunks or cfg.num_chunks
    if cfg.source == "hub" and num_chunks is None:
        raise UserError("data.num_chunks=null: a streamed dataset needs a number of chunks")
    if cfg.bos and tokenizer.bos_token_id is None:
        raise UserError("data.bos=true: the tokenizer has no BOS token")
    needed = num_chunks * seq_len if cfg.source == "hub" and num_chunks else None
    name = _source_name(cfg, heldout)
    tokens = cached(
        cfg.cache,
        f"tokens of the {name}",
        lambda: _identity(cfg, tokenizer, heldout, needed),
        lambda: encode(documents(cfg, heldout=heldout), tokenizer, at_least=needed, bos=cfg.bos),
    )
    count = len(tokens) // seq_len
    if count == 0:
        hint = (
            "; data.heldout_path names others"
            if heldout and cfg.source == "text" and cfg.heldout_path is None
            else ""
        )
        raise UserError(f"data.seq_len={seq_len}: the {name} hold only {len(tokens)} tokens{hint}")
    if num_chunks is not None and count < num_chunks:
        print_once(
            f"the {name} hold {count} chunks of {seq_len} tokens, fewer than the {num_chunks} "
            f"asked for"
        )
    order = np.random.default_rng(seed).permutation(count)[:num_chunks]
    return Chunks(tokens[: count * seq_len].reshape(count, seq_len)[order], tokenizer)


def training_chunks(
    cfg: DataConfig, tokenizer: Any, *, seed: int, num_heldout: int, num_chunks: int | None = None
) -> tuple[Chunks, Chunks]:
    """Returns training chunks, and ``num_heldout`` held-out chunks of other text."""
    check_heldout(cfg)
    train = chunks(cfg, tokenizer, seed=seed, num_chunks=num_chunks)
    return train, chunks(cfg, tokenizer, seed=seed, heldout=True, num_chunks=num_heldout)


def warn_of_repeats(cfg: DataConfig, train: Chunks, items: float) -> None:
    """Prints a line if ``items`` chunks are more than :data:`MOST_EPOCHS` passes."""
    if (epochs := items / len(train)) > MOST_EPOCHS:
        text = f"the {len(train)} chunks of the {_source_name(cfg, False)}"
        advice = f"beyond {MOST_EPOCHS} times, more text or fewer train.steps are better"
        print_once(f"warning: training reads {text} {epochs:.1f} times; {advice}")


def _identity(cfg: DataConfig, tokenizer: Any, heldout: bool, at_least: int | None) -> Any | None:
    """Returns everything that the tokens depend on, or None for a tokenizer in Python, whose rules
    are not known.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    source = source_identity(cfg, heldout=heldout)
    if backend is None or source is None:
        return None
    code = [file for file in sorted(Path(__file__).parent.rglob("*.py")) if file.name != "cache.py"]
    return {
        "source": source,
        "tokenizer": [
            type(tokenizer).__qualname__,
            hashlib.sha256(backend.to_str().encode()).hexdigest(),
        ],
        "eos": tokenizer.eos_token_id,
        "bos": tokenizer.bos_token_id if cfg.bos else None,
        "at_least": at_least,
        "code": [file_hash(file) for file in (*code, Path(text_files.__file__))],
        "versions": [importlib.metadata.version(name) for name in ("tokenizers", "transformers")],
    }


def _source_name(cfg: DataConfig, heldout: bool) -> str:
    """Returns a phrase for messages that names the training or held-out documents and the setting
    they come from.
    """
    if heldout and cfg.heldout_path is not None:
        return f"documents of data.heldout_path={cfg.heldout_path}"
    setting = f"data.path={cfg.path}" if cfg.path else f"data={cfg.source or 'stdlib'}"
    return f"held-out documents of {setting}" if heldout else f"documents of {setting}"


def encode(
    source: Iterator[Document], tokenizer: Any, *, at_least: int | None = None, bos: bool = False
) -> np.ndarray:
    """Returns the tokens of documents, int32 [n], each with an end-of-text token.

    With ``bos`` each document begins with the BOS token. Pretraining packs documents like this, so
    chunks that begin inside a document have none. Stops after the batch that reaches ``at_least``
    tokens. Rank 0 shows the progress. Raises UserError like :func:`end_of_text`.
    """
    end = end_of_text(tokenizer, "data")
    pieces: list[np.ndarray] = []
    texts = batched(
        (document.text for document in source), len, most=_BATCH_SIZE, size=_BATCH_CHARACTERS
    )
    first = [tokenizer.bos_token_id] if bos else []
    total = 0
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("tokens of text", total=at_least)
        for batch in texts:
            encoded = encode_texts(tokenizer, batch)
            pieces += [np.asarray([*first, *ids, end], np.int32) for ids in encoded]
            total += sum(len(first) + len(ids) + 1 for ids in encoded)
            progress.update(task, completed=total)
            if at_least is not None and total >= at_least:
                break
    return np.concatenate(pieces) if pieces else np.empty(0, np.int32)


def end_of_text(tokenizer: Any, where: str) -> int:
    """Returns the token that ends a text; raises UserError if neither the tokenizer nor its model's
    files name one.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{where}: the model has no end-of-text token; set eos_token_id in its config.json"
        )
    return tokenizer.eos_token_id


def encode_texts(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Returns the tokens of each text, without special tokens."""
    try:
        return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        # Panics in Rust libraries do not derive from Exception.
        raise UserError(
            f"the model's tokenizer cannot encode the text ({first_line(error)})"
        ) from error
