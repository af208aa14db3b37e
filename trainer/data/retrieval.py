"""Synthetic retrieval tasks in text: needles (passkeys), key-value lists and copied passages.

In each task a statement is made, text follows, and the statement is repeated. Answer tokens of the repetition have a larger
loss weight, tokens that cannot be predicted have weight 0 and the surrounding text has weight 1. Evaluation uses the same
sentences.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
Weights = NDArray[np.float32]

ANSWER_DIGITS = 5
ANSWER_WEIGHT = 6.0  # loss weight of answer tokens; text has 1
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
    """Returns the sentence that is hidden in the text."""
    return f"{question(key)} {value}."


def question(key: str) -> str:
    """Returns the prompt that asks for a needle; the answer is a space and the digits of its value."""
    return f"The secret number of {key} is"


def random_key(rng: np.random.Generator) -> str:
    """Draws a key of two words, one of 2,176 pairs."""
    return f"{_COLOURS[rng.integers(len(_COLOURS))]} {_THINGS[rng.integers(len(_THINGS))]}"


def random_keys(rng: np.random.Generator, count: int) -> list[str]:
    """Draws ``count`` distinct keys."""
    keys: dict[str, None] = {}
    while len(keys) < count:
        keys[random_key(rng)] = None
    return list(keys)


def random_value(rng: np.random.Generator) -> str:
    """Draws five digits, the first of which is not 0."""
    return str(rng.integers(10 ** (ANSWER_DIGITS - 1), 10**ANSWER_DIGITS))


def inject_needles(text: str, name: str, min_distance: int = 350, window: int = 16) -> str:
    """Inserts needles between the lines of ``text``: half of them new, half repetitions of recent ones.

    Natural text seldom repeats an earlier fact, so training for retrieval needs such examples.

    Parameters
    ----------
    name : seed of the needles.
    min_distance : minimum number of characters between two needles.
    window : number of most recent needles from which repetitions are drawn.
    """
    rng = np.random.default_rng(list(hashlib.sha256(name.encode()).digest()))
    recent: deque[str] = deque(maxlen=window)
    pieces: list[str] = []
    distance = 0
    for line in text.splitlines(keepends=True):
        pieces.append(line)
        distance += len(line)
        if distance >= min_distance:
            distance = 0
            if not recent or rng.random() < 0.5:
                recent.append(needle(random_key(rng), random_value(rng)))
                pieces.append(f" {recent[-1]} ")
            else:
                pieces.append(f" {recent[rng.integers(len(recent))]} ")
    return "".join(pieces)


class Tokenizer(Protocol):
    """The interface of a tokenizer that the tasks use."""

    def __len__(self) -> int: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def convert_ids_to_tokens(self, ids: Any) -> Any: ...


def _encode(tokenizer: Tokenizer, text: str) -> Tokens:
    return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int64)


@dataclass(frozen=True)
class Span:
    """Tokens ``ids`` to insert into a text before its token ``position``, with their loss weights."""

    position: int
    ids: Tokens
    weights: Weights


def insert_spans(text: Tokens, spans: Sequence[Span]) -> tuple[Tokens, Weights]:
    """Inserts ``spans`` into ``text``, whose tokens have weight 1. Spans at the same position keep their order.

    Returns
    -------
    ids, weights : both [len(text) + length of all spans]
    """
    ordered = sorted(spans, key=lambda span: span.position)
    ids: list[Tokens] = []
    weights: list[Weights] = []
    for start, span in zip([0, *(previous.position for previous in ordered)], ordered, strict=False):
        ids += [text[start : span.position], span.ids]
        weights += [np.ones(span.position - start, np.float32), span.weights]
    tail = text[ordered[-1].position if ordered else 0 :]
    return np.concatenate([*ids, tail]), np.concatenate([*weights, np.ones(len(tail), np.float32)])


class PhraseEncoder:
    """Builds the tokens of the tasks' statements from pieces encoded in advance, because encoding each statement is too slow.

    The pieces are words with a leading space, single digits and punctuation. The embedded model's tokenizer never merges
    them, so the result equals the encoding of the whole statement.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        words = [token[1:] if token.startswith("Ġ") else "" for token in vocabulary]
        self.vocabulary_words = np.flatnonzero([word.isascii() and word.isalpha() for word in words])
        self.starts_word = np.array([token.startswith("Ġ") for token in vocabulary])  # spans are inserted before these
        self._key_words = [_encode(tokenizer, f" {word}") for word in (*_COLOURS, *_THINGS)]
        self._digits = np.concatenate([_encode(tokenizer, digit) for digit in "0123456789"])
        self._space = _encode(tokenizer, " ")
        self._templates = {
            name: tuple(_encode(tokenizer, piece) for piece in pieces)
            for name, pieces in {"needle": (" The secret number of", " is", "."), "pair": ("", ":", ",")}.items()
        }

    def random_key(self, rng: np.random.Generator) -> Tokens:
        """Draws a key like those of evaluation, or one to three vocabulary words, so that no fixed list of keys is learned."""
        if rng.random() < 0.5:
            colour = rng.integers(len(_COLOURS))
            thing = len(_COLOURS) + rng.integers(len(_THINGS))
            return np.concatenate([self._key_words[colour], self._key_words[thing]])
        return rng.choice(self.vocabulary_words, size=rng.integers(1, 4))

    def fill(self, template: str, key: Tokens, value: Tokens, answer_weight: float) -> tuple[Tokens, Weights]:
        """Returns the tokens of a statement and their weights: ``answer_weight`` for space and digits, else 0."""
        before, between, after = self._templates[template]
        pieces = (before, key, between, self._space, value, after)
        ids = np.concatenate(pieces)
        weights = np.zeros(len(ids), np.float32)
        end = len(ids) - len(after)
        weights[end - len(value) - len(self._space) : end] = answer_weight
        return ids, weights

    def random_values(self, rng: np.random.Generator, count: int) -> Tokens:
        """Draws ``count`` numbers of five digits, [count, 5]."""
        return self._digits[rng.integers(0, 10, size=(count, ANSWER_DIGITS))]


