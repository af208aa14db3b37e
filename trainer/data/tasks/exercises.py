"""Retrieval tasks as text: facts that are hidden in a context, and questions about them with their
answers.

The tasks are those of long-context benchmarks (needles with one or several keys and values,
key-value lists, variables that take each other's values, frequent words), in wordings of our own.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np

from msattn.trainer.data.tasks.grammar import MARKS, Rng, ask, compose, one
from msattn.trainer.data.tasks.wordings import Wording, enumerated

T = TypeVar("T")
ANSWER_DIGITS = 5
KEY_SEPARATORS = (" ", " ", " ", " ", "-", "-", "-", "_", ".", "/")
BEFORE_LAST = (" and ", ", and ", ", ", "; ")  # between the last two keys of a question
LIST_SEPARATORS = (", ", ", ", " ", " ", "; ", "\n", " - ")
# marks between words that do not count as words
UNCOUNTED = ("...", "--", "***", "##", "==", "~", "?!", "|")
LIST_ROOM = 16384  # most tokens of a list of words
EXAMPLES = 0.3  # share of the exercises about lists that solve a small one first
# share of the exercises whose keys are identifiers, and of those whose values are
IDENTIFIERS = 0.06
_COLOR_WORDS = (
    "amber azure black blue bronze brown copper coral crimson cream golden green grey indigo iron "
    "ivory jade lemon lilac maroon olive orange pale pearl pink plum purple red rose ruby silver "
    "white"
)
_THING_WORDS = (
    "acorn anchor apple arrow badger barrel basket beacon bell bird boat bottle bridge bucket "
    "candle castle cedar chair clock cloud coin compass crown dagger door dragon drum eagle falcon "
    "feather fiddle flag forest fountain fox garden gate glove hammer harbour hawk helmet horse "
    "island kettle key ladder lantern leaf lion mirror mountain oak otter owl pony rabbit raven "
    "river ship spoon stone tiger tower wagon willow wolf"
)
_COLORS, _THINGS = _COLOR_WORDS.split(), _THING_WORDS.split()


@dataclass(frozen=True)
class Exercise:
    """Facts, and what is asked about them."""

    facts: tuple[str, ...]  # texts that are hidden in the context, in this order
    # questions, each with the answer that follows it after a space
    turns: tuple[tuple[str, str], ...]
    # a small exercise of the same form with its answer, which stands before the context; or nothing
    example: str = ""


# (rng, room, words): room in tokens, words for keys and lists
Task = Callable[[Rng, int, Sequence[str]], Exercise]


def random_key(rng: Rng) -> str:
    """Draws a key of two words, one of 2,176 pairs."""
    return f"{_COLORS[rng.integers(len(_COLORS))]} {_THINGS[rng.integers(len(_THINGS))]}"


def random_value(rng: Rng, digits: int = ANSWER_DIGITS) -> str:
    """Draws a number, whose first digit is not 0."""
    return str(rng.integers(10 ** (digits - 1), 10**digits))


def draw_count(rng: Rng, least: int, most: int, room: int, size: int) -> int:
    """Draws a number of items from ``least`` to ``most``, but at most as many of ``size`` tokens as
    fit in ``room``; ``least`` items are always possible.
    """
    return int(rng.integers(least, min(most, max(least, room // size)) + 1))


def distinct(draw: Callable[[], str], count: int) -> list[str]:
    """Calls ``draw`` until it has returned ``count`` different texts."""
    texts: dict[str, None] = {}
    while len(texts) < count:
        texts[draw()] = None
    return list(texts)


def needles(rng: Rng, room: int, words: Sequence[str]) -> Exercise:
    """One to eight keys with a value each; some are asked for, one by one."""
    count = draw_count(rng, 1, 8, room, 64)
    keys, values = _keys(rng, count, words), _values(rng, count)
    wordings = _wordings(rng, count, words)
    facts = [
        wording.state(key, value)
        for wording, key, value in zip(wordings, keys, values, strict=True)
    ]
    asked = rng.permutation(count)[: rng.integers(1, count + 1)]
    turns = [(wordings[i].ask([keys[i]], 1), values[i]) for i in asked.tolist()]
    return Exercise(tuple(facts[i] for i in rng.permutation(count)), tuple(turns))


def several_values(rng: Rng, room: int, words: Sequence[str]) -> Exercise:
    """Keys with one to four values; the answer names all values of a key, in the order of the
    text.
    """
    count = draw_count(rng, 1, 4, room, 128)
    wording = compose(rng, words)
    keys = _keys(rng, count, words)
    numbers = [int(rng.integers(1, 5)) for _ in keys]
    values = iter(_values(rng, sum(numbers)))
    stated = [
        (key, next(values))
        for key, number in zip(keys, numbers, strict=True)
        for _ in range(number)
    ]
    stated = [stated[i] for i in rng.permutation(len(stated))]
    turns = []
    for key in keys:
        own = [value for other, value in stated if other == key]
        turns.append((wording.ask([key], len(own)), enumerated(own)))
    return Exercise(tuple(wording.state(*pair) for pair in stated), tuple(turns))


def several_keys(rng: Rng, room: int, words: Sequence[str]) -> Exercise:
    """Two to eight keys; one question asks for the values of two to four of them."""
    count = draw_count(rng, 2, 8, room, 64)
    wording = compose(rng, words)
    keys, values = _keys(rng, count, words), _values(rng, count)
    facts = [wording.state(key, value) for key, value in zip(keys, values, strict=True)]
    asked = rng.permutation(count)[: rng.integers(2, min(4, count) + 1)].tolist()
    question = wording.ask([keys[i] for i in asked], len(asked), one(rng, BEFORE_LAST))
    turn = question, enumerated([values[i] for i in asked])
    return Exercise(tuple(facts[i] for i in rng.permutation(count)), (turn,))


def pairs(rng: Rng, room: int, words: Sequence[str]) -> Exercise:
    """A list of keys and values in one wording or form, sometimes with random identifiers; up to 16
    are asked for.
    """
    identifiers = rng.random() < 0.2
    count = int(rng.integers(2, max(3, min(400, room // (96 if identifiers else 24)))))
    if identifiers:
        keys, values = ([identifier(rng) for _ in range(count)] for _ in range(2))
    else:
        keys, values = _keys(rng, count, words), _values(rng, count)
    if rng.random() < 0.5:
        wording = compose(rng, words)
        fact = one(rng, (" ", "\n")).join(
            wording.state(key, value) for key, value in zip(keys, values, strict=True)
        )
        ask: Callable[[str], str] = lambda key: wording.ask([key], 1)  # noqa: E731
    else:
        between, after = one(
            rng, ((":", ", "), (":", "\n"), (" =", "; "), (" is", ". "), (" -", "\n"), ("\t", "\n"))
        )
        fact = after.join(
            f"{key}{between} {value}" for key, value in zip(keys, values, strict=True)
        )
        ask = lambda key: f"{key}{between}"  # noqa: E731
    asked = rng.permutation(count)[: rng.integers(1, min(count, 16) + 1)].tolist()
    return Exercise((fact,), tuple((ask(keys[i]), values[i]) for i in asked))


@dataclass(frozen=True)
class Assignments:
    """Statements that set variables to a number and to another variable, and the question for all
    that hold a number.
    """

    number: str
    variable: str
    question: str


_ASSIGNMENTS = (
    "let {name} be {value}.|let {name} be {other}.|The variables that hold {value} are",
    "{name} := {value};|{name} := {other};|holders of {value}:",
    "Set {name} to {value}.|Set {name} to {other}.|Which names were set to {value}? They are",
    "{name} <- {value}|{name} <- {other}|Names with the value {value}:",
    "Box {name} contains {value}.|Box {name} contains whatever is in box {other}.|List the boxes "
    "that contain {value}:",
    "int {name} = {value};|int {name} = {other};|// all equal to {value}:",
    "{name} was given the number {value}.|{name} was given the number of {other}.|"
    "Who was given the number {value}? The answer is",
    "The label {name} stands for {value}.|The label {name} stands for the same as {other}.|Labels "
    "that stand for {value} are",
)
ASSIGNMENTS = [Assignments(*forms.split("|")) for forms in _ASSIGNMENTS]


def tracking(rng: Rng, room: int, words: Sequence[str]) -> Exercise:
    """One to three chains of up to six variables, each set to the one before; the answer names the
    variables of a chain.
    """
    chains, length = draw_count(rng, 1, 3, room, 256), draw_count(rng, 2, 6, room, 64)
    form = one(rng, ASSIGNMENTS) if rng.random() < 0.5 else _assignments(rng, words)
    if rng.random() < 0.5:
        form = replace(form, question=ask(rng, words, "{value}"))
    draw = partial(_chains, rng, form, _list_style(rng))
    return _after_example(
        rng, draw(chains, length), lambda: draw(1, int(rng.integers(2, length + 1)))
    )


def _chains(rng: Rng, form: Assignments, listed: "ListStyle", chains: int, length: int) -> Exercise:
    size = int(rng.integers(2, 6))
    names = distinct(lambda: letters(rng, size).upper(), chains * length)
    facts: list[list[str]] = []
    turns = []
    for number, value in enumerate(_values(rng, chains)):
        chain = names[number * length : (number + 1) * length]
        later = [form.variable.format(name=name, other=other) for other, name in pairwise(chain)]
        facts.append([form.number.format(name=chain[0], value=value), *later])
        turns.append((form.question.format(value=value), listed(chain)))
    return Exercise(tuple(_merged(rng, facts)), tuple(turns))


def _assignments(rng: Rng, words: Sequence[str]) -> Assignments:
    """Composes a form: names after a random word or nothing, with a mark between a variable and
    what it is set to.
    """
    word, other = (one(rng, words).lower() for _ in range(2))
    before = one(rng, ("", f"{word} ", f"{word.capitalize()} "))
    again = one(rng, ("", before, f"{other} "))
    mark, end = one(rng, MARKS), one(rng, ("", " ", ".", ";"))
    return Assignments(
        f"{before}{{name}}{mark} {{value}}{end}",
        f"{before}{{name}}{mark} {again}{{other}}{end}",
        one(rng, ASSIGNMENTS).question,
    )


def common_words(rng: Rng, room: int, words: Sequence[str]) -> Exercise:
    """A list in which a few words are repeated often and others seldom; the answer names the
    frequent ones.
    """
    items = max(16, min(room, LIST_ROOM) // 4)
    count = int(rng.integers(1, min(10, items // 16) + 1))
    question = one(
        rng,
        (
            f"The {count} words that are repeated most in this list:",
            f"Which {count} words occur most often? They are",
            f"Most frequent words ({count}):",
            f"Name the {count} words that were listed more often than the others. Answer:",
            ask(rng, words, f"{count} commonest words"),
            ask(rng, words, f"{count} words that were repeated most"),
        ),
    )
    between = one(rng, (", ", " ", "\n")) if rng.random() < 0.5 else None
    draw = partial(_repeated, rng, words, question, between, _list_style(rng), count)
    return _after_example(rng, draw(items), lambda: draw(max(6 * count, items // 16)))


def _repeated(
    rng: Rng,
    words: Sequence[str],
    question: str,
    between: str | None,
    listed: "ListStyle",
    count: int,
    items: int,
) -> Exercise:
    """``items`` words, of which ``count`` are repeated often; numbered if nothing is ``between``
    them.
    """
    seldom = int(rng.integers(1, 4))
    often = int(rng.integers(2 * seldom + 1, max(2 * seldom + 2, items // (2 * count))))
    rare = max(1, min(len(words) - count, (items - count * often) // seldom))
    drawn = [words[i] for i in rng.permutation(len(words))[: count + rare]]
    repeated = [*drawn[:count] * often, *drawn[count:] * seldom]
    repeated = [repeated[i] for i in rng.permutation(len(repeated))]
    first = {word: place for place, word in reversed(list(enumerate(repeated)))}
    fact = (
        " ".join(f"{number}. {word}" for number, word in enumerate(repeated, 1))
        if between is None
        else between.join(repeated)
    )
    return Exercise((fact,), ((question, listed(sorted(drawn[:count], key=first.__getitem__))),))


def frequent_words(rng: Rng, room: int, words: Sequence[str]) -> Exercise:
    """Made-up words with frequencies after Zipf's law; the answer names the three most frequent.
    Marks do not count.
    """
    mark = one(rng, UNCOUNTED) if rng.random() < 0.4 else ""
    question = one(
        rng,
        (
            "The three words with the highest counts:",
            "Which three words were used most? They were",
            "Top three words by frequency:",
            ask(rng, words, "three commonest words"),
            ask(rng, words, "three words that were written most"),
        ),
    )
    if mark and rng.random() < 0.5:
        leave_out = one(
            rng, ("Leave out {}.", "{} is not a word.", "Count no {}:", "Apart from {}:")
        ).format(mark)
        question = f"{leave_out} {question}"
    number = int(rng.integers(24, max(25, min(room, LIST_ROOM) // 8)))
    draw = partial(
        _coded,
        rng,
        question,
        mark,
        _list_style(rng),
        rng.uniform(1.5, 3.0),
        int(rng.integers(3, 7)),
    )
    return _after_example(
        rng, draw(number), lambda: draw(int(rng.integers(16, max(17, number // 8))))
    )


def _coded(
    rng: Rng,
    question: str,
    mark: str,
    listed: "ListStyle",
    exponent: float,
    length: int,
    number: int,
) -> Exercise:
    """``number`` words of ``length`` letters, or ``mark`` unless it is empty."""
    made = [
        *filter(None, [mark]),
        *distinct(partial(letters, rng, length), int(rng.integers(8, 200))),
    ]
    shares = np.arange(1, len(made) + 1, dtype=np.float64) ** -exponent
    drawn = rng.choice(len(made), size=number, p=shares / shares.sum())
    if mark and not drawn.any():
        drawn[-1] = 1  # marks alone have no answer
    counts = np.bincount(drawn, minlength=len(made))
    best = [i for i in np.argsort(-counts, kind="stable") if counts[i] and made[i] != mark][:3]
    return Exercise(
        (" ".join(made[i] for i in drawn),), ((question, listed([made[i] for i in best])),)
    )


def combine(rng: Rng, parts: Sequence[Exercise]) -> Exercise:
    """Returns one exercise with the facts and the turns of all ``parts`` in random order; those of
    each part keep theirs.
    """
    facts, turns = (
        _merged(rng, [getattr(part, name) for part in parts]) for name in ("facts", "turns")
    )
    return Exercise(
        tuple(facts), tuple(turns), next((part.example for part in parts if part.example), "")
    )


TASKS: dict[str, Task] = {
    "needles": needles,
    "several_values": several_values,
    "several_keys": several_keys,
    "pairs": pairs,
    "tracking": tracking,
    "common_words": common_words,
    "frequent_words": frequent_words,
}
# tasks whose questions say which facts they are about
COMBINED = ("needles", "several_values", "several_keys", "tracking")


def _wordings(rng: Rng, count: int, words: Sequence[str]) -> list[Wording]:
    """Draws one wording for all facts, or one for each."""
    if rng.random() < 0.5:
        return [compose(rng, words)] * count
    return [compose(rng, words) for _ in range(count)]


def _keys(rng: Rng, count: int, words: Sequence[str]) -> list[str]:
    """Draws distinct keys: pairs of a color and a thing, or one to three words, so that no fixed
    list of keys is learned.
    """
    between = one(rng, KEY_SEPARATORS)
    if count < 100 and rng.random() < IDENTIFIERS:
        return distinct(partial(identifier, rng), count)
    if rng.random() < 0.3:
        return [key.replace(" ", between) for key in distinct(partial(random_key, rng), count)]
    most = int(rng.integers(1, 4)) if count < 100 else 2
    least = 1 if count < 100 else 2

    def drawn() -> str:
        return between.join(one(rng, words) for _ in range(rng.integers(least, most + 1)))

    return distinct(drawn, count)


def _values(rng: Rng, count: int) -> list[str]:
    """Draws distinct numbers, of five digits in half of the exercises, seldom identifiers."""
    if count < 100 and rng.random() < IDENTIFIERS:
        return distinct(partial(identifier, rng), count)
    digits = ANSWER_DIGITS if rng.random() < 0.5 else int(rng.integers(4, 9))
    return distinct(partial(random_value, rng, digits), count)


def _after_example(rng: Rng, asked: Exercise, draw: Callable[[], Exercise]) -> Exercise:
    """Returns ``asked``, some of the time after a solved exercise that is drawn, too."""
    if rng.random() >= EXAMPLES:
        return asked
    small = draw()
    question, answer = small.turns[0]
    return replace(asked, example="\n".join((*small.facts, f"{question} {answer}")))


ListStyle = Callable[[list[str]], str]


def _list_style(rng: Rng) -> ListStyle:
    """Returns a function that writes lists as text, seldom numbered."""
    numbered, between = rng.random() < 0.2, one(rng, LIST_SEPARATORS)
    return lambda items: between.join(
        f"{number}. {item}" if numbered else item for number, item in enumerate(items, 1)
    )


def identifier(rng: Rng) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def letters(rng: Rng, length: int) -> str:
    return "".join(chr(ord("a") + int(letter)) for letter in rng.integers(26, size=length))


def _merged(rng: Rng, chains: Sequence[Sequence[T]]) -> list[T]:
    """Interleaves ``chains`` at random; each keeps its order."""
    order = rng.permutation([number for number, chain in enumerate(chains) for _ in chain])
    remaining = [iter(chain) for chain in chains]
    return [next(remaining[number]) for number in order]
