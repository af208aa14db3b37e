"""Tasks of EleutherAI's lm_eval on the attached model: LongBench, InfiniteBench, RULER, BABILong,
or the user's own tasks.

Dense attention and every method answer the same samples, one at a time.
"""

import logging
import os
from collections.abc import Callable
from functools import partialmethod
from statistics import fmean
from typing import TYPE_CHECKING, Any

from msattn.trainer.config import EvalRunConfig
from msattn.trainer.config.values import require
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.compared import MethodSetting
from msattn.trainer.evaluate.intervals import mean_interval
from msattn.trainer.evaluate.job import Job
from msattn.trainer.evaluate.row import EvalRow, ratio_to
from msattn.trainer.evaluate.task import NAME, RATIO, TOKENS, Task
from msattn.trainer.evaluate.tasks.answers import read_and_spent
from msattn.trainer.evaluate.tasks.harness_tasks import TaskSamples, load_samples
from msattn.trainer.evaluate.tasks.timing import cost
from msattn.trainer.models.chat import uses_chat
from msattn.trainer.models.families import max_length
from msattn.trainer.models.loading import Loaded

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM

prepare = load_samples


def check_config(cfg: EvalRunConfig) -> None:
    """Raises UserError if there are no tasks, or no such folder."""
    tasks, folder = cfg.eval.harness.tasks, cfg.eval.harness.include_path
    require(bool(tasks), "eval.harness.tasks", tasks, "expected one or more tasks of lm_eval")
    exists = folder is None or os.path.isdir(os.path.expanduser(folder))
    require(
        exists, "eval.harness.include_path", folder, "expected a folder with YAML files of tasks"
    )


def run(job: Job) -> list[EvalRow]:
    """Returns rows of dense attention, each block selection, and each routing with its own number
    of probes.

    There is a row for each task, and for each length of a task that makes prompts of given lengths,
    or each bin. Raises UserError if a sample, with its answer, is longer than the model's
    positions, or a task has no metric with a number.
    """
    settings = job.cfg.eval.harness
    tried = job.compared.cases(job.loaded.model, settings.sparsities, settings.probes or None)
    rows: list[EvalRow] = []
    dense: dict[tuple[str, int | None], float] = {}
    for number, case in enumerate(tried, start=1):
        model = attached_model(
            job.loaded, job.bar(f"lm_eval, method {number} of {len(tried)}", None)
        )
        for asked in job.prepared["harness"]:
            group = asked.benchmark, asked.length
            key = "harness", number, case.method, case.setting, *group
            if (task_rows := job.kept.get(*key)) is None:
                task_rows = job.kept.add([_row(job, case, model, asked, dense.get(group))], *key)
            dense.setdefault(group, task_rows[0].score)
            rows += task_rows
    return rows


