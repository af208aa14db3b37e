"""Retrieval tasks: the answers follow from the facts, and sequences weight only what can be
predicted.
"""

import re
from collections import Counter
from functools import partial

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from msattn.trainer.data.tasks import exercises, grammar, sequences
from msattn.trainer.data.tasks.sequences import (
    NAMES,
    TaskSequences,
    answer_weight,
    crop_from,
    insert_spans,
    needle_prompt,
)
from msattn.trainer.data.tasks.wordings import HELD_OUT, TRAINING, Wording, enumerated
from tests.factory import embedded_tokenizer

TOKENIZER = embedded_tokenizer()
TEXT = np.array(
    TOKENIZER.encode(
        " some words that stand for text, and more of them" * 1000, add_special_tokens=False
    )
)
SEQUENCES = TaskSequences(TOKENIZER, crop_from(TEXT))
SEEDS, ROOMS = st.integers(0, 2**32), st.integers(64, 8192)
# an identifier or a number
VALUE = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\d+")


def text_of(ids: np.ndarray) -> str:
    return str(TOKENIZER.decode(ids))


def draw(name: str, seed: int, room: int) -> exercises.Exercise:
    return exercises.TASKS[name](np.random.default_rng(seed), room, SEQUENCES.words)


def holds(key: str, text: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(key)}(?![\w-])", text) is not None


def test_wordings_name_their_keys_and_values() -> None:
    assert len(TRAINING) >= 30
    assert len(HELD_OUT) == 8
    for wording in (*TRAINING, *HELD_OUT):
        assert wording.statement.count("{key}") >= 1
        assert wording.statement.count("{value}") == 1
        assert "{key}" in wording.question
        assert "{key}" in wording.plural
        assert "{value}" not in wording.question + wording.plural
    assert TRAINING[0].state("red fox", "12345") == f"{TRAINING[0].ask(['red fox'], 1)} 12345."


def test_held_out_wordings_are_not_trained() -> None:
    trained = {
        text
        for wording in TRAINING
        for text in (wording.statement, wording.question, wording.plural)
    }
    assert trained.isdisjoint(
        text
        for wording in HELD_OUT
        for text in (wording.statement, wording.question, wording.plural)
    )
    composed = {
        grammar.compose(np.random.default_rng(seed), SEQUENCES.words).statement
        for seed in range(1500)
    }
    assert len(composed) > 1000
    for held_out in HELD_OUT:
        # What stands between key and value decides how far a model must look.
        between = re.search(r"\{key\}(.*)\{value\}", held_out.statement)
        assert between is not None
        same = [statement for statement in composed if f"{{key}}{between[1]}{{value}}" in statement]
        assert len(between[1].split()) < 2 or not same


@given(SEEDS, ROOMS, st.sampled_from(["needles", "several_values", "several_keys"]))
@settings(max_examples=60, deadline=None)
def test_answers_of_needles_are_the_values_of_the_keys(seed: int, room: int, name: str) -> None:
    exercise = draw(name, seed, room)
    assert 1 <= len(exercise.facts) <= 16
    for question, answer in exercise.turns:
        values = VALUE.findall(answer)
        assert enumerated(values) == answer
        stated = [
            fact for fact in exercise.facts for value in VALUE.findall(fact) if value in values
        ]
        assert len(stated) == len(values) == len(set(values))
        # Each fact that states a value has a key of the question: words of both that no other
        # fact's key has.
        for fact in stated:
            assert any(holds(word, question) for word in re.findall(r"[\w-]+", fact))
    if name == "several_values":
        order = [value for fact in exercise.facts for value in VALUE.findall(fact)]
        for _, answer in exercise.turns:
            places = [order.index(value) for value in VALUE.findall(answer)]
            assert places == sorted(places)


@given(SEEDS, ROOMS)
@settings(max_examples=60, deadline=None)
def test_pairs_are_in_one_list(seed: int, room: int) -> None:
    exercise = draw("pairs", seed, room)
    (fact,) = exercise.facts
    assert 1 <= len(exercise.turns) <= 16
    assert all(
        len(re.findall(rf"(?<![\w-]){answer}(?![\w-])", fact)) == 1 for _, answer in exercise.turns
    )


