"""Retrieval tasks woven into text: passkeys, key-value recall, copying.

What all three share: something is said, text follows, it is said again, and only the second time can it be known. The
repetition's answer tokens carry weight in the loss, what could only be guessed carries none, and the text around keeps
weight 1. Evaluation hides the same sentences, so the wording lives here.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
Weights = NDArray[np.float32]

ANSWER_DIGITS = 5
ANSWER_WEIGHT = 6.0  # loss weight of an answer's tokens; text has 1
_COLOUR_WORDS = (
    "amber azure black blue bronze brown copper coral crimson cream golden green grey indigo iron ivory jade lemon "
    "lilac maroon olive orange pale pearl pink plum purple red rose ruby silver white"
)
_THING_WORDS = (
    "acorn anchor apple arrow badger barrel basket beacon bell bird boat bottle bridge bucket candle castle cedar "
    "chair clock cloud coin compass crown dagger door dragon drum eagle falcon feather fiddle flag forest fountain "
    "fox garden gate glove hammer harbour hawk helmet horse island kettle key ladder lantern leaf lion mirror "
    "mountain oak otter owl pony rabbit raven river ship spoon stone tiger tower wagon willow wolf"
)
_COLOURS, _THINGS = _COLOUR_WORDS.split(), _THING_WORDS.split()


def needle(key: str, value: str) -> str:
    """The sentence that is hidden."""
    return f"{question(key)} {value}."


def question(key: str) -> str:
    """The prompt that asks for it; the answer is a space and the value's digits."""
    return f"The secret number of {key} is"


def random_key(rng: np.random.Generator) -> str:
    """Two words, one of 2,176 pairs."""
    return f"{_COLOURS[rng.integers(len(_COLOURS))]} {_THINGS[rng.integers(len(_THINGS))]}"


def random_keys(rng: np.random.Generator, count: int) -> list[str]:
    """``count`` keys, no two alike."""
    keys: dict[str, None] = {}
    while len(keys) < count:
        keys[random_key(rng)] = None
    return list(keys)


def random_value(rng: np.random.Generator) -> str:
    """Five digits, the first not 0."""
    return str(rng.integers(10 ** (ANSWER_DIGITS - 1), 10**ANSWER_DIGITS))


def inject_needles(text: str, name: str, every: int = 350, remembered: int = 16) -> str:
    """``text`` with a needle's sentence after every few lines: half of them new, half repeating one of the last few.

    Plain text asks for nothing that was said long before; what is trained to find such things has to see some.

    Parameters
    ----------
    name : seeds the sentences.
    every : characters between two sentences, at least.
    remembered : how many of the latest sentences may be repeated.
    """
    rng = np.random.default_rng(list(hashlib.sha256(name.encode()).digest()))
    latest: deque[str] = deque(maxlen=remembered)
    pieces: list[str] = []
    since = 0
    for line in text.splitlines(keepends=True):
        pieces.append(line)
        since += len(line)
        if since >= every:
            since = 0
            if not latest or rng.random() < 0.5:
                latest.append(needle(random_key(rng), random_value(rng)))
                pieces.append(f" {latest[-1]} ")
            else:
                pieces.append(f" {latest[rng.integers(len(latest))]} ")
    return "".join(pieces)


class Tokenizer(Protocol):
    """What the tasks ask of a tokenizer."""

    def __len__(self) -> int: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def convert_ids_to_tokens(self, ids: Any) -> Any: ...


@dataclass(frozen=True)
class Span:
    """``ids`` that go into a text before its token ``position``, with their loss weights."""

    position: int
    ids: Tokens
    weights: Weights


def insert_spans(text: Tokens, inserts: Sequence[Span]) -> tuple[Tokens, Weights]:
    """``text`` (weight 1 each) with ``inserts`` at their positions; inserts of one position keep their order."""
    ordered = sorted(inserts, key=lambda insert: insert.position)
    ids: list[Tokens] = []
    weights: list[Weights] = []
    for start, insert in zip([0, *(i.position for i in ordered)], ordered, strict=False):
        ids += [text[start : insert.position], insert.ids]
        weights += [np.ones(insert.position - start, np.float32), insert.weights]
    tail = text[ordered[-1].position if ordered else 0 :]
    return np.concatenate([*ids, tail]), np.concatenate([*weights, np.ones(len(tail), np.float32)])


