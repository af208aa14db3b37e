"""RULER: retrieval, tracking and counting in prompts of given lengths, answered by ``generate``.

A score is the share of the expected texts in an answer, averaged over samples and then over tasks.
All methods get the same prompts. Block selections read prompt and question sparsely and decode
densely; routings read the prompt densely and decode sparsely.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from msattn.trainer.config import RULER_TASKS, EvalRunConfig
from msattn.trainer.config.evaluate import QUESTION_FILES
from msattn.trainer.data.benchmarks import read_hotpotqa, read_squad
from msattn.trainer.data.chunking import encode_texts
from msattn.trainer.data.tasks import ruler
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.compared import Compared, MethodSetting
from msattn.trainer.evaluate.intervals import paired_means, stratified_interval, within
from msattn.trainer.evaluate.job import Job, Measurement, haystack
from msattn.trainer.evaluate.row import EvalRow, ratio_to
from msattn.trainer.evaluate.task import BOUNDS, RATIO, SHARE, TOKENS, Difference, Quality, Task
from msattn.trainer.evaluate.tasks.answers import Answers, Question, answer
from msattn.trainer.models.chat import around_prompt
from msattn.trainer.models.loading import Described, Loaded

QUESTION_READERS = {"qa_1": read_squad, "qa_2": read_hotpotqa}
EXCERPT = 400  # characters of the end of a prompt that the report shows


def run(job: Job) -> list[EvalRow]:
    hay = read_haystack(job.cfg)
    return [row for length in job.cfg.eval.ruler.lengths for row in _at_length(job, hay, length)]


def _at_length(job: Job, hay: ruler.Haystack, length: int) -> list[EvalRow]:
    cfg, settings, loaded = job.cfg, job.cfg.eval.ruler, job.loaded
    methods = job.compared.with_independent(settings.independent)
    samples = make_samples(cfg, loaded.tokenizer, hay, length)
    questions = [
        Question(
            encode(loaded.tokenizer, sample, cfg.chat),
            ruler.TASKS[name].new_tokens,
            partial(is_complete, sample),
        )
        for name, drawn in samples.items()
        for sample in drawn
    ]

    def measure(
        case: MethodSetting, advance: Callable[[], None], dense: EvalRow | None
    ) -> list[EvalRow]:
        return [
            as_row(
                case,
                samples,
                answer(loaded, questions, case, advance, settings.batch_tokens),
                length,
                dense,
            )
        ]

    plan = [
        Measurement(
            ("ruler", length, case.method, case.setting), partial(measure, case), len(questions)
        )
        for case in methods.cases(loaded.model, settings.sparsities, settings.probes, settings.keys)
    ]
    return job.rows(f"RULER, {length} tokens", plan)


def read_haystack(cfg: EvalRunConfig) -> ruler.Haystack:
    """Returns the text of ``eval.ruler.haystack``, or the held-out documents, and the files of
    questions.
    """
    settings = cfg.eval.ruler
    text = " ".join(document.text for document in haystack(cfg.data, settings.haystack))
    files = {
        task: (f"eval.ruler.{name}", getattr(settings, name))
        for task, name in QUESTION_FILES.items()
    }
    questions = {
        task: QUESTION_READERS[task](*files[task]) for task in settings.asked() if task in files
    }
    try:
        return replace(ruler.Haystack.from_text(text), questions=questions)
    except ValueError as error:
        raise UserError(f"eval.ruler.haystack: {error}") from error


def make_samples(
    cfg: EvalRunConfig, tokenizer: Any, hay: ruler.Haystack, length: int
) -> dict[str, list[ruler.Sample]]:
    samples, sizing = {}, _room_and_count(cfg, tokenizer, length)
    for name in cfg.eval.ruler.asked():
        with _refused(length, name):
            samples[name] = ruler.TASKS[name].samples(_seeds(cfg, length, name), hay, *sizing)
    return samples


def _seeds(cfg: EvalRunConfig, length: int, name: str) -> list[tuple[int, ...]]:
    number = list(ruler.TASKS).index(name)
    return [(cfg.seed, length, number, sample) for sample in range(cfg.eval.ruler.samples)]


def check_sizes(cfg: EvalRunConfig, model: Described | Loaded, methods: Compared) -> None:
    """Raises UserError if the haystack has too few words, or a length is too short for a task."""
    hay = read_haystack(cfg)
    for length in cfg.eval.ruler.lengths:
        sizing = _room_and_count(cfg, model.tokenizer, length)
        for name in cfg.eval.ruler.asked():
            with _refused(length, name):
                ruler.TASKS[name].size(_seeds(cfg, length, name), hay, *sizing)


@contextmanager
def _refused(length: int, task: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UserError(f"eval.ruler.lengths={length}: {task}: {error}") from error


def _room_and_count(
    cfg: EvalRunConfig, tokenizer: Any, length: int
) -> tuple[int, Callable[[str], int]]:
    """Returns ``length`` without the tokens of a chat template, and a function that counts the
    tokens of a text.
    """
    room = length - sum(map(len, around_prompt(tokenizer, cfg.chat)))
    return room, lambda text: len(encode_texts(tokenizer, [text])[0])


def encode(tokenizer: Any, sample: ruler.Sample, chat: bool | None) -> Tensor:
    """Returns the tokens ``[1, N]`` of a prompt and the begun answer, which is in the reply if
    there is a chat template.
    """
    opening, reply = around_prompt(tokenizer, chat)
    if not reply:
        return torch.tensor(
            [[*opening, *encode_texts(tokenizer, [sample.prompt + sample.begun])[0]]]
        )
    prompt, begun = encode_texts(tokenizer, [sample.prompt, sample.begun.lstrip()])
    return torch.tensor([[*opening, *prompt, *reply, *begun]])


def is_complete(sample: ruler.Sample, text: str) -> bool:
    """Returns True if further tokens cannot change the score."""
    return sample.score(text) == 1.0


def as_row(
    case: MethodSetting,
    samples: dict[str, list[ruler.Sample]],
    answers: Answers,
    length: int,
    dense: EvalRow | None,
) -> EvalRow:
    """Returns the row of a method; ``dense`` is that of dense attention, None for dense attention
    itself.
    """
    texts = iter(answers.texts)
    scores = {
        name: [sample.score(next(texts)) for sample in drawn] for name, drawn in samples.items()
    }
    by_task = {name: fmean(values) for name, values in scores.items()}
    score, interval = fmean(by_task.values()), within(stratified_interval(list(scores.values())))
    dense_score, dense_scores = (dense.score, dense.extra["scores"]) if dense else (score, scores)
    _, rise = paired_means(scores, dense_scores)
    extra = {
        "length": length,
        "latency_of": "a prompt and its answer, in batches",
        **by_task,
        "ratio_interval": [1 + bound / dense_score for bound in rise]
        if rise and dense_score
        else None,
        "scores": scores,
        "examples": examples(samples, answers.texts),
    }
    fields: dict[str, Any] = {**answers.spent, "ratio_to_dense": ratio_to(dense_score, score)}
    fields |= {"interval": interval, "samples": sum(map(len, scores.values())), "extra": extra}
    return EvalRow("ruler", case.method, case.setting, score, "RULER's average", **fields)


def examples(samples: dict[str, list[ruler.Sample]], texts: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the first prompt of each task with the expected and the given answer."""
    given = iter(texts)
    answered = [[(sample, next(given)) for sample in drawn] for drawn in samples.values()]
    return [
        {
            "prompt": f"… {(sample.prompt + sample.begun)[-EXCERPT:]}",
            "expected": ", ".join(sample.answers),
            "answer": text,
            "correct": is_complete(sample, text),
        }
        for (sample, text), *_ in answered
    ]


def paired_scores(one: EvalRow, other: EvalRow) -> Difference:
    """Returns the difference of two averages over the tasks of RULER, of the same prompts."""
    return one.score - other.score, paired_means(one.extra["scores"], other.extra["scores"])[1]


TASK = Task(
    heading="RULER's average",
    unit="prompts per row",
    columns=TOKENS
    | {
        "average": SHARE,
        "95 % interval": BOUNDS,
        "vs dense": RATIO,
        "vs dense, 95 %": ("ratio_interval", "{:.3f}"),
    }
    | {task: (task, "{:.1%}") for task in RULER_TASKS},
    text="haystack",
    files=tuple(QUESTION_FILES.values()),
    quality=Quality("RULER's average", paired_scores),
)