@given(SEEDS, ROOMS)
@settings(max_examples=60, deadline=None)
def test_tracked_variables_hold_the_number(seed: int, room: int) -> None:
    exercise = draw("tracking", seed, room)
    values: dict[str, str] = {}
    for fact in exercise.facts:  # the names are the words in capitals
        name, *other = re.findall(r"\b[A-Z]{2,}\b", fact)
        values[name] = values[other[0]] if other else VALUE.findall(fact)[0]
    for question, answer in exercise.turns:
        (number,) = set(VALUE.findall(question))
        assert sorted(re.findall(r"[A-Z]{2,}", answer)) == sorted(
            name for name, value in values.items() if value == number
        )


@given(SEEDS, ROOMS, st.sampled_from(["tracking", "common_words", "frequent_words"]))
@settings(max_examples=60, deadline=None)
def test_examples_are_solved_exercises_of_the_same_form(seed: int, room: int, name: str) -> None:
    exercise = draw(name, seed, room)
    if not exercise.example:
        return
    question, answer = exercise.turns[0]
    found = re.search(
        f"(?:{VALUE.pattern})".join(map(re.escape, VALUE.split(question))), exercise.example
    )
    assert found is not None  # the same question, of another number
    fact, solution = exercise.example[: found.start()], exercise.example[found.end() :]
    if name == "tracking":
        (number,) = set(VALUE.findall(found[0]))
        assert len(re.findall(rf"(?<![\w-]){number}(?![\w-])", fact)) == 1
        assert set(re.findall(r"[A-Z]{2,}", solution)) == set(re.findall(r"\b[A-Z]{2,}\b", fact))
    else:
        counts = Counter(re.findall(r"[A-Za-z]+", fact))
        named = re.findall(r"[A-Za-z]+", solution)
        assert min(counts[word] for word in named) >= max(
            (counts[word] for word in counts.keys() - named), default=0
        )
    separators = {re.sub(r"\w+", "", listed.strip())[:1] for listed in (solution, answer)}
    assert len(separators - {""}) <= 1  # lists of one form


@given(SEEDS, ROOMS)
@settings(max_examples=60, deadline=None)
def test_common_and_frequent_words_are_those_with_the_highest_counts(seed: int, room: int) -> None:
    for name in ("common_words", "frequent_words"):
        exercise = draw(name, seed, room)
        counts = Counter(re.findall(r"[A-Za-z]+", exercise.facts[0]))
        answer = re.findall(r"[A-Za-z]+", exercise.turns[0][1])  # also if they are numbered
        assert answer == list(dict.fromkeys(answer))
        others = [count for word, count in counts.items() if word not in answer]
        assert min(counts[word] for word in answer) >= max(others, default=0)
        if name == "common_words":
            assert min(counts[word] for word in answer) > max(others)