class PhraseEncoder:
    """The tasks' sentences as tokens, put together from encoded pieces: encoding whole sentences would be too slow.

    The pieces are words with their leading space, single digits and punctuation, which the embedded model's tokenizer never
    joins, so that the tokens are those of the whole sentence.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        def encode(text: str) -> Tokens:
            return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int64)

        spelled = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        letters = [token[1:] if token.startswith("Ġ") else "" for token in spelled]
        self.vocabulary_words = np.flatnonzero([word.isascii() and word.isalpha() for word in letters])
        self.opens_word = np.array([token.startswith("Ġ") for token in spelled])  # an insert may stand before these
        self._key_words = [encode(f" {word}") for word in (*_COLOURS, *_THINGS)]
        self._digits = np.concatenate([encode(digit) for digit in "0123456789"])
        self._space = encode(" ")
        self._frames = {
            "needle": (encode(" The secret number of"), encode(" is"), encode(".")),
            "pair": (encode(""), encode(":"), encode(",")),
        }

    def key(self, rng: np.random.Generator) -> Tokens:
        """A key as evaluation words them, or one to three words of the vocabulary: matching is learnt, not a list."""
        if rng.random() < 0.5:
            colour = rng.integers(len(_COLOURS))
            thing = len(_COLOURS) + rng.integers(len(_THINGS))
            return np.concatenate([self._key_words[colour], self._key_words[thing]])
        return rng.choice(self.vocabulary_words, size=rng.integers(1, 4))

    def said(self, frame: str, key: Tokens, value: Tokens, answer_weight: float) -> tuple[Tokens, Weights]:
        """``frame`` filled in, its answer (the space and the digits) weighted, the rest 0."""
        before, between, after = self._frames[frame]
        pieces = (before, key, between, self._space, value, after)
        ids = np.concatenate(pieces)
        weights = np.zeros(len(ids), np.float32)
        end = len(ids) - len(after)
        weights[end - len(value) - len(self._space) : end] = answer_weight
        return ids, weights

    def values(self, rng: np.random.Generator, count: int) -> Tokens:
        """``count`` numbers of five digits, [count, 5]."""
        return self._digits[rng.integers(0, 10, size=(count, ANSWER_DIGITS))]


Crop = Callable[[np.random.Generator, int], Tokens]  # (rng, length) -> so many successive tokens of text


def needles(
    rng: np.random.Generator, length: int, crop: Crop, phrases: PhraseEncoder, answer_weight: float
) -> tuple[Tokens, Weights]:
    """One to eight needles in ``length`` tokens of text; all that is asked comes at the end, or anywhere after its needle."""
    count = int(rng.integers(1, min(8, length // 64) + 1))
    at_the_end = rng.random() < 0.7
    asked = rng.permutation(count)[: rng.integers(1, count + 1)]
    order = np.concatenate([rng.permutation(count), asked])
    if not at_the_end:
        order = rng.permutation(order)
    inserts = _sayings(rng, "needle", order, phrases, answer_weight)
    text = crop(rng, length - sum(len(ids) for ids, _ in inserts))
    places = np.flatnonzero(phrases.opens_word[text])
    places = places if len(places) else np.arange(len(text))
    positions = np.sort(rng.choice(places, size=len(order)))
    if at_the_end:
        positions[count:] = len(text)
    return insert_spans(text, [Span(int(at), *said) for at, said in zip(positions, inserts, strict=True)])


def pairs(
    rng: np.random.Generator, length: int, crop: Crop, phrases: PhraseEncoder, answer_weight: float
) -> tuple[Tokens, Weights]:
    """A list of ``key: value`` pairs somewhere in the text, and the same list in another order at its end."""
    count = int(rng.integers(2, max(3, min(48, length // 32))))
    order = np.concatenate([rng.permutation(count), rng.permutation(count)])
    inserts = _sayings(rng, "pair", order, phrases, answer_weight)
    text = crop(rng, max(0, length - sum(len(ids) for ids, _ in inserts)))
    start = int(rng.integers(len(text) + 1))
    positions = np.where(np.arange(2 * count) < count, start, len(text))
    ids, weights = insert_spans(text, [Span(int(at), *said) for at, said in zip(positions, inserts, strict=True)])
    return ids[-length:], weights[-length:]


def copies(
    rng: np.random.Generator, length: int, crop: Crop, phrases: PhraseEncoder, answer_weight: float
) -> tuple[Tokens, Weights]:
    """A passage, as it stands in the text or its tokens shuffled, and the same passage again after a gap, twice at most.

    Repeated passages weigh as much as text does, whatever ``answer_weight``: they are long.
    """
    size = int(rng.integers(8, max(9, min(256, length // 5))))
    passage = crop(rng, size)
    shuffled = rng.random() < 0.5
    if shuffled:
        passage = rng.permutation(passage)
    again = np.ones(size, np.float32)
    again[:2] = 0.0  # where the passage begins again cannot be known
    first = np.full(size, 0.0 if shuffled else 1.0, np.float32)
    repeats = int(rng.integers(1, 3))
    text = crop(rng, length - size * (1 + repeats))
    positions = np.sort(rng.integers(0, len(text) + 1, size=1 + repeats))
    return insert_spans(text, [Span(int(at), passage, again if n else first) for n, at in enumerate(positions)])


def _sayings(
    rng: np.random.Generator, frame: str, order: Tokens, phrases: PhraseEncoder, answer_weight: float
) -> list[tuple[Tokens, Weights]]:
    """One saying for each entry of ``order`` (indices of keys); a key's first weighs nothing, the later ones their answer."""
    count = int(order.max()) + 1
    keys: dict[bytes, Tokens] = {}
    while len(keys) < count:
        key = phrases.key(rng)
        keys[key.tobytes()] = key
    distinct = list(keys.values())
    values = phrases.values(rng, count)
    seen: set[int] = set()
    said: list[tuple[Tokens, Weights]] = []
    for index in order.tolist():
        said.append(phrases.said(frame, distinct[index], values[index], answer_weight if index in seen else 0.0))
        seen.add(index)
    return said


