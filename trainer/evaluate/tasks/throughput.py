"""Requests that are served together: new tokens per second and time to the first token, dense and
sparse.

The engine is transformers' continuous batching: a paged cache, prompts in chunks beside the
decoding of others, as in a server. All requests arrive at once, with random prompts that share no
prefix, so the time to the first token includes the wait for other prompts. Dense attention is
measured with the model's own implementation, and with msattn's kernels over pages.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedModel

from msattn.trainer.config import EvalRunConfig, ThroughputConfig
from msattn.trainer.errors import UserError, only_errors
from msattn.trainer.evaluate.compared import Compared, MethodSetting
from msattn.trainer.evaluate.job import Job
from msattn.trainer.evaluate.row import EvalRow, Setting
from msattn.trainer.evaluate.task import BATCH, LENGTH, RATE, SECONDS, SPEEDUPS, Task
from msattn.trainer.evaluate.tasks.timing import (
    ALWAYS_DENSE,
    TRANSFORMERS,
    cost,
    random_gate,
    random_router,
    speedups,
)
from msattn.trainer.memory import release_memory
from msattn.trainer.methods.base import DENSE, Method
from msattn.trainer.models.families import text_config
from msattn.trainer.serving.attach import Sparse, attach

SAME_ENGINE = DENSE.of("same engine")


@dataclass(frozen=True)
class ThroughputRun:
    """Requests that are served together: seconds of all, new tokens of each, peak MiB, statistics
    of the attached model.

    ``first_tokens`` are the seconds from the arrival of each request to its first token, in
    ascending order.
    """

    seconds: float
    answers: list[list[int]]
    first_tokens: list[float]
    peak_mb: float
    stats: dict[str, Any]

    @property
    def rate(self) -> float:
        return sum(map(len, self.answers)) / self.seconds

    def first_token(self, share: float) -> float:
        """Returns the seconds within which this share of the requests have their first token."""
        return self.first_tokens[math.ceil(share * len(self.first_tokens)) - 1]


def run(job: Job) -> list[EvalRow]:
    """Returns, for each prompt length and number of requests, a row for each kind of dense
    attention and one that is sparse.
    """
    settings, model = job.cfg.eval.throughput, job.loaded.model
    cases = _cases(model, job.cfg, job.compared)
    sizes = list(product(settings.lengths, settings.requests))
    advance = job.bar("throughput", len(cases) * len(sizes))
    rows: list[EvalRow] = []
    for length, requests in sizes:
        prompts = random_prompts(model, requests, length, job.cfg.seed)
        done: list[tuple[MethodSetting, ThroughputRun]] = []
        for case in cases:
            release_memory()  # frees the last measurement's cache and graphs
            done.append((case, measure(model, case.attach, prompts, settings)))
            advance()
        dense = {
            case.method.variants[0]: result.rate for case, result in done if case.method.is_dense
        }
        rows += [as_row(case, length, requests, result, dense) for case, result in done]
    return rows


def _cases(model: PreTrainedModel, cfg: EvalRunConfig, methods: Compared) -> list[MethodSetting]:
    """Returns the methods to measure: dense attention, then the gate and the router together, or
    random ones.
    """
    block = next(
        (selection for selection in methods.block_selections if selection.gate), None
    ) or random_gate(cfg, model)
    routing = next(
        (routing for routing in methods.bucket_routings if routing.router.artifact), None
    ) or random_router(cfg, model)
    sparsity = block.select.sparsity
    (described, select), *_ = block.settings([] if sparsity is None else [sparsity])
    ((read, setting), *_) = routing.own_settings()
    attached = partial(
        attach,
        model,
        gate=block.gate,
        select=select,
        qmodel=routing.router,
        **routing.attach_options(setting),
    )
    prompts, tokens = block.method, routing.method
    trained = prompts.is_trained and tokens.is_trained
    both = Method(f"{prompts} + {tokens}", f"{prompts.label} + {tokens.label}", trained=trained)
    return [
        MethodSetting(TRANSFORMERS, Setting(), nullcontext),
        MethodSetting(SAME_ENGINE, Setting(), partial(attached, dense_below=ALWAYS_DENSE)),
        MethodSetting(both, Setting(f"{described}, {read}"), attached),
    ]


def random_prompts(
    model: PreTrainedModel, requests: int, length: int, seed: int
) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        text_config(model.config).vocab_size, (requests, length), generator=generator
    ).tolist()


def measure(
    model: Any,
    attached: Callable[[], AbstractContextManager[Sparse | None]],
    prompts: list[list[int]],
    settings: ThroughputConfig,
) -> ThroughputRun:
    """Serves greedy answers of ``settings.tokens`` tokens to ``prompts`` twice; the first time
    kernels compile.
    """
    from transformers import GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    greedy = GenerationConfig(max_new_tokens=settings.tokens, do_sample=False, eos_token_id=-1)
    with attached() as sparse, cost(model.device) as spent, only_errors("ContinuousBatchingLogger"):
        engine = model.continuous_batching_context_manager(
            generation_config=greedy,
            continuous_batching_config=_engine_config(prompts, settings),
            workload_hints=WorkloadHints(len(prompts[0]), settings.tokens, len(prompts)),
        )
        with engine as manager:
            with nullcontext() if sparse is None else sparse.statistics.unchanged():
                _answers(manager, prompts, settings.tokens)
            answers = _answers(manager, prompts, settings.tokens)
    begin = min(answer.created_time for answer in answers)
    end = max(answer.timestamps[-1] for answer in answers)
    return ThroughputRun(
        seconds=end - begin,
        answers=[answer.generated_tokens for answer in answers],
        first_tokens=sorted(answer.timestamps[0] - answer.created_time for answer in answers),
        peak_mb=spent.peak_mb,
        stats=sparse.stats() if sparse else {},
    )


def _engine_config(prompts: list[list[int]], settings: ThroughputConfig) -> Any:
    """Returns the engine's configuration, whose cache has room for all requests unless the number
    of pages is given.
    """
    pages = -(-(len(prompts[0]) + settings.tokens) // settings.page_size) + 1  # per request
    return Sparse.batching_config(
        page_size=settings.page_size,
        num_blocks=pages * len(prompts) if settings.pages is None else settings.pages,
        max_batch_tokens=settings.batch_tokens,
        max_requests_per_batch=len(prompts),
        allow_block_sharing=False,
    )


def _answers(manager: Any, prompts: list[list[int]], tokens: int) -> list[Any]:
    asked = manager.add_requests(prompts, max_new_tokens=tokens, record_timestamps=True)
    done: dict[str, Any] = {}
    while len(done) < len(asked):
        answer = manager.get_result(timeout=1)
        if answer is not None and answer.is_finished():
            done[answer.request_id] = answer
        elif answer is None and not manager.is_running():
            raise UserError("eval.throughput: the engine stopped; its message is above")
    for answer in done.values():
        if answer.error:
            raise UserError(f"eval.throughput: the engine refused a request: {answer.error}")
    return [done[request] for request in asked]


def as_row(
    case: MethodSetting, length: int, requests: int, done: ThroughputRun, dense: dict[str, float]
) -> EvalRow:
    """Returns the row of a run; ``dense`` holds the rates of dense attention with the same
    requests.
    """
    read = (
        {}
        if case.method.is_dense
        else {key: done.stats[key] for key in ("sparsity", "selectivity")}
    )
    half, most = done.first_token(0.5), done.first_token(0.99)
    first = {"first_token_p50_s": half, "first_token_p99_s": most}
    extra = {
        "length": length,
        "batch": requests,
        **first,
        "seconds": done.seconds,
        **speedups(dense, done.rate),
    }
    fields: dict[str, Any] = {
        "ratio_to_dense": done.rate / max(dense.values()),
        "latency_s": half,
        "extra": extra,
    }
    fields |= {**read, "peak_memory_mb": done.peak_mb, "samples": requests}
    return EvalRow(
        "throughput", case.method, case.setting, done.rate, "new tokens a second", **fields
    )


TASK = Task(
    heading="Requests served together",
    unit="requests per row",
    columns={"requests": BATCH, "prompt": LENGTH, "tokens/s": RATE}
    | SPEEDUPS
    | {"first token": ("first_token_p50_s", SECONDS), "99 %": ("first_token_p99_s", SECONDS)},
    form="{:.4g} tokens/s",
    hidden=("latency",),
    timed=True,
)
