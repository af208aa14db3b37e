"""Token sequences with retrieval tasks: facts hidden in text, then questions and answers, with a
loss weight for each token.

Answer tokens have a larger weight, tokens that cannot be predicted have weight 0, and the
surrounding text has weight 1. Long sequences may have several exercises, and their answers weigh
more: a single one among 32,768 tokens would hardly be learned.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from msattn.trainer.data.chunking import encode_texts
from msattn.trainer.data.tasks.exercises import (
    COMBINED,
    TASKS,
    Exercise,
    Rng,
    combine,
    distinct,
    random_key,
    random_value,
)
from msattn.trainer.data.tasks.grammar import introduce
from msattn.trainer.data.tasks.wordings import Wording

TokenIds = NDArray[np.int64]
Weights = NDArray[np.float32]
Pieces = list[tuple[TokenIds, Weights]]  # pieces of several texts
Crop = Callable[[Rng, int], TokenIds]  # (rng, length) -> that many successive tokens of text

# loss weight of answer tokens in sequences of up to 512 tokens; text has 1
ANSWER_WEIGHT, ANSWER_LENGTH = 6.0, 512
ROOM = 2048  # tokens for each exercise of a sequence that has several
COPIES = "copies"  # a task of tokens, not of text
NAMES = (*TASKS, COPIES)
INTRODUCED = 0.3  # share of the exercises that begin with an instruction
MONOTONOUS = 0.12  # share of the exercises whose text repeats a short passage
SPACE_ASKED = 0.08  # share of the exercises whose questions end with the space before the answer
MOST_WORDS = 500  # words that a task draws
# number and tokens of the crops whose words keys and lists are made of
WORD_CROPS, WORD_CROP = 512, 128
# begin tokens that begin with a space, in byte-level and in SentencePiece vocabularies
SPACES = ("Ġ", "▁")


def crop_from(tokens: NDArray[Any]) -> Crop:
    """Returns a function that draws successive tokens from a random place; it raises ValueError for
    more than there are.
    """

    def crop(rng: Rng, length: int) -> TokenIds:
        if length > len(tokens):
            raise ValueError(f"the text has {len(tokens)} tokens, but {length} are needed")
        start = int(rng.integers(len(tokens) - length + 1))
        return tokens[start : start + length].astype(np.int64)

    return crop


@dataclass(frozen=True)
class Span:
    """Tokens ``ids`` to insert into a text before its token ``position``, with their loss
    weights.
    """

    position: int
    ids: TokenIds
    weights: Weights


def insert_spans(text: TokenIds, spans: Sequence[Span]) -> tuple[TokenIds, Weights]:
    """Returns ids and weights of ``text``, with weight 1, and ``spans``; spans at the same position
    keep their order.
    """
    ordered = sorted(spans, key=lambda span: span.position)
    ids: list[TokenIds] = []
    weights: list[Weights] = []
    for start, span in zip(
        [0, *(previous.position for previous in ordered)], ordered, strict=False
    ):
        ids += [text[start : span.position], span.ids]
        weights += [np.ones(span.position - start, np.float32), span.weights]
    tail = text[ordered[-1].position if ordered else 0 :]
    return np.concatenate([*ids, tail]), np.concatenate([*weights, np.ones(len(tail), np.float32)])


class TaskSequences:
    """Makes token sequences of the tasks :data:`NAMES` for one tokenizer; ``crop`` draws the text
    around the tasks.

    ``words``, for keys and lists, are lower-case words of the vocabulary, and of the text, most of
    which have several tokens.
    """

    def __init__(self, tokenizer: Any, crop: Crop) -> None:
        self.tokenizer = tokenizer
        self.crop = crop
        self._starts_word = starts_word(tokenizer, np.arange(len(tokenizer)))
        tokens = tokenizer.convert_ids_to_tokens(np.flatnonzero(self._starts_word).tolist())
        known = {
            word
            for word in (token[1:] for token in tokens)
            if word.isascii() and word.isalpha() and len(word) > 1
        }
        rng = np.random.default_rng(0)
        text = " ".join(tokenizer.decode(crop(rng, WORD_CROP).tolist()) for _ in range(WORD_CROPS))
        self.words = sorted(known | set(re.findall(r"(?<=\s)[a-z]{2,12}(?=\s)", text)))

    def make(self, name: str, rng: Rng, length: int) -> tuple[TokenIds, Weights]:
        """Returns ``length`` tokens with the task ``name``, and their weights."""
        if name == COPIES:
            return copies(rng, length, self.crop)
        room = length
        while room >= 16:
            most = max(1, room // ROOM) if name in COMBINED else 1
            count = int(math.exp(rng.uniform(0, math.log(most + 1))))  # 1 to most, few more often
            exercise = combine(rng, [TASKS[name](rng, room, self.words) for _ in range(count)])
            opening, facts, turns = self._encode(exercise, rng, answer_weight(length))
            left = length - sum(len(ids) for ids, _ in (*opening, *facts, *turns))
            if left >= 0:
                return self._hide(rng, opening, facts, turns, self._text(rng, left))
            room //= 2
        return self.crop(rng, length), np.ones(length, np.float32)

    def _text(self, rng: Rng, length: int) -> TokenIds:
        """Returns text, seldom a short passage that is repeated."""
        if length == 0 or rng.random() >= MONOTONOUS:
            return self.crop(rng, length)
        return np.resize(self.crop(rng, int(rng.integers(1, min(64, length) + 1))), length)

    def _encode(self, exercise: Exercise, rng: Rng, weight: float) -> tuple[Pieces, Pieces, Pieces]:
        """Returns tokens and weights of what stands before the text, of the facts, and of the
        turns.

        Before the text stand an example, which repeats the instruction, and the instruction, or
        nothing.
        """
        between = "\n" if rng.random() < 0.5 else " "
        end = (".", ".\n", "\n")[int(rng.integers(3))]
        instruction = f"{introduce(rng, self.words)}{between}" if rng.random() < INTRODUCED else ""
        example = f"{instruction}{exercise.example}\n{between}" if exercise.example else ""
        opening = [[(text, 0.0)] for text in (example, instruction) if text]
        facts = [[(f" {fact}", 0.0)] for fact in exercise.facts]
        space = (" ", "") if rng.random() < SPACE_ASKED else ("", " ")
        turns = [
            [(f"{between}{question}{space[0]}", 0.0), (f"{space[1]}{answer}", weight), (end, 1.0)]
            for question, answer in exercise.turns
        ]
        weighted = iter(self._weighted([*opening, *facts, *turns]))
        return [next(weighted) for _ in opening], [next(weighted) for _ in facts], list(weighted)

    def _weighted(self, texts: list[list[tuple[str, float]]]) -> Pieces:
        """Returns tokens and weights of texts that are given as pieces with their weights."""
        encoded = iter(encode(self.tokenizer, [piece for pieces in texts for piece, _ in pieces]))
        encoded_texts = []
        for pieces in texts:
            ids = [next(encoded) for _ in pieces]
            weights = [
                np.full(len(part), weight, np.float32)
                for part, (_, weight) in zip(ids, pieces, strict=True)
            ]
            encoded_texts.append((np.concatenate(ids), np.concatenate(weights)))
        return encoded_texts

    def _hide(
        self, rng: Rng, opening: Pieces, facts: Pieces, turns: Pieces, text: TokenIds
    ) -> tuple[TokenIds, Weights]:
        """Inserts ``facts`` before words of ``text``; ``turns`` follow the text, or are in it after
        the last fact.
        """
        allowed = insert_positions(self._starts_word[text])
        positions = np.sort(rng.choice(allowed, size=len(facts)))
        if rng.random() < 0.75:
            later = np.full(len(turns), len(text))
        else:
            later = np.sort(
                rng.choice(np.append(allowed[allowed >= positions[-1]], len(text)), size=len(turns))
            )
        places = (*[0] * len(opening), *positions.tolist(), *later.tolist())
        return insert_spans(
            text,
            [
                Span(at, *piece)
                for at, piece in zip(places, (*opening, *facts, *turns), strict=True)
            ],
        )


def answer_weight(length: int) -> float:
    """Returns the loss weight of answer tokens in a sequence: it grows with the root of
    ``length``.
    """
    return ANSWER_WEIGHT * max(1.0, length / ANSWER_LENGTH) ** 0.5


def copies(rng: Rng, length: int, crop: Crop) -> tuple[TokenIds, Weights]:
    """Inserts a passage, of text or of shuffled tokens, and repeats it once or twice after gaps.
    Repetitions have weight 1.
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
    spans = [
        Span(int(at), passage, repeat_weights if n else first_weights)
        for n, at in enumerate(positions)
    ]
    return insert_spans(text, spans)


