"""Composed wordings: so many that a model learns to look for a key and the value beside it, not the
words between them.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from msattn.trainer.data.tasks.wordings import TRAINING, Wording

Rng = np.random.Generator
T = TypeVar("T")

_OPENINGS = (
    "|||||||Note that |Remember that |They say that |As we all know, |In the book, |On that day "
    "|It seems that |"
    "By the way, |Later, |At last |We learned that |Nobody doubts that |Listed here: |For the "
    "record, |In short, |"
    "Then |I believe that |In those years |As a rule, |Last week |The clerk wrote that |My uncle "
    "said that |"
    "Once more, "
)
_NOUNS = (
    "number code price age size score length depth badge seal label address entry total reading "
    "balance rank level "
    "page ticket lot prize tax date year row seat door gate rate share debt fee fine wage crowd "
    "crew army fleet herd "
    "speed volume area charge load limit signal channel port version index offset width record "
    "answer result value "
    "key name-plate stock harvest yield toll rent pension income count sum amount quota budget "
    "order invoice parcel "
    "letter chapter verse line room house street bill"
)
_VERBS = (
    "is|was|shows|reads|equals|bears|has|holds|gave|names|keeps|got|reached|fell to|opens "
    "with|starts at|counts|"
    "weighs|measures|costs|comes to|became|remained|amounts to|will be|should be|must be|could "
    "be|is set to|"
    "was fixed at|went up to|is close to|is known as|begins with|ends with|is written as|was sold "
    "for|was bought for|"
    "is given by|contains|needs|takes|adds up to|is said to be"
)
_ENDINGS = (
    "|||||||| in all| pounds| men| times| years| days| miles| tons| yards| pieces|, they said| at "
    "most| or so|"
    " before noon| every year| last spring|, as you know| in the end| since then| by law| again| "
    "altogether| dollars|"
    " units| bytes| seconds"
)
NOUNS = _NOUNS.split()
MARKS = (":", " =", " ->", " :=", "=", " is", ",", " -", " |", " <-", " ...", ";", "/", " ~", " @")
# The answer follows what is in braces; {fact} repeats the beginning of the statement, {noun} and
# {key} are its words.
_QUESTIONS = (
    "{fact}|{fact}|{fact}|Question: {fact} Answer:|Q: {noun} of {key}? A:|What {verb} {key}? It "
    "{verb}|"
    "Which {noun} belongs to {key}? The {noun}|Tell me the {noun} of {key}:|I forgot about {key}. "
    "The {noun} {verb}|"
    "{key}? Answer:|What do you know about {key}? {fact}|Look for {key}:|Do you remember {key}? "
    "It was|{key}:|"
    "Find {key} and repeat what it {verb}:|What is the {noun} that belongs to {key}? It "
    "is|{noun}, {key}:"
)
_PLURALS = (
    "The {noun} of {key} are|What do you know about {key}? In order:|Tell me all {noun} of "
    "{key}:|Q: {noun} of {key}? A:|"
    "List all of {key}:|Which {noun} belong to {key}? They are|Find {key} and repeat all {noun}:"
)
_ASKING = (
    "Which {noun}|What|To what {noun} did|In what {noun} did|How much|I forgot|I forgot the "
    "{noun} of|Tell me|Recall|Say|Q:|"
    "Question:|Who knows|Where was|Do you know what|Please find|About|For"
)
_INTRODUCTIONS = (
    "Keep in mind each {noun} below.|Some {noun} stands below, and there will be a question about "
    "it.|"
    "Read carefully. At the end you are asked for a {noun}.|Below are several pages. Learn every "
    "{noun} in them by heart.|"
    "Here comes a long story with a {noun} in it. Watch out for it.|Task: answer the last line "
    "after reading.|"
    "Pay attention to each {noun}, because we test you later.|Text:|Instruction: look for the "
    "{noun}, ignore the rest."
)
_REPLIES = (
    "It {verb}|It is|It|The {noun}|The {noun} {verb}|The {noun} of {key} {verb}|A:|Answer:|That "
    "{verb}|"
    "To|At|By|In|With|About|Up to|Exactly|They said|I think|Of course|Then|Namely"
)
OPENINGS, VERBS, ENDINGS = (texts.split("|") for texts in (_OPENINGS, _VERBS, _ENDINGS))
QUESTIONS, PLURALS, ASKING = (texts.split("|") for texts in (_QUESTIONS, _PLURALS, _ASKING))
INTRODUCTIONS, REPLIES = (texts.split("|") for texts in (_INTRODUCTIONS, _REPLIES))
ASKED = ("? ", "? ", "? ", ". ", ": ", ", ", " - ", "; ", "\n", " ")


def compose(rng: Rng, words: Sequence[str]) -> Wording:
    """Returns a wording of :data:`msattn.trainer.data.tasks.wordings.TRAINING`, or composes one;
    ``words`` fill it up.
    """
    kind = rng.random()
    if kind < 0.25:
        return TRAINING[rng.integers(len(TRAINING))]
    noun, verb = one(rng, NOUNS), one(rng, VERBS)
    if rng.random() < 0.3:
        noun = f"{_some(rng, words)} {noun}"
    before, after = _fact(rng, kind, noun, verb, words)
    fact = one(rng, OPENINGS) + before if kind < 0.8 else before
    form = one(rng, QUESTIONS) if rng.random() < 0.5 else _question(rng, words)
    question = form.format(fact=before, noun=noun, verb=verb, key="{key}")
    form = one(rng, PLURALS) if rng.random() < 0.5 else _question(rng, words)
    plural = form.format(noun=f"{noun}s", verb=one(rng, ("are", "were", verb)), key="{key}")
    return Wording(f"{fact} {{value}}{after}", question, plural)


def introduce(rng: Rng, words: Sequence[str]) -> str:
    """Returns an introduction to a text with facts: an instruction, which may contain random words,
    or random words alone.
    """
    return one(rng, (one(rng, INTRODUCTIONS), f"{_some(rng, words).capitalize()}.")).format(
        noun=one(rng, (one(rng, NOUNS), _some(rng, words)))
    )


def _fact(rng: Rng, kind: float, noun: str, verb: str, words: Sequence[str]) -> tuple[str, str]:
    """Returns the statement's text before the value, with ``{key}``, and after it."""
    if kind < 0.8:
        forms = (
            f"the {noun} of {{key}} {verb}",
            f"the {noun} for {{key}} {verb}",
            f"{{key}} {verb} the {noun}",
            f"{{key}} {verb}",
            f"{{key}}, {_some(rng, words)}, {verb}",
            f"{_some(rng, words)} {{key}} {verb} {noun}",
            f"the {noun} in the {one(rng, NOUNS)} of {{key}} {verb}",
            f"{{key}} and its {noun} {verb} {_some(rng, words)}",
        )
        return one(rng, forms), f"{one(rng, ENDINGS)}."
    if kind < 0.92:
        forms = (
            f"{{key}}{one(rng, MARKS)}",
            f"{noun} of {{key}}{one(rng, MARKS)}",
            f"{{key}}.{noun}{one(rng, MARKS)}",
        )
        return one(rng, forms), one(rng, ("", ";", ".", ",", " |"))
    return f"{_some(rng, words)} {{key}} {_some(rng, words)}", one(
        rng, (".", f" {_some(rng, words)}.", "\n")
    )