Crop = Callable[[np.random.Generator, int], Tokens]  # (rng, length) -> that many successive tokens of text


def needles(
    rng: np.random.Generator, length: int, crop: Crop, phrases: PhraseEncoder, answer_weight: float
) -> tuple[Tokens, Weights]:
    """Hides one to eight needles in ``length`` tokens of text and repeats some, at the end or anywhere after the first."""
    count = int(rng.integers(1, min(8, length // 64) + 1))
    at_the_end = rng.random() < 0.7
    repeated = rng.permutation(count)[: rng.integers(1, count + 1)]
    order = np.concatenate([rng.permutation(count), repeated])
    if not at_the_end:
        order = rng.permutation(order)
    statements = _statements(rng, "needle", order, phrases, answer_weight)
    text = crop(rng, length - sum(len(ids) for ids, _ in statements))
    positions = np.sort(rng.choice(_insert_positions(phrases.starts_word[text]), size=len(order)))
    if at_the_end:
        positions[count:] = len(text)
    return insert_spans(text, _spans(positions, statements))


def pairs(
    rng: np.random.Generator, length: int, crop: Crop, phrases: PhraseEncoder, answer_weight: float
) -> tuple[Tokens, Weights]:
    """Inserts a list of ``key: value`` pairs into text and appends the same list in another order."""
    count = int(rng.integers(2, max(3, min(48, length // 32))))
    order = np.concatenate([rng.permutation(count), rng.permutation(count)])
    statements = _statements(rng, "pair", order, phrases, answer_weight)
    text = crop(rng, max(0, length - sum(len(ids) for ids, _ in statements)))
    start = int(rng.integers(len(text) + 1))
    positions = np.where(np.arange(2 * count) < count, start, len(text))
    ids, weights = insert_spans(text, _spans(positions, statements))
    return ids[-length:], weights[-length:]


def copies(
    rng: np.random.Generator, length: int, crop: Crop, phrases: PhraseEncoder, answer_weight: float
) -> tuple[Tokens, Weights]:
    """Inserts a passage, of text or of shuffled tokens, and repeats it once or twice after gaps.

    Repetitions have weight 1, whatever ``answer_weight`` is, because they are long.
    """
    size = int(rng.integers(8, max(9, min(256, length // 5))))
    passage = crop(rng, size)
    shuffled = rng.random() < 0.5
    if shuffled:
        passage = rng.permutation(passage)
    repeat_weights = np.ones(size, np.float32)
    repeat_weights[:2] = 0.0  # the start of a repetition cannot be predicted
    first_weights = np.full(size, 0.0 if shuffled else 1.0, np.float32)
    repeats = int(rng.integers(1, 3))
    text = crop(rng, length - size * (1 + repeats))
    positions = np.sort(rng.integers(0, len(text) + 1, size=1 + repeats))
    spans = [Span(int(at), passage, repeat_weights if n else first_weights) for n, at in enumerate(positions)]
    return insert_spans(text, spans)


def _statements(
    rng: np.random.Generator, template: str, order: Tokens, phrases: PhraseEncoder, answer_weight: float
) -> list[tuple[Tokens, Weights]]:
    """Returns one statement per entry of ``order`` (indices of keys); only repetitions have a weighted answer."""
    count = int(order.max()) + 1
    keys: dict[bytes, Tokens] = {}
    while len(keys) < count:
        key = phrases.random_key(rng)
        keys[key.tobytes()] = key
    distinct = list(keys.values())
    values = phrases.random_values(rng, count)
    seen: set[int] = set()
    statements: list[tuple[Tokens, Weights]] = []
    for index in order.tolist():
        weight = answer_weight if index in seen else 0.0
        statements.append(phrases.fill(template, distinct[index], values[index], weight))
        seen.add(index)
    return statements


def _spans(positions: Tokens, statements: Sequence[tuple[Tokens, Weights]]) -> list[Span]:
    return [Span(int(at), ids, weights) for at, (ids, weights) in zip(positions, statements, strict=True)]


def _insert_positions(starts_word: NDArray[np.bool_]) -> Tokens:
    """Returns the indices of tokens that start a word, or all indices if there are none."""
    found = np.flatnonzero(starts_word)
    return found if len(found) else np.arange(len(starts_word))


TASKS = {"needles": needles, "pairs": pairs, "copies": copies}


class NeedlePrompt(NamedTuple):
    """Tokens ``ids [length]`` of text with needles, a question and the answer, and the numbers of tokens of the last two."""

    ids: Tokens
    answer_tokens: int
    question_tokens: int


def needle_prompt(
    rng: np.random.Generator,
    length: int,
    crop: Crop,
    tokenizer: Tokenizer,
    *,
    count: int,
    depth: float | None = None,
    reply: Sequence[int] = (),
) -> NeedlePrompt:
    """Hides ``count`` needles in text and appends the question for one of them, with its answer.

    Parameters
    ----------
    length : total number of tokens.
    depth : relative position in [0, 1] of the needle that is asked for; None and the other needles: random.
    reply : tokens that end a user's message and begin the reply; the message then asks, and the reply begins with its words.

    Raises
    ------
    ValueError : ``length`` is too small for the needles and the question.
    """
    keys, values = random_keys(rng, count), [random_value(rng) for _ in range(count)]
    hidden = [_encode(tokenizer, f" {needle(key, value)}") for key, value in zip(keys, values, strict=True)]
    asked, answer = _encode(tokenizer, f" {question(keys[0])}"), _encode(tokenizer, f" {values[0]}")
    if reply:
        turn = _encode(tokenizer, f" Continue: {question(keys[0])}"), np.asarray(reply), _encode(tokenizer, question(keys[0]))
        asked = np.concatenate(turn)
    text_length = length - sum(map(len, hidden)) - len(asked) - len(answer)
    if text_length < count:
        raise ValueError(f"length={length}: {count} needles and a question need at least {length - text_length + count} tokens")
    text = crop(rng, text_length)
    tokens = tokenizer.convert_ids_to_tokens(text.tolist())
    allowed = _insert_positions(np.array([token.startswith("Ġ") for token in tokens], bool))
    positions = rng.choice(allowed, size=count)
    if depth is not None:
        positions[0] = allowed[round(depth * (len(allowed) - 1))]
    end = Span(len(text), np.concatenate([asked, answer]), np.ones(len(asked) + len(answer), np.float32))
    spans = _spans(positions, [(ids, np.ones(len(ids), np.float32)) for ids in hidden])
    return NeedlePrompt(insert_spans(text, [*spans, end])[0], len(answer), len(asked))