TASKS = {"needles": needles, "pairs": pairs, "copies": copies}


def needle_prompt(
    rng: np.random.Generator, length: int, crop: Crop, tokenizer: Tokenizer, *, count: int, depth: float | None = None
) -> tuple[Tokens, int]:
    """``count`` needles in text, one of them asked at the end, its answer included: exactly ``length`` tokens.

    ``depth`` in [0, 1] places the needle that is asked for (None: anywhere), the others lie anywhere.

    Returns
    -------
    ids, [length], and the number of answer tokens at their end.

    Raises
    ------
    ValueError : ``length`` is too small for the needles and the question.
    """
    keys, values = random_keys(rng, count), [random_value(rng) for _ in range(count)]

    def encode(text: str) -> Tokens:
        return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int64)

    hidden = [encode(f" {needle(key, value)}") for key, value in zip(keys, values, strict=True)]
    asked, answer = encode(f" {question(keys[0])}"), encode(f" {values[0]}")
    room = length - sum(map(len, hidden)) - len(asked) - len(answer)
    if room < count:
        raise ValueError(f"length={length}: {count} needles and a question need at least {length - room + count} tokens")
    text = crop(rng, room)
    spelled = tokenizer.convert_ids_to_tokens(text.tolist())
    places = np.flatnonzero([token.startswith("Ġ") for token in spelled])
    places = places if len(places) else np.arange(len(text))
    positions = rng.choice(places, size=count)
    if depth is not None:
        positions[0] = places[round(depth * (len(places) - 1))]
    end = Span(len(text), np.concatenate([asked, answer]), np.ones(len(asked) + len(answer), np.float32))
    inserts = [Span(int(at), ids, np.ones(len(ids), np.float32)) for at, ids in zip(positions, hidden, strict=True)]
    return insert_spans(text, [*inserts, end])[0], len(answer)