def ask(rng: Rng, words: Sequence[str], about: str) -> str:
    """Returns a question about ``about`` in random words, and the beginning of the answer."""
    return _question(rng, words).format(key=about, noun=one(rng, NOUNS), verb=one(rng, VERBS))


def _question(rng: Rng, words: Sequence[str]) -> str:
    """Returns a question about ``{key}``, often with random words around it, and the beginning of
    the answer.
    """
    before = one(rng, ASKING) if rng.random() < 0.6 else _some(rng, words).capitalize()
    if rng.random() < 0.4:
        before = f"{before} {_some(rng, words)}"
    after = f" {_some(rng, words)}" if rng.random() < 0.5 else ""
    return f"{before} {{key}}{after}{one(rng, ASKED)}{_reply(rng, words, after)}"


def _reply(rng: Rng, words: Sequence[str], after: str) -> str:
    """Returns the beginning of the answer; it may repeat the key and what follows it in the
    question.
    """
    kind = rng.random()
    if kind < 0.35:
        before = one(
            rng,
            (
                "The {noun}",
                "The {noun} for",
                "The {noun} of",
                "For",
                _some(rng, words).capitalize(),
            ),
        )
        follows = after if rng.random() < 0.6 else f" {_some(rng, words)}"
        return (
            f"{before} {{key}}{follows} {one(rng, ('{verb}', '{verb}', '{verb}:', 'as follows:'))}"
        )
    return one(rng, REPLIES) if kind < 0.8 else _some(rng, words).capitalize()


def _some(rng: Rng, words: Sequence[str]) -> str:
    """Returns one to five random words."""
    return " ".join(one(rng, words) for _ in range(rng.integers(1, 6)))


def one(rng: Rng, choices: Sequence[T]) -> T:
    return choices[int(rng.integers(len(choices)))]
