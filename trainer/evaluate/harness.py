"""Tasks of EleutherAI's lm_eval on the attached model: LongBench, InfiniteBench, RULER, BABILong, or tasks of the user's own.

Dense attention and every method answer the same samples, one after the other.
"""

import logging
from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING, Any

from msattn.trainer.config import EvalRunConfig
from msattn.trainer.errors import UserError, first_line
from msattn.trainer.evaluate.answers import Case, cases
from msattn.trainer.evaluate.cost import cost
from msattn.trainer.evaluate.intervals import mean_interval
from msattn.trainer.evaluate.methods import ComparedMethods
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.models.chat import around_prompt, uses_chat
from msattn.trainer.models.families import max_length

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM

    from msattn.trainer.models.loading import Loaded
    from msattn.trainer.progress import Progress

INSTALL = "pip install 'msattn[harness]'"
CODE_OF_ITS_OWN = (
    "the data set needs code of its own, which is not run; give its parquet files to a task in eval.harness.include_path"
)


def run(loaded: "Loaded", cfg: EvalRunConfig, methods: ComparedMethods, progress: "Progress") -> list[EvalRow]:
    """Returns a row for each task, of dense attention, each block selection, and each routing with its own number of probes.

    Raises
    ------
    UserError : as :func:`load_tasks`, or a sample is longer than the model's positions.
    """
    settings = cfg.eval.harness
    tasks = load_tasks(cfg, loaded.tokenizer)
    tried = cases(loaded, methods, settings.sparsities)
    rows: list[EvalRow] = []
    dense: dict[str, EvalRow] = {}
    for number, case in enumerate(tried, start=1):
        task = progress.add_task(f"lm_eval, method {number} of {len(tried)}", total=None)
        for row in _rows_of(loaded, cfg, case, tasks, lambda task=task: progress.advance(task), dense):
            dense.setdefault(row.extra["benchmark"], row)
            rows.append(row)
    return rows


def load_tasks(cfg: EvalRunConfig, tokenizer: Any) -> Any:
    """Returns the loaded tasks of ``eval.harness``, with their data.

    Raises
    ------
    UserError : lm_eval is not installed, a task is unknown or damaged, its data cannot be had or need code of their own, or the
        tokenizer has no chat template where one is asked for.
    """
    settings = cfg.eval.harness
    around_prompt(tokenizer, cfg.chat)
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise UserError(f"eval=harness: needs lm_eval; {INSTALL} ({error})") from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        manager = TaskManager(include_path=settings.include_path, include_defaults=False)
        if not set(settings.tasks) <= set(manager.all_tasks):
            manager = TaskManager(include_path=settings.include_path)  # reads lm_eval's own tasks, which takes seconds
        unknown = [name for name in settings.tasks if name not in manager.all_tasks]
    except Exception as error:  # whatever a damaged file of the user's folder raises
        raise UserError(f"eval.harness.include_path={settings.include_path}: {first_line(error)}") from error
    if unknown:
        raise UserError(f"eval.harness.tasks={unknown[0]}: no such task of lm_eval, and none in eval.harness.include_path")
    try:
        tasks = manager.load(list(settings.tasks))
        for task in tasks["tasks"].values():
            task.set_fewshot_seed(seed=cfg.seed)
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
    except Exception as error:  # of the hundreds of loaders and scripts that tasks bring
        reason = CODE_OF_ITS_OWN if "cript" in str(error) or "trust_remote_code" in str(error) else first_line(error)
        raise UserError(f"eval.harness.tasks={','.join(settings.tasks)}: {reason}") from error
    return tasks


def attached_model(loaded: "Loaded", advance: Callable[[], None]) -> "HFLM":
    """Returns lm_eval's view of the model: one sample at a time, and none is shortened in silence."""
    from lm_eval.models.huggingface import HFLM

    class AttachedModel(HFLM):
        def tok_batch_encode(self, strings: list[str], *args: Any, left_truncate_len: int | None = None, **options: Any) -> Any:
            ids, mask = super().tok_batch_encode(strings, *args, **options)
            self._check(ids.shape[1], left_truncate_len or self.max_length)
            return ids, mask

        def _loglikelihood_tokens(self, requests: Any, *args: Any, **options: Any) -> Any:
            for _, context, continuation in requests:
                self._check(len(context) + len(continuation), self.max_length)
            return super()._loglikelihood_tokens(requests, *args, **options)

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> Any:
            return super().generate_until(requests, disable_tqdm=True)

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
            return super().loglikelihood(requests, disable_tqdm=True)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> Any:
            return super().loglikelihood_rolling(requests, disable_tqdm=True)

        def _model_call(self, *args: Any, **options: Any) -> Any:
            advance()
            return super()._model_call(*args, **options)

        def _model_generate(self, *args: Any, **options: Any) -> Any:
            advance()
            return super()._model_generate(*args, **options)

        def _check(self, tokens: int, most: int) -> None:
            if tokens > most:
                raise UserError(
                    f"eval.harness: a sample has {tokens} tokens, and {most} fit the model's positions with the answer; "
                    "extend the context with model.rope_scaling, or leave the task out"
                )

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model: Any = loaded.model
    return AttachedModel(pretrained=model, tokenizer=loaded.tokenizer, batch_size=1, max_length=max_length(model.config))


def _rows_of(
    loaded: "Loaded", cfg: EvalRunConfig, case: Case, tasks: Any, advance: Callable[[], None], dense: dict[str, EvalRow]
) -> list[EvalRow]:
    from lm_eval.evaluator import evaluate

    settings = cfg.eval.harness
    chat = uses_chat(loaded.tokenizer, cfg.chat)
    model = attached_model(loaded, advance)
    with case.attach() as sparse:
        with cost(loaded.model.device) as spent:
            found = evaluate(model, tasks, settings.limit, bootstrap_iters=0, log_samples=True, apply_chat_template=chat)
        stats = sparse.stats() if sparse else {"sparsity": 0.0, "selectivity": None}
    sparsity = stats["sparsity"]
    rows = []
    for name, samples in found["samples"].items():
        metric, score = main_metric(found["results"][name])
        values = [float(sample[metric]) for sample in samples if isinstance(sample.get(metric), int | float)]
        ratio = score / dense[name].score if name in dense and dense[name].score else None
        rows.append(
            EvalRow(
                task="harness",
                method=case.method,
                setting=case.setting,
                score=score,
                score_name=metric,
                interval=mean_interval(values) if values and abs(fmean(values) - score) < 1e-6 else None,
                ratio_to_dense=ratio if name in dense else 1.0,
                sparsity=sparsity,
                selectivity=stats["selectivity"] if sparsity is None else 1 - sparsity,
                latency_s=spent.seconds / sum(map(len, found["samples"].values())),
                peak_memory_mb=spent.peak_mb,
                samples=len({sample["doc_id"] for sample in samples}),
                extra={"benchmark": name, "latency_of": "a sample, of all tasks"},
            )
        )
    return rows


def main_metric(result: dict[str, Any]) -> tuple[str, float]:
    """Returns name and value of a task's first metric; ``result`` has keys such as ``acc,none`` and ``acc_stderr,none``."""
    for key, value in result.items():
        metric = key.partition(",")[0]
        if "," in key and not metric.endswith("_stderr") and isinstance(value, int | float):
            return metric, float(value)
    raise UserError(f"eval.harness: the task {result.get('alias')} has no metric with a number")
