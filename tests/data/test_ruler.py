"""RULER's tasks: sizes, templates and answers, found again by independent means."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msattn.trainer.config import RULER_TASKS
from msattn.trainer.config.evaluate import QUESTION_FILES
from msattn.trainer.data.tasks import ruler
from msattn.trainer.data.tasks.ruler import TASKS, Haystack, Sample
from tests.data.texts import DRAW, TEXT, WORDS

DOCUMENTS = [" ".join(DRAW.choices(WORDS, k=60)) for _ in range(30)]
QUESTIONS = ruler.Questions(
    DOCUMENTS,
    [
        ruler.DocumentQuestion(
            f"What is in {i} and {i + 1}?", ["REPLY", f"no. {i}"], [i, i + 1], [i + 2, i + 3]
        )
        for i in range(20)
    ],
)
HAYSTACK = replace(Haystack.from_text(TEXT), questions=dict.fromkeys(QUESTION_FILES, QUESTIONS))


def count(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


def draw(name: str, length: int, seed: int = 0) -> Sample:
    (sample,) = TASKS[name].samples([(seed, 1)], HAYSTACK, length, count)
    return sample


def test_the_configuration_names_all_tasks() -> None:
    assert tuple(TASKS) == RULER_TASKS


@pytest.mark.slow
@given(st.sampled_from(RULER_TASKS), st.sampled_from([1000, 2000, 6000]), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_samples_nearly_fill_their_length(name: str, length: int, seed: int) -> None:
    samples = TASKS[name].samples([(seed, number) for number in range(3)], HAYSTACK, length, count)
    assert samples == TASKS[name].samples(
        [(seed, number) for number in range(3)], HAYSTACK, length, count
    )
    assert len({sample.prompt for sample in samples}) == 3
    for sample in samples:
        tokens = count(sample.prompt + sample.begun) + TASKS[name].new_tokens
        assert 0.85 * length < tokens <= length
        assert len(set(sample.answers)) == len(sample.answers)
        assert sample.score(" ".join(sample.answers).upper()) == 1.0
        assert sample.score(sample.answers[0]) == (
            1 if sample.one_suffices else 1 / len(sample.answers)
        )
        assert sample.score("nothing of it") == 0.0


@pytest.mark.parametrize("name", RULER_TASKS)
def test_no_sample_is_longer_than_the_shortest_length(name: str) -> None:
    """The shortest length that is accepted is that of the longest of the smallest samples."""
    seeds = [(0, number) for number in range(8)]
    with pytest.raises(ValueError, match="the shortest prompt has") as refused:
        TASKS[name].size(seeds, HAYSTACK, 1, count)
    length = int(re.findall(r"has (\d+) tokens", str(refused.value))[0])
    samples = TASKS[name].samples(seeds, HAYSTACK, length, count)
    assert (
        max(count(sample.prompt + sample.begun) for sample in samples) + TASKS[name].new_tokens
        <= length
    )


def test_a_haystack_needs_the_words_of_the_longest_sample() -> None:
    """With fewer words than the longest list has, the search for its size refuses the haystack, as
    drawing samples does.
    """
    seeds = [(0, 1)]
    needed = 10 + TASKS["cwe"].size(seeds, Haystack([], WORDS[:1500]), 12000, count)
    assert needed > 500
    enough = Haystack([], WORDS[: needed + needed // 50 + 1])
    assert len(TASKS["cwe"].samples(seeds, enough, 12000, count)) == 1
    for ask in (TASKS["cwe"].size, TASKS["cwe"].samples):
        with pytest.raises(ruler.TooFewWords, match="are needed"):
            ask(seeds, Haystack([], WORDS[: needed - needed // 50]), 12000, count)


@pytest.mark.parametrize(("length", "least"), [(250, 2), (1000, 5), (6000, 30)])
def test_questions_are_asked_about_their_documents_among_others(length: int, least: int) -> None:
    sample = draw("qa_1", length)
    numbered = re.findall(r"Document (\d+):\n(.*)\n\n", sample.prompt)
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    shown = [DOCUMENTS.index(text) for _, text in numbered]
    assert len(shown) >= least
    first = int(re.findall(r"What is in (\d+)", sample.prompt)[0])
    assert {first, first + 1} <= {*shown}
    assert {first + 2, first + 3} <= {*shown} or len(shown) < 4, (
        "documents that are near come first"
    )
    assert len({*shown}) == min(len(shown), 30)


@pytest.mark.parametrize("name", [name for name in RULER_TASKS if name.startswith("niah")])
def test_needles_state_the_answers_of_the_asked_keys(name: str) -> None:
    sample = draw(name, 3000)
    stated = re.findall(
        r"One of the special magic (numbers|uuids) for ([\w-]+) is: ([\w-]+)\.", sample.prompt
    )
    asked = re.search(
        r"special magic \w+ for (.+) mentioned in the provided text (?:is|are)$", sample.begun
    )
    assert asked is not None
    keys = re.split(r",? and |, ", asked[1])
    assert sorted(value for _, key, value in stated if key in keys) == sorted(sample.answers)
    expected = {"niah_multikey_1": (1, 4), "niah_multivalue": (4, 4), "niah_multiquery": (4, 4)}
    answers, needles = expected.get(name, (1, len(stated) if "multikey" in name else 1))
    assert (len(sample.answers), len(stated)) == (answers, needles)
    assert needles > 20 or name not in ("niah_multikey_2", "niah_multikey_3")
    pattern = (
        r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
        if name in ("niah_single_3", "niah_multikey_3")
        else r"\d{7}"
    )
    assert all(re.fullmatch(pattern, answer) for answer in sample.answers)


def test_variables_of_the_chain_are_asked_for() -> None:
    sample = draw("vt", 2000)
    asked = sample.prompt.rpartition("Memorize and track the chain(s)")[2]
    values: dict[str, str] = {}
    for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", asked):
        values[name] = values.get(value, value)
    (number,) = re.findall(r"assigned the value (\d{5}), they are: $", sample.begun)
    assert sample.answers == [name for name, value in values.items() if value == number]
    assert len(sample.answers) == 5


@pytest.mark.parametrize(("length", "often", "seldom"), [(2000, 6, 1), (6000, 30, 3)])
def test_common_words_are_repeated_as_often_as_in_the_paper(
    length: int, often: int, seldom: int
) -> None:
    sample = draw("cwe", length)
    listed = sample.prompt.rpartition("most often.\n")[2].partition("\nQuestion")[0]
    counts = Counter(re.findall(r"\d+\. (\w+)", listed))
    assert {counts[word] for word in sample.answers} == {often}
    assert {number for word, number in counts.items() if word not in sample.answers} == {seldom}
    assert len(sample.answers) == 10


def test_frequent_words_follow_the_noise() -> None:
    sample = draw("fwe", 4000)
    text = sample.prompt.partition("coded words. ")[2].partition("\nQuestion")[0]
    (noise, most), *others = Counter(text.split()).most_common(4)
    assert noise == "..."
    assert [word for word, _ in others] == sample.answers
    for rank, (_, number) in enumerate(others, start=2):
        assert abs(number - most / rank**2) <= 1


def test_a_haystack_of_few_words_is_refused() -> None:
    with pytest.raises(ValueError, match="4 different words, but 500 are needed"):
        Haystack.from_text("only four different words")
