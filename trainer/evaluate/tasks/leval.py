"""L-Eval: questions about long documents (An et al., arXiv 2307.11088), by the likelihood of the
expected answers.

A small model seldom writes an answer that a metric accepts, but its likelihood shows what reading
less costs. Each question is a prompt with the document; the score is the geometric mean of the
probabilities of the tokens of the expected answers, averaged over the questions of a file and then
over files. Of questions of choice the expected answer is its letter. Where that is a single one,
the question also counts as correct if no other option's letter is more likely.

Block selections read document and question in one sparse prefill, from which the answer's first
token is predicted; the others read every key, as in ``generate``. Routings read the document in a
dense prefill, then question and answer as new tokens, up to ``MAX_ROUTED_TOKENS`` in a pass. All
methods get the same prompts. A document that does not fit into the length loses its middle, so that
its beginning and its end stay.

With ``eval.leval.answers`` the model also answers: of exams all of the expected answer counts (the
same letters, or the text in the answer), of others the longest common subsequence of words
(``rouge``, ROUGE-L) or the words in common (F1). Block selections and routings read these prompts
as in RULER.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from msattn.trainer.config import EvalRunConfig
from msattn.trainer.data.benchmarks import LevalQuestion, read_leval
from msattn.trainer.data.chunking import encode_texts
from msattn.trainer.data.matching import contains_answer, normalized
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.compared import Compared, ComparedRouting, MethodSetting
from msattn.trainer.evaluate.intervals import paired_means, stratified_interval, wilson
from msattn.trainer.evaluate.job import Job, Measurement
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.evaluate.task import BOUNDS, RATIO, TOKENS, Difference, Quality, Task
from msattn.trainer.evaluate.tasks.answers import Question, answer, read_and_spent
from msattn.trainer.evaluate.tasks.timing import cost
from msattn.trainer.methods.buckets import MAX_ROUTED_TOKENS
from msattn.trainer.models import output_logits
from msattn.trainer.models.chat import around_prompt
from msattn.trainer.models.tap import run_backbone

if TYPE_CHECKING:
    from msattn.trainer.models.loading import Described, Loaded

BEGUN, LETTER = " Answer:", " Answer with the letter of the right option, or the letters of all."
MARK = f"[{re.escape(string.punctuation)}]"
# Punctuation. The group is what numbers keep of it: marks between a digit and a letter or digit,
# signs, and leading points.
PUNCTUATION = re.compile(
    rf"((?<=\d){MARK}(?=\w)|(?<=\w){MARK}(?=\d)|(?<!\w)-(?=[$.]*\d)|(?<![\w.])\.(?=\d))|{MARK}"
)
LEAST_DOCUMENT = 16  # tokens of a document that a prompt keeps


@dataclass(frozen=True)
class Asked:
    """A question as tokens: those of its document with what is before it, of the rest of the
    prompt, and of the answer.
    """

    task: str
    question: LevalQuestion
    document: Tensor  # [n]
    rest: Tensor
    gold: Tensor
    letters: Tensor  # the first token of each option


@dataclass(frozen=True)
class Likelihood:
    """Mean log probability of the tokens of an answer, and whether the most likely option is right;
    None without options.
    """

    log_mean: float
    right: bool | None


def run(job: Job) -> list[EvalRow]:
    """Returns rows of dense attention, of block selections, and of routings, at each length."""
    tasks = read_tasks(job.cfg)
    return [row for length in job.cfg.eval.leval.lengths for row in _at_length(job, tasks, length)]


def _at_length(job: Job, tasks: Mapping[str, list[LevalQuestion]], length: int) -> list[EvalRow]:
    cfg, settings, loaded = job.cfg, job.cfg.eval.leval, job.loaded
    asked = encode_questions(loaded.tokenizer, cfg, tasks, length)

    prompts = [
        Question(torch.cat([sample.document, sample.rest])[None], settings.max_new_tokens)
        for sample in asked
    ]

    def row(
        likelihoods: list[Likelihood],
        spent: dict[str, Any],
        case: MethodSetting,
        dense: EvalRow | None,
    ) -> EvalRow:
        scores = None
        if settings.answers:
            texts = answer(loaded, prompts, case, lambda: None).texts
            scores = [
                score(sample.question, text) for sample, text in zip(asked, texts, strict=True)
            ]
        return as_row(case, asked, likelihoods, scores, spent, length, dense)

    def read(
        case: MethodSetting, advance: Callable[[], None], dense: EvalRow | None
    ) -> list[EvalRow]:
        return [row(*prefilled(loaded, asked, case, advance), case, dense)]

    def decode(
        method: ComparedRouting,
        cases: list[MethodSetting],
        advance: Callable[[], None],
        dense: EvalRow | None,
    ) -> list[EvalRow]:
        results = decoded(loaded, asked, method, cases, advance)
        return [row(*result, case, dense) for case, result in zip(cases, results, strict=True)]

    plan = [
        Measurement(("leval", length, case.method, case.setting), partial(read, case), len(asked))
        for case in job.compared.prefill_cases(loaded.model, settings.sparsities)
    ]
    for method in job.compared.bucket_routings:
        cases = method.cases(loaded.model, settings.probes, settings.keys)
        key = "leval", length, method.method, *(case.setting for case in cases)
        plan.append(Measurement(key, partial(decode, method, cases), len(asked)))
    return job.rows(f"L-Eval, {length} tokens", plan)


def read_tasks(cfg: EvalRunConfig) -> dict[str, list[LevalQuestion]]:
    """Returns the questions of each file of ``eval.leval.path``, as many as
    ``eval.leval.questions``.
    """
    settings = cfg.eval.leval
    if settings.path is None:
        raise UserError("eval.leval.path=null: a jsonl file of L-Eval, or a folder or glob of them")
    tasks = read_leval("eval.leval.path", settings.path)
    return {name: _spread(questions, settings.questions) for name, questions in tasks.items()}


def _spread(questions: list[LevalQuestion], number: int | None) -> list[LevalQuestion]:
    count = min(number or len(questions), len(questions))
    return [questions[place * len(questions) // count] for place in range(count)]


def check_sizes(cfg: EvalRunConfig, model: "Described | Loaded", methods: Compared) -> None:
    """Raises UserError for files of another form, and for a length that is too short for a
    question.
    """
    tasks = read_tasks(cfg)
    for length in cfg.eval.leval.lengths:
        encode_questions(model.tokenizer, cfg, tasks, length)


def encode_questions(
    tokenizer: Any, cfg: EvalRunConfig, tasks: Mapping[str, list[LevalQuestion]], length: int
) -> list[Asked]:
    """Returns the questions of all tasks as tokens, of which each has at most ``length`` with its
    answer.
    """
    opening, reply = around_prompt(tokenizer, cfg.chat)
    documents: dict[str, list[int]] = {}  # several questions share a document
    settings, encoded = cfg.eval.leval, []
    for name, questions in tasks.items():
        for question in questions:
            if question.document not in documents:
                (documents[question.document],) = _encode(tokenizer, [question.document])
            asked = f"\n\nQuestion: {question.instruction}{LETTER * bool(question.options)}"
            text, begun, gold = _encode(
                tokenizer, [asked, BEGUN.lstrip() if reply else BEGUN, f" {question.gold}"]
            )
            rest = [*text, *reply, *begun]
            room = (
                length
                - len(opening)
                - len(rest)
                - max(len(gold), settings.max_new_tokens * settings.answers)
            )
            if room < LEAST_DOCUMENT:
                raise UserError(
                    f"eval.leval.lengths={length}: {name} has a question of {len(rest)} and an "
                    f"answer of {len(gold)} tokens, which leave no room for its document"
                )
            document = without_middle(documents[question.document], room)
            letters = [
                tokens[0]
                for tokens in _encode(tokenizer, [f" {letter}" for letter in question.options])
            ]
            parts = map(torch.tensor, ([*opening, *document], rest, gold, letters))
            encoded.append(Asked(name, question, *parts))
    return encoded


def _encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return [list(map(int, ids)) for ids in encode_texts(tokenizer, texts)] if texts else []


def without_middle(tokens: Sequence[int], most: int) -> list[int]:
    """Returns at most ``most`` tokens, half of them from the beginning and half from the end."""
    if len(tokens) <= most:
        return list(tokens)
    return [*tokens[: most - most // 2], *tokens[len(tokens) - most // 2 :]]


@torch.inference_mode()
def prefilled(
    loaded: "Loaded", asked: list[Asked], case: MethodSetting, advance: Callable[[], None]
) -> tuple[list[Likelihood], dict[str, Any]]:
    """Returns the likelihoods after a prefill of each prompt with the attention of ``case``, and
    what was read and spent.
    """
    device, likelihoods, spent = loaded.model.device, [], []
    if device.type == "cuda":  # not timed: kernels compile at their first call
        with case.attach():
            _read(loaded, DynamicCache(), asked[0].document)
    for sample in asked:
        cache = DynamicCache()
        with case.attach() as sparse:
            with cost(device) as measured:
                hidden = [_read(loaded, cache, torch.cat([sample.document, sample.rest]))[:, -1:]]
            spent.append(read_and_spent(sparse, measured.seconds, measured.peak_mb))
        if len(sample.gold) > 1:  # nothing is attached: new tokens read every key
            hidden.append(_read(loaded, cache, sample.gold[:-1]))
        likelihoods.append(likelihood(loaded, torch.cat(hidden, dim=1), sample))
        advance()
    return likelihoods, mean_spent(spent)


@torch.inference_mode()
def decoded(
    loaded: "Loaded",
    asked: list[Asked],
    method: ComparedRouting,
    plan: list[MethodSetting],
    advance: Callable[[], None],
) -> list[tuple[list[Likelihood], dict[str, Any]]]:
    """Returns the result of :func:`prefilled` for each setting; all share one dense prefill of each
    document.
    """
    by_case: list[list[Likelihood]] = [[] for _ in plan]
    spent: list[list[dict[str, Any]]] = [[] for _ in plan]
    for sample in asked:
        cache, steps = DynamicCache(), torch.cat([sample.rest, sample.gold])[:-1]
        with method.attach(loaded.model, 0):
            _read(loaded, cache, sample.document)
        for case, likelihoods, spent_by in zip(plan, by_case, spent, strict=True):
            with case.attach() as sparse:
                with cost(loaded.model.device) as measured:
                    hidden = [_read(loaded, cache, part) for part in steps.split(MAX_ROUTED_TOKENS)]
                spent_by.append(
                    read_and_spent(sparse, measured.seconds / len(steps), measured.peak_mb)
                )
            cache.crop(-len(steps))
            likelihoods.append(
                likelihood(loaded, torch.cat(hidden, dim=1)[:, -len(sample.gold) :], sample)
            )
        advance()
    return [(of_case, mean_spent(parts)) for of_case, parts in zip(by_case, spent, strict=True)]


def mean_spent(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the means of the results of ``read_and_spent`` of questions, and their largest
    memory.
    """
    means = {
        name: None if parts[0][name] is None else fmean(part[name] for part in parts)
        for name in ("sparsity", "selectivity", "latency_s")
    }
    return {**means, "peak_memory_mb": max(part["peak_memory_mb"] for part in parts)}