def attached_model(loaded: Loaded, advance: Callable[[], None]) -> "HFLM":
    """Returns lm_eval's view of the model: one sample at a time, without silent truncation."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs

    class AttachedModel(HFLM):
        def tok_batch_encode(
            self,
            strings: list[str],
            *args: Any,
            left_truncate_len: int | None = None,
            **options: Any,
        ) -> Any:
            ids, mask = super().tok_batch_encode(strings, *args, **options)
            self._check(ids.shape[1], left_truncate_len or self.max_length)
            return ids, mask

        def _loglikelihood_tokens(
            self, requests: Any, disable_tqdm: bool = True, override_bs: int | None = None
        ) -> Any:
            for _, context, continuation in requests:
                # the last token is only predicted
                self._check(len(context) + len(continuation) - 1, self.max_length)
            return super()._loglikelihood_tokens(
                requests, disable_tqdm=True, override_bs=override_bs
            )

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> Any:
            for request in requests:
                new = normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"]
                if new >= self.max_length:
                    raise UserError(
                        f"eval.harness: answers of {request.task_name} have up to {new} tokens, "
                        f"and the model has positions for {self.max_length}; extend the context "
                        "with model.rope_scaling, or leave the task out"
                    )
            return super().generate_until(requests, disable_tqdm=True)

        loglikelihood = partialmethod(HFLM.loglikelihood, disable_tqdm=True)
        loglikelihood_rolling = partialmethod(HFLM.loglikelihood_rolling, disable_tqdm=True)

        def _model_call(self, *args: Any, **options: Any) -> Any:
            advance()
            return super()._model_call(*args, **options)

        def _model_generate(self, *args: Any, **options: Any) -> Any:
            advance()
            return super()._model_generate(*args, **options)

        def _check(self, tokens: int, most: int) -> None:
            if tokens > most:
                raise UserError(
                    f"eval.harness: a sample has {tokens} tokens, and {most} fit the model's "
                    "positions with the answer; extend the context with model.rope_scaling, or "
                    "leave the task out"
                )

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model: Any = loaded.model
    tokenizer: Any = loaded.tokenizer
    return AttachedModel(
        pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=max_length(model.config)
    )


def _row(
    job: Job, case: MethodSetting, model: "HFLM", asked: TaskSamples, dense_score: float | None
) -> EvalRow:
    """Returns the row of a task; ``dense_score`` is that of dense attention, None for dense
    attention itself.
    """
    with case.attach() as sparse:
        with cost(job.loaded.model.device) as measured:
            results = _evaluate(
                job.cfg, model, asked, uses_chat(job.loaded.tokenizer, job.cfg.chat)
            )
        spent = read_and_spent(sparse, measured.seconds / len(asked.samples), measured.peak_mb)
    metric, filtered, score = main_metric(results["results"][asked.name], asked.length)
    answered = [sample for sample in results["samples"][asked.name] if sample["filter"] == filtered]
    values = [
        float(sample[metric]) for sample in answered if isinstance(sample.get(metric), int | float)
    ]
    name = "score" if metric == str(asked.length) else metric
    interval = mean_interval(values) if values and abs(fmean(values) - score) < 1e-6 else None
    extra = {
        "benchmark": asked.benchmark,
        **({"length": asked.length} if asked.length else {}),
        "latency_of": "a sample",
    }
    ratio = ratio_to(dense_score, score)
    fields: dict[str, Any] = {
        "ratio_to_dense": ratio,
        **spent,
        "samples": len(asked.samples),
        "extra": extra,
    }
    return EvalRow("harness", case.method, case.setting, score, name, interval=interval, **fields)


def _evaluate(cfg: EvalRunConfig, model: "HFLM", asked: TaskSamples, chat: bool) -> dict[str, Any]:
    from lm_eval.evaluator import evaluate

    asked.task.set_fewshot_seed(seed=cfg.seed)  # each method gets the same examples
    return evaluate(
        model,
        {"tasks": {asked.name: asked.task}},
        samples={asked.name: asked.samples},
        bootstrap_iters=0,
        log_samples=True,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,  # lm_eval's own default
    )


def main_metric(result: dict[str, Any], length: int | None = None) -> tuple[str, str, float]:
    """Returns name, filter and value of a task's first metric, or of the one that is named after
    ``length``, as RULER's are.

    Keys of ``result`` are such as ``acc,none`` and ``acc_stderr,none``.
    """
    scores = []
    for key, value in result.items():
        metric, comma, filtered = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
            scores.append((metric, filtered, float(value)))
    if not scores:
        raise UserError(f"eval.harness: the task {result.get('alias')} has no metric with a number")
    return next((score for score in scores if score[0] == str(length)), scores[0])


TASK = Task(
    heading="lm_eval",
    unit="samples per row",
    columns={"benchmark": ("benchmark", "{}")}
    | TOKENS
    | {
        "metric": NAME,
        "score": ("score", "{:.3f}"),
        "95 % interval": ("interval", "{:.3f}"),
        "vs dense": RATIO,
    },
    fits_positions=False,  # checked with the samples
)
