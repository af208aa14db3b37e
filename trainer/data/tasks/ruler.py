"""The synthetic tasks of RULER (Hsieh et al., arXiv 2404.06654), generated from any text.

Templates, numbers and metric are those of https://github.com/NVIDIA/RULER (Apache-2.0), so that
scores can be compared. Keys and words are drawn from the text instead of word lists, essays are any
text, and each sample has its own passage. The two tasks with questions about documents need files
of SQuAD's and of HotpotQA's form (:mod:`msattn.trainer.data.benchmarks`).
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from msattn.trainer.data.tasks.exercises import distinct, identifier, letters, random_value
from msattn.trainer.data.tasks.grammar import Rng

CountTokens = Callable[[str], int]  # the number of tokens of a text

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NUMBER_DIGITS = 7
SMALLEST = 8  # sentences, words or needles from which on the size of a sample is searched
FEWEST_WORDS = 500  # words in a haystack


class TooFewWords(ValueError):
    """The haystack has fewer different words than a sample needs."""


class DocumentQuestion(NamedTuple):
    """A question, its valid answers, and the numbers of its own documents and of the distractors to
    use first.
    """

    question: str
    answers: list[str]
    own: list[int]
    near: list[int]


class Questions(NamedTuple):
    """Questions about documents."""

    documents: list[str]
    asked: list[DocumentQuestion]


@dataclass(frozen=True)
class Haystack:
    text: list[str]  # words, separated by single spaces
    words: list[str]  # its distinct words of 4 to 9 lower-case letters, sorted
    questions: Mapping[str, Questions] = field(default_factory=dict)  # keyed by task

    @classmethod
    def from_text(cls, text: str) -> "Haystack":
        """Raises TooFewWords for a text with fewer than :data:`FEWEST_WORDS` distinct words."""
        pieces = text.split()
        words = sorted({word for word in pieces if re.fullmatch("[a-z]{4,9}", word)})
        if len(words) < FEWEST_WORDS:
            raise TooFewWords(
                f"the haystack has {len(words)} different words, but {FEWEST_WORDS} are needed"
            )
        return cls(pieces, words)

    def passage(self, rng: Rng, count: int) -> list[str]:
        """Returns ``count`` words from a random one on, as sentences; the text is repeated if it is
        shorter.
        """
        start = int(rng.integers(len(self.text)))
        repeats = math.ceil((start + count) / len(self.text))
        return re.split(r"(?<=[.!?]) ", " ".join((self.text * repeats)[start : start + count]))


@dataclass(frozen=True)
class Sample:
    prompt: str  # the message of a user
    begun: str  # the beginning of the answer, which the model continues
    answers: list[str]  # texts that the continuation should contain
    one_suffices: bool = False  # each of them is a whole answer

    def score(self, text: str) -> float:
        """Returns the share of the answers that are in ``text``, ignoring case (RULER's
        ``string_match_all``). If one suffices, any answer counts as 1 (``string_match_part``).
        """
        hits = sum(answer.lower() in text.lower() for answer in self.answers)
        return float(hits > 0) if self.one_suffices else hits / len(self.answers)


@dataclass(frozen=True)
class Task:
    make: Callable[
        [Rng, Haystack, int, int], Sample
    ]  # (rng, haystack, length, size) -> a sample with `size` sentences or needles
    new_tokens: int  # tokens to generate
    smallest: int = SMALLEST  # fewest sentences, words or needles in a sample

    def samples(
        self, seeds: Sequence[Sequence[int]], haystack: Haystack, length: int, count: CountTokens
    ) -> list[Sample]:
        """Draws a sample for each of ``seeds`` that has with its new tokens at most ``length``
        tokens, and nearly as many.
        """
        size = self.size(seeds, haystack, length, count)
        return [
            self._longest(partial(self._draw, haystack, length, count, seed), size, length)
            for seed in seeds
        ]

    def size(
        self, seeds: Sequence[Sequence[int]], haystack: Haystack, length: int, count: CountTokens
    ) -> int:
        """Returns how many sentences, words or needles fit in the sample of the first of ``seeds``,
        or up to 2 % less.

        Raises ValueError if no sample is as short, and TooFewWords if the haystack's words do not
        suffice for one that long.
        """
        draw = partial(self._draw, haystack, length, count)
        if (shortest := max(draw(seed, self.smallest)[1] for seed in seeds)) > length:
            raise ValueError(
                f"length={length}: the shortest prompt has {shortest} tokens with those of the "
                f"answer"
            )

        def fits(size: int) -> bool:
            try:
                return draw(seeds[0], size)[1] <= length
            except TooFewWords:
                return False

        low, high = SMALLEST, 2 * SMALLEST
        while fits(high):
            low, high = high, 2 * high
        while high - low > max(1, low // 50):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        draw(seeds[0], high)  # raises if it has too few words, instead of too many tokens
        return low

    def _draw(
        self, haystack: Haystack, length: int, count: CountTokens, seed: Sequence[int], size: int
    ) -> tuple[Sample, int]:
        """Returns a sample and its tokens with those of the answer."""
        made = self.make(np.random.default_rng(seed), haystack, length, size)
        return made, count(made.prompt + made.begun) + self.new_tokens

    def _longest(self, draw: Callable[[int], tuple[Sample, int]], size: int, length: int) -> Sample:
        """Returns the first sample of ``size``, or a little less, that has at most ``length``
        tokens.
        """
        while (drawn := draw(size))[1] > length and size > self.smallest:
            size -= max(1, size // 50)
        return drawn[0]


def needles(
    rng: Rng,
    haystack: Haystack,
    length: int,
    size: int,
    *,
    around: str,
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    key_kind: str = "words",
    value_kind: str = "numbers",
) -> Sample:
    """Needles in ``around``: noise, essay, or other needles. ``queries`` of ``keys`` are asked for,
    with ``values`` each.
    """
    del length
    draw = {
        "words": lambda: _key(rng, haystack),
        "numbers": lambda: random_value(rng, NUMBER_DIGITS),
        "uuids": lambda: identifier(rng),
    }
    names = distinct(draw[key_kind], max(keys, queries))
    values_of = {name: distinct(draw[value_kind], values) for name in names}
    hidden = [
        NEEDLE.format(kind=value_kind, key=name, value=value)
        for name in names
        for value in values_of[name]
    ]
    hidden = [hidden[i] for i in rng.permutation(len(hidden))]
    if around == "essay":
        context = " ".join(_inserted(rng, haystack.passage(rng, 10 * size), hidden))
    elif around == "noise":
        context = "\n".join(_inserted(rng, [NOISE] * size, hidden))
    else:
        others = [
            NEEDLE.format(kind=value_kind, key=draw[key_kind](), value=draw[value_kind]())
            for _ in range(size)
        ]
        context = "\n".join(_inserted(rng, others, hidden))
    asked = [names[i] for i in rng.permutation(len(names))[:queries]]
    query = asked[0] if queries == 1 else ", ".join(asked[:-1]) + f", and {asked[-1]}"
    if queries * values == 1:
        kind, some, quiz, verb = value_kind.removesuffix("s"), "A", "is", "is"
    else:
        kind, some, quiz, verb = value_kind, "Some", "are", "are all"
    prompt = (
        f"{some} special magic {kind} {quiz} hidden within the following text. Make sure to "
        f"memorize it. I will quiz you about "
        f"the {kind} afterwards.\n{context}\nWhat {verb} the special magic {kind} for {query} "
        f"mentioned in the provided text?"
    )
    begun = f" The special magic {kind} for {query} mentioned in the provided text {quiz}"
    return Sample(prompt, begun, [value for name in asked for value in values_of[name]])


def variable_tracking(rng: Rng, haystack: Haystack, length: int, size: int) -> Sample:
    """A chain of five variables in noise, after an example with shorter names in less noise."""
    del haystack, length
    example, asked = _chain(rng, 3, SMALLEST // 2), _chain(rng, 5, size)
    return Sample(
        f"{example.prompt}{example.begun} {' '.join(example.answers)}\n\n{asked.prompt}",
        asked.begun,
        asked.answers,
    )


def _chain(rng: Rng, name_letters: int, size: int) -> Sample:
    names = distinct(lambda: letters(rng, name_letters).upper(), 5)
    value = random_value(rng)
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {other} " for other, name in pairwise(names)]
    context = "\n".join(_inserted(rng, [NOISE] * max(size, len(chain)), chain))
    prompt = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{context}\nQuestion: Find all variables that are assigned the value {value} in the text "
        f"above."
    )
    begun = (
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(names)} variables are assigned the value {value}, they are: "
    )
    return Sample(prompt, begun, names)


def common_words(rng: Rng, haystack: Haystack, length: int, size: int) -> Sample:
    """Ten words that are repeated often among others, after an example with fewer words."""
    short = length < 4096
    example = _word_list(rng, haystack, 20 if short else 40, 3 if short else 10, 1 if short else 3)
    asked = _word_list(rng, haystack, 10 + size, 6 if short else 30, 1 if short else 3)
    answer = " ".join(f"{number}. {word}" for number, word in enumerate(example.answers, 1))
    return Sample(
        f"{example.prompt}{example.begun} {answer}\n{asked.prompt}", asked.begun, asked.answers
    )


def _word_list(rng: Rng, haystack: Haystack, number: int, often: int, seldom: int) -> Sample:
    if number > len(haystack.words):
        raise TooFewWords(
            f"the haystack has {len(haystack.words)} different words, but {number} are needed"
        )
    drawn = [haystack.words[i] for i in rng.permutation(len(haystack.words))[:number]]
    listed = drawn[:10] * often + drawn[10:] * seldom
    context = " ".join(
        f"{place}. {listed[i]}" for place, i in enumerate(rng.permutation(len(listed)), 1)
    )
    prompt = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear "
        f"most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
    )
    return Sample(
        prompt, " Answer: The top 10 words that appear most often in the list are:", drawn[:10]
    )


def frequent_words(rng: Rng, haystack: Haystack, length: int, size: int) -> Sample:
    """Coded words of six letters with frequencies ``k^-2 / zeta(2)``; the first is noise, the next
    three are asked for.
    """
    del haystack
    coded = ["...", *distinct(lambda: letters(rng, 6), max(4, length // 50))]
    words = [
        word
        for k, word in enumerate(coded, 1)
        for _ in range(int(4 * size * k**-2 / (math.pi**2 / 6)))
    ]
    context = " ".join(words[i] for i in rng.permutation(len(words)))
    prompt = (
        "Read the following coded text and track the frequency of each coded word. Find the three "
        "most frequently appeared "
        f"coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the "
        f"dots '....'. What are the three "
        "most frequently appeared words in the above coded text?"
    )
    begun = (
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    )
    return Sample(prompt, begun, coded[1:4])


def question_about_documents(
    rng: Rng, haystack: Haystack, length: int, size: int, *, task: str
) -> Sample:
    """A question about one or several of ``size`` documents; they are repeated if there are
    fewer.
    """
    del length
    documents, every = haystack.questions[task]
    asked = every[rng.integers(len(every))]
    missing = max(0, size - len(asked.own))
    if size >= len(documents):
        chosen = [place % len(documents) for place in range(size)]
    elif missing <= len(asked.near):
        chosen = asked.own + [asked.near[i] for i in rng.permutation(len(asked.near))[:missing]]
    else:
        first = {*asked.own, *asked.near}
        others = [place for place in range(len(documents)) if place not in first]
        chosen = (
            asked.own
            + asked.near
            + [others[i] for i in rng.permutation(len(others))[: missing - len(asked.near)]]
        )
    context = "\n\n".join(
        f"Document {number}:\n{documents[chosen[i]]}"
        for number, i in enumerate(rng.permutation(len(chosen)), 1)
    )
    instruction = (
        "Answer the question based on the given documents. Only give me the answer and "
        "do not output any other words."
    )
    prompt = (
        f"{instruction}\n\nThe following are given "
        f"documents.\n\n{context}\n\n{instruction}\n\nQuestion: {asked.question}"
    )
    return Sample(prompt, " Answer:", asked.answers, one_suffices=True)


TASKS = {
    "niah_single_1": Task(partial(needles, around="noise"), 128),
    "niah_single_2": Task(partial(needles, around="essay"), 128),
    "niah_single_3": Task(partial(needles, around="essay", value_kind="uuids"), 128),
    "niah_multikey_1": Task(partial(needles, around="essay", keys=4), 128),
    "niah_multikey_2": Task(partial(needles, around="needles"), 128),
    "niah_multikey_3": Task(
        partial(needles, around="needles", key_kind="uuids", value_kind="uuids"), 128
    ),
    "niah_multivalue": Task(partial(needles, around="essay", values=4), 128),
    "niah_multiquery": Task(partial(needles, around="essay", queries=4), 128),
    "vt": Task(variable_tracking, 30),
    "cwe": Task(common_words, 120, smallest=1),
    "fwe": Task(frequent_words, 50),
    "qa_1": Task(partial(question_about_documents, task="qa_1"), 32, smallest=1),
    "qa_2": Task(partial(question_about_documents, task="qa_2"), 32, smallest=1),
}


def _inserted(rng: Rng, sentences: Sequence[str], hidden: Sequence[str]) -> list[str]:
    """Inserts ``hidden`` between ``sentences`` at random places, in this order."""
    places = np.sort(rng.integers(len(sentences) + 1, size=len(hidden)))
    mixed = list(sentences)
    for place, text in reversed(list(zip(places.tolist(), hidden, strict=True))):
        mixed.insert(place, text)
    return mixed


def _key(rng: Rng, haystack: Haystack) -> str:
    first, second = (haystack.words[i] for i in rng.integers(len(haystack.words), size=2))
    return f"{first}-{second}"
