"""New tokens as text, piece by piece, up to a stop string."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"  # what tokenizers decode an unfinished character to


class TokenText:
    """Decodes tokens as they come: the pieces together are the text of all tokens, without special tokens.

    The text of a token depends on those around it: a character may take several tokens, and some tokenizers drop a leading
    space. So a piece is the difference between two texts that begin with the same earlier tokens.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = cast("Any", tokenizer)
        self._tokens: list[int] = []
        self._start = self._end = 0  # the tokens from start to end are the context, whose text was returned

    def push(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Returns the text that ``tokens`` complete; with ``last`` also an unfinished character."""
        self._tokens += tokens
        text = self._decode(self._start, len(self._tokens))
        if text.endswith(INCOMPLETE) and not last:
            return ""
        piece = text[len(self._decode(self._start, self._end)) :]
        if piece:  # a context of special tokens alone would have no text
            self._start = self._end
        self._end = len(self._tokens)
        return piece

    def _decode(self, start: int, end: int) -> str:
        tokens = self._tokens[start:end]
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False) if tokens else ""


class StopStrings:
    """Passes text on up to the first of ``stop``, and keeps back what may become the beginning of one.

    Attributes
    ----------
    found : a stop string has come.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.found = False
        self._stop = stop
        self._kept = ""

    def push(self, piece: str, *, last: bool = False) -> str:
        """Returns the text that can be passed on after ``piece``; with ``last`` everything that is left."""
        text, self._kept = self._kept + piece, ""
        places = [place for place in map(text.find, self._stop) if place >= 0]
        if places:
            self.found = True
            return text[: min(places)]
        if last:
            return text
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._kept = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
