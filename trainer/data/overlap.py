"""Finds text that training and held-out documents share, by hashes of windows of characters."""

from collections.abc import Iterable, Iterator

import numpy as np

from msattn.trainer.config import DataConfig
from msattn.trainer.data.cache import cached
from msattn.trainer.data.sources import Document, batched, plain_documents, source_identity
from msattn.trainer.errors import UserError, print_once

WINDOW = 200  # characters, after normalization
# one in this many windows is compared; its hash decides, so both texts sample the same windows
SAMPLED = 16
# share of the held-out windows; less may be licenses and headings that many documents have
REFUSED_SHARE = 0.01
# characters compared of a streamed dataset: takes seconds, and is most of what a training run reads
STREAMED = 2**26
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_INVERSE = pow(_BASE, -1, 2**64)
_PIECE = 2**22  # characters hashed at once


def check_heldout(cfg: DataConfig) -> None:
    """Raises UserError if much of the held-out text that ``cfg`` names is training text; warns if
    some of it is.

    Without ``heldout_path`` and ``heldout_split`` documents are split by their names, and nothing
    is read here.
    """
    for key in ("heldout_path", "heldout_split"):
        if getattr(cfg, key) is not None:
            check_apart(cfg, cfg, f"data.{key}={getattr(cfg, key)}")


def check_apart(train: DataConfig, heldout: DataConfig, named: str) -> None:
    """Raises UserError if much of the held-out text of ``heldout`` is training text of ``train``;
    warns if some of it is.

    Letter case and white space are ignored. Of a streamed dataset, the first :data:`STREAMED`
    characters are compared. The outcome is kept in ``train.cache``. ``named`` is the setting that
    names the held-out text, for messages.
    """

    def identity() -> list[object] | None:
        sources = [source_identity(train, heldout=False), source_identity(heldout, heldout=True)]
        return None if None in sources else ["shared windows", WINDOW, SAMPLED, STREAMED, *sources]

    def count() -> np.ndarray:
        return np.array(
            shared_windows(_compared(train, heldout=False), _compared(heldout, heldout=True))
        )

    shared, total = cached(
        train.cache, "outcome of the check for shared text", identity, count, quiet=True
    ).tolist()
    refuse_shared(
        shared, total, named, "data=stdlib" if train.is_library else f"data.path={train.path}"
    )


def refuse_shared(shared: int, total: int, named: str, training: str) -> None:
    """Raises UserError if more than :data:`REFUSED_SHARE` of the held-out windows are shared; warns
    of fewer.
    """
    message = (
        f"{named}: {shared:,} of its {total:,} compared passages of {WINDOW} characters are "
        f"also in {training}"
    )
    if shared > REFUSED_SHARE * total:
        raise UserError(f"{message}; expected text that training does not see")
    if shared:
        print_once(f"warning: {message}")


def _compared(cfg: DataConfig, *, heldout: bool) -> Iterator[Document]:
    """Yields the documents that are compared: all, or the first ones of a streamed dataset."""
    left = STREAMED
    for document in plain_documents(cfg, heldout=heldout):
        yield document
        left -= len(document.text) if cfg.source == "hub" else 0
        if left <= 0:
            return


def shared_windows(train: Iterable[Document], heldout: Iterable[Document]) -> tuple[int, int]:
    """Returns how many sampled windows of ``heldout`` occur in ``train``, and how many there are;
    equal windows count once.
    """
    pieces = [windows(document.text) for document in heldout]
    wanted = np.unique(np.concatenate(pieces)) if pieces else np.empty(0, np.uint64)
    shared = np.zeros(len(wanted), bool)
    for batch in batched(
        (windows(document.text) for document in train), len, most=1000, size=_PIECE // SAMPLED
    ):
        shared |= np.isin(wanted, np.concatenate(batch))
    return int(shared.sum()), len(wanted)


def windows(text: str) -> np.ndarray:
    """Returns the hashes, uint64 ``[n]``, of the sampled windows of ``text``; a shorter text is one
    window.
    """
    plain = " ".join(text.casefold().split())
    codes = np.frombuffer(plain.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    if len(codes) == 0:
        return np.empty(0, np.uint64)
    if len(codes) <= WINDOW:
        return _mixed(_rolling(codes, len(codes)))
    starts = range(0, len(codes) - WINDOW + 1, _PIECE)
    hashes = np.concatenate(
        [_mixed(_rolling(codes[start : start + _PIECE + WINDOW - 1], WINDOW)) for start in starts]
    )
    return hashes[hashes % np.uint64(SAMPLED) == 0]


def _rolling(codes: np.ndarray, size: int) -> np.ndarray:
    """Returns the polynomial hash, modulo 2**64, of each window of ``size`` codes."""
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(len(codes), _BASE, np.uint64))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(codes * powers, dtype=np.uint64)])
        inverses = np.cumprod(np.full(len(codes) - size + 1, _INVERSE, np.uint64))
        return (sums[size:] - sums[:-size]) * inverses


def _mixed(hashes: np.ndarray) -> np.ndarray:
    """Returns the hashes with well-mixed low bits; these decide which windows are sampled."""
    with np.errstate(over="ignore"):
        hashes = (hashes ^ (hashes >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        return hashes ^ (hashes >> np.uint64(32))