def _read(loaded: "Loaded", cache: DynamicCache, tokens: Tensor) -> Tensor:
    """Returns the last hidden states ``[1, N, hidden]`` of further tokens ``[N]`` of the sequence
    in ``cache``.
    """
    ids = tokens[None].to(loaded.model.device)
    return run_backbone(loaded.model, ids, cache)


def likelihood(loaded: "Loaded", hidden: Tensor, asked: Asked) -> Likelihood:
    """Returns the likelihood of the expected answer, from the states ``[1, n, hidden]`` that
    predict its tokens.
    """
    logs = output_logits(loaded.model, hidden[0]).float().log_softmax(-1).cpu()
    right = None
    if asked.question.options and len(asked.question.gold) == 1:
        likeliest = int(logs[0, asked.letters].argmax())
        right = asked.question.options[likeliest] == asked.question.gold
    return Likelihood(logs.gather(-1, asked.gold[:, None]).double().mean().item(), right)


def score(question: LevalQuestion, text: str) -> float:
    """Returns the score of a generated answer, in [0, 1]."""
    if question.options:
        given = re.match(r"\W*([A-Z]+)\b", text)
        return float(given is not None and {*given[1]} == {*question.gold})
    if question.metric == "exam":
        return float(contains_answer(plain_words(text), plain_words(question.gold)))
    given, gold = words(text), words(question.gold)
    common = (
        longest_common(given, gold)
        if question.metric == "rouge"
        else sum((Counter(given) & Counter(gold)).values())
    )
    return 2 * common / (len(given) + len(gold)) if common else 0.0