class NeedlePrompt(NamedTuple):
    """A prompt that ends with a question and its answer."""

    ids: TokenIds  # [length]
    answer_tokens: int  # at the end
    question_tokens: int  # before the answer
    statement: str  # the needle that is asked for
    question: str


def needle_prompt(
    rng: Rng,
    length: int,
    crop: Crop,
    tokenizer: Any,
    wording: Wording,
    *,
    count: int,
    depth: float | None = None,
    reply: Sequence[int] = (),
) -> NeedlePrompt:
    """Hides ``count`` needles in text and appends the question for one of them, with its answer;
    ``length`` tokens in all.

    The needle that is asked for stands at the relative ``depth`` in [0, 1], the others, or with
    None all, at random. ``reply`` are tokens that end a user's message and begin the reply; the
    message then asks, and the reply begins with its words.
    """
    keys = distinct(lambda: random_key(rng), count)
    values = [random_value(rng) for _ in range(count)]
    statements = [wording.state(key, value) for key, value in zip(keys, values, strict=True)]
    question = wording.ask(keys[:1], 1)
    hidden = encode(tokenizer, [f" {statement}" for statement in statements])
    asked, answer = encode(tokenizer, [f" {question}", f" {values[0]}"])
    if reply:
        message, begun = encode(tokenizer, [f" Continue: {question}", question])
        asked = np.concatenate([message, np.asarray(reply), begun])
    text_length = length - sum(map(len, hidden)) - len(asked) - len(answer)
    if text_length < count:
        raise ValueError(
            f"length={length}: {count} needles and a question need at least "
            f"{length - text_length + count} tokens"
        )
    text = crop(rng, text_length)
    allowed = insert_positions(starts_word(tokenizer, text))
    positions = rng.choice(allowed, size=count)
    if depth is not None:
        positions[0] = allowed[round(depth * (len(allowed) - 1))]
    end = np.concatenate([asked, answer])
    spans = [
        Span(int(at), ids, np.ones(len(ids), np.float32))
        for at, ids in zip(positions, hidden, strict=True)
    ]
    ids = insert_spans(text, [*spans, Span(len(text), end, np.ones(len(end), np.float32))])[0]
    return NeedlePrompt(ids, len(answer), len(asked), statements[0], question)


def encode(tokenizer: Any, texts: Sequence[str]) -> list[TokenIds]:
    return [np.asarray(ids, np.int64) for ids in encode_texts(tokenizer, list(texts))]


def starts_word(tokenizer: Any, ids: TokenIds) -> NDArray[np.bool_]:
    return np.array(
        [token.startswith(SPACES) for token in tokenizer.convert_ids_to_tokens(ids.tolist())], bool
    )


def insert_positions(starts_word: NDArray[np.bool_]) -> TokenIds:
    """Returns the indices of tokens that start a word, or all indices if there are none; one at
    least.
    """
    starts = np.flatnonzero(starts_word)
    return starts if len(starts) else np.arange(max(1, len(starts_word)))