def answer_slices(weights: np.ndarray) -> list[slice]:
    """Returns a slice for each run of answer weights."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (weights > 1).astype(int), [0]])))
    return [slice(start, stop) for start, stop in edges.reshape(-1, 2).tolist()]


@given(SEEDS, st.integers(64, 1100), st.sampled_from(NAMES))
@settings(max_examples=50, deadline=None)
def test_sequences_fill_their_length_and_weight_answers(seed: int, length: int, name: str) -> None:
    ids, weights = SEQUENCES.make(name, np.random.default_rng(seed), length)
    again, _ = SEQUENCES.make(name, np.random.default_rng(seed), length)
    assert ids.shape == weights.shape == (length,)
    assert np.array_equal(ids, again)
    assert 0 <= ids.min() <= ids.max() < len(TOKENIZER)
    assert set(weights) <= {0.0, 1.0, np.float32(answer_weight(length))}
    answers = answer_slices(weights)
    assert bool(answers) == (name != "copies") or (weights == 1).all()
    for answer in answers if name in ("needles", "pairs") else []:
        assert text_of(ids[answer]).strip() in text_of(ids[: answer.start])  # it was stated before


def test_long_sequences_have_several_exercises() -> None:
    """As many as they have thousands of tokens, often fewer; one if its question is about a
    list.
    """
    for name, most in (
        ("needles", 8 * 4),
        ("tracking", 3 * 4),
        ("frequent_words", 1),
        ("several_keys", 4),
    ):
        turns = []
        for seed in range(20):
            ids, weights = SEQUENCES.make(name, np.random.default_rng(seed), 8192)
            turns.append(len(answer_slices(weights)))
            assert len(ids) == 8192
        assert max(turns) <= most
        assert len(set(turns)) > 2 or most == 1
        assert max(turns) > most // 4


def test_tasks_that_fit_are_not_replaced_by_text() -> None:
    for name in exercises.TASKS:
        made = [SEQUENCES.make(name, np.random.default_rng(seed), 512)[1] for seed in range(12)]
        assert all((weights > 1).any() for weights in made)


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_copies_repeat_a_passage_and_weight_only_predictable_tokens(seed: int) -> None:
    starts = iter(range(0, 10**6, 1000))

    def crop(rng: np.random.Generator, length: int) -> np.ndarray:
        # tokens below 1000 are the passage's, above are text
        return np.arange(length) + next(starts)

    ids, weights = sequences.copies(np.random.default_rng(seed), 512, crop)
    in_passage = ids < 1000
    size = len(np.unique(ids[in_passage]))
    passages, weighed = ids[in_passage].reshape(-1, size), weights[in_passage].reshape(-1, size)
    assert len(passages) in (2, 3)
    assert (passages == passages[0]).all()
    shuffled = passages[0].tolist() != list(range(size))
    assert set(weighed[0]) == ({0.0} if shuffled else {1.0})
    assert (weighed[1:] == [0.0, 0.0] + [1.0] * (size - 2)).all()
    assert set(weights[~in_passage]) == {1.0}


@given(
    SEEDS,
    st.integers(300, 700),
    st.sampled_from([1, 3, 8]),
    st.none() | st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    st.sampled_from([TRAINING[0], *HELD_OUT]),
)
@settings(max_examples=60, deadline=None)
def test_needle_prompts_have_the_given_length_and_depth(
    seed: int, length: int, count: int, depth: float | None, wording: Wording
) -> None:
    make = partial(
        needle_prompt, length=length, crop=crop_from(TEXT), tokenizer=TOKENIZER, wording=wording
    )
    prompt = make(np.random.default_rng(seed), count=count, depth=depth)
    assert prompt.ids.shape == (length,)
    whole, answer = text_of(prompt.ids), text_of(prompt.ids[-prompt.answer_tokens :])
    assert re.fullmatch(r" \d{5}", answer)
    assert whole.endswith(f" {prompt.question}{answer}")
    assert whole.count(f" {prompt.statement}") >= 1
    assert answer.strip() in prompt.statement
    pattern = (
        re.escape(wording.statement)
        .replace(r"\{key\}", r"([a-z]+ [a-z]+)")
        .replace(r"\{value\}", r"(\d{5})")
    )
    hidden = re.findall(pattern, whole.removesuffix(f" {prompt.question}{answer}"))
    assert len(hidden) == len({key for key, _ in hidden}) == count
    if depth is not None and count == 1:
        before, after = whole.removesuffix(f" {prompt.question}{answer}").split(
            f" {prompt.statement}"
        )
        # words before the needle, and of the text
        first, total = before.count(" "), before.count(" ") + after.count(" ")
        assert first == round(depth * (total - 1))


def test_spans_at_one_position_keep_their_order() -> None:
    spans = [
        sequences.Span(at, np.array([id]), np.array([0.0], np.float32))
        for at, id in ((2, 7), (0, 8), (2, 9), (3, 6))
    ]
    ids, weights = insert_spans(np.array([1, 2, 3]), spans)
    assert ids.tolist() == [8, 1, 2, 7, 9, 3, 6]
    assert weights.tolist() == [0, 1, 1, 0, 0, 1, 0]