def words(text: str) -> list[str]:
    """Returns the words of a text without case, punctuation and articles, as SQuAD's F1 compares
    them.
    """
    return _without_articles(text.lower().translate(str.maketrans("", "", string.punctuation)))


def plain_words(text: str) -> str:
    """Returns a text like :func:`words`, but with the signs and points of numbers: -5 and 3.5 do
    not become 5 and 35.
    """
    return " ".join(_without_articles(PUNCTUATION.sub(r"\1", normalized(text))))


def _without_articles(text: str) -> list[str]:
    return [word for word in text.split() if word not in ("a", "an", "the")]


def longest_common(one: Sequence[str], other: Sequence[str]) -> int:
    """Returns the length of the longest common subsequence."""
    best = [0] * (len(other) + 1)
    for word in one:
        before = 0
        for place, another in enumerate(other, start=1):
            before, best[place] = (
                best[place],
                before + 1 if word == another else max(best[place], best[place - 1]),
            )
    return best[-1]


def as_row(
    case: MethodSetting,
    asked: list[Asked],
    likelihoods: list[Likelihood],
    scores: list[float] | None,
    spent: dict[str, Any],
    length: int,
    dense: EvalRow | None,
) -> EvalRow:
    """Returns the row of a method; ``dense`` is that of dense attention, None for dense attention
    itself.

    The interval of the ratio is that of the paired differences of the same questions.
    """
    logs = _by_task(asked, [result.log_mean for result in likelihoods])
    log_mean, spread = fmean(map(fmean, logs.values())), stratified_interval(list(logs.values()))
    rise, bounds = (0.0, (0.0, 0.0)) if dense is None else paired_means(logs, dense.extra["logs"])
    choices = [result.right for result in likelihoods if result.right is not None]
    extra: dict[str, Any] = {
        "length": length,
        "latency_of": "a decoded token" if spent["sparsity"] is None else "a prefill",
        "choices": fmean(choices) if choices else None,
        "choices_interval": list(wilson(sum(choices), len(choices))) if choices else None,
        **{task: math.exp(fmean(values)) for task, values in logs.items()},
        "ratio_interval": bounds and [math.exp(bound) for bound in bounds],
        "logs": logs,
    }
    if scores is not None:
        by_task = _by_task(asked, scores)
        extra |= {"answers": fmean(map(fmean, by_task.values())), "scores": by_task}
    interval = spread and (math.exp(spread[0]), min(1.0, math.exp(spread[1])))
    fields: dict[str, Any] = {
        "ratio_to_dense": math.exp(rise),
        "samples": len(asked),
        "extra": extra,
        **spent,
    }
    return EvalRow(
        "leval",
        case.method,
        case.setting,
        math.exp(log_mean),
        "likelihood of a token",
        interval=interval,
        **fields,
    )


def _by_task(asked: list[Asked], values: Sequence[float]) -> dict[str, list[float]]:
    by_task: dict[str, list[float]] = {}
    for sample, value in zip(asked, values, strict=True):
        by_task.setdefault(sample.task, []).append(value)
    return by_task


def paired_likelihoods(one: EvalRow, other: EvalRow) -> Difference:
    """Returns the relative difference of two likelihoods of the same answers."""
    rise, bounds = paired_means(one.extra["logs"], other.extra["logs"])
    return math.expm1(rise), bounds and (math.expm1(bounds[0]), math.expm1(bounds[1]))


TASK = Task(
    heading="L-Eval, expected answers",
    unit="questions per row",
    columns=TOKENS
    | {
        "likelihood": ("score", "{:.2%}"),
        "95 % interval": BOUNDS,
        "vs dense": RATIO,
        "vs dense, 95 %": ("ratio_interval", "{:.3f}"),
        "choices": ("choices", "{:.1%}"),
        "choices, 95 %": ("choices_interval", "{:.0%}"),
        "own answers": ("answers", "{:.1%}"),
    },
    files=("path",),
    quality=Quality(
        "likelihood of expected answers",
        paired_likelihoods,
        value=lambda row: row.ratio_to_dense or 0.0,
    ),
)
