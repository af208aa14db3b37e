"""Time to the first token with dense and sparse attention, its parts, and the break-even length.

Prompts are held-out text, because calibrated selections read another share of random tokens. A
model with random weights was trained on no text; its prompts are random tokens. Each prompt fills a
cache, as in ``generate``. Dense attention is called through the same hooks, with each of PyTorch's
fused SDPA kernels, so that the rest of the model is the same. Prompts that are prefilled in several
passes, and new tokens after cached ones, are measured with one setting of each method beside the
fastest dense kernel.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from msattn.trainer import data
from msattn.trainer.config import EvalRunConfig, LatencyConfig
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.compared import MethodSetting
from msattn.trainer.evaluate.job import Job
from msattn.trainer.evaluate.row import EvalRow, Setting
from msattn.trainer.evaluate.task import SECONDS, SPEEDUPS, TOKENS, Task
from msattn.trainer.evaluate.tasks.timing import (
    cost,
    random_cache,
    random_gate,
    with_growing_layers,
)
from msattn.trainer.methods.base import DENSE, Method
from msattn.trainer.models.families import decoder, text_config
from msattn.trainer.models.layer_attention import dense_attention
from msattn.trainer.models.loading import Described, Loaded
from msattn.trainer.models.tap import CACHE, LayerInputs, tap
from msattn.trainer.models.timing import SDPA_BACKENDS, BackendUnavailable, PhaseTimer, use_backend
from msattn.trainer.serving.contiguous.install import can_crop
from msattn.trainer.serving.graphs.fused import fused

# Attaches a method; ``stats`` of what it yields returns the sparsity since the context began and,
# with ``measure_time``, the seconds of each part.
Attached = Callable[..., AbstractContextManager[Any]]


class Situation(NamedTuple):
    """The first tokens of a prompt whose keys are cached already, and the most tokens of a pass
    (None: no limit).

    The name ends the setting of its rows; it is empty for a whole prompt in one pass.
    """

    name: str = ""
    cached: int = 0
    chunk: int | None = None


WHOLE_PROMPT = Situation()


@dataclass(frozen=True)
class LatencyRun:
    """Measurements of prompts of one length: seconds of each, peak MiB, and the parts of one more.

    ``parts`` are the seconds of selection and attention. That prompt takes ``timed_s``: no CUDA
    graph is timed in parts.
    """

    seconds: list[float]
    peak_mb: float
    sparsity: float | None
    parts: dict[str, float]
    timed_s: float

    @property
    def median_s(self) -> float:
        return median(self.seconds)


def run(job: Job) -> list[EvalRow]:
    """Returns, for each length, a row for each dense kernel and one for each block selection at
    each sparsity.

    Rows of the other situations follow.
    """
    model, settings, blocks = job.loaded.model, job.cfg.eval.latency, job.compared.block_selections
    if not any(block.gate for block in blocks):
        blocks = [random_gate(job.cfg, model), *blocks]
    kernels = SDPA_BACKENDS[model.device.type]
    dense = [
        MethodSetting(DENSE.of(name), Setting(), partial(_attach_dense, model, kernels[name]))
        for name in kernels
    ]
    cases = dense + [case for block in blocks for case in block.cases(model, settings.sparsities)]
    # Of each method, the setting with the configured sparsity.
    of_situations = dense + [
        block.cases(model, [block.select.sparsity or 0.0])[0] for block in blocks
    ]
    plan = [(length, WHOLE_PROMPT, cases) for length in settings.lengths]
    plan += [
        (length, situation, of_situations)
        for length in settings.lengths
        for situation in situations(length, settings)
    ]
    prompt, random_keys = job.prepared["latency"].to(model.device), job.cfg.model.init == "random"
    advance = job.bar("latency", sum(len(of_case) for _, _, of_case in plan))
    rows: list[EvalRow] = []
    for length, situation, measured in plan:
        ids = prompt[:, :length]
        done: list[tuple[MethodSetting, LatencyRun]] = []
        for case in measured:
            try:
                with use_backend(None):  # too little memory is a reason, not an error
                    done.append(
                        (
                            case,
                            measure(
                                model,
                                ids,
                                case.attach,
                                settings.seconds,
                                situation,
                                random_keys=random_keys,
                            ),
                        )
                    )
            except BackendUnavailable as reason:
                where = f"{length:,} tokens" + f", {situation.name}" * bool(situation.name)
                job.compared.notes.append(f"{case.method} at {where}: not timed: {reason}")
            advance()
        rows += _rows_of(done, length, situation)
    return _with_break_even(rows, job.compared.notes)


def prepare(cfg: EvalRunConfig, model: Described | Loaded) -> Tensor:
    """Returns the longest prompt, ``[1, N]``, whose beginnings are the others; UserError if the
    held-out text is shorter.
    """
    longest = max(cfg.eval.latency.lengths)
    if cfg.model.init == "random":
        vocabulary = text_config(model.config).vocab_size
        generator = torch.Generator().manual_seed(cfg.seed)
        return torch.randint(vocabulary, (1, longest), generator=generator)
    with_bos = model.tokenizer.bos_token_id is not None
    ids = data.encode(
        data.documents(cfg.data, heldout=True), model.tokenizer, at_least=longest, bos=with_bos
    )
    if len(ids) < longest:
        raise UserError(
            f"eval.latency.lengths={longest}: expected at most {len(ids)}, the tokens of the "
            f"held-out text"
        )
    return torch.from_numpy(ids[None, :longest]).long()


def situations(length: int, settings: LatencyConfig) -> list[Situation]:
    """Returns the situations, besides a whole prompt, in which ``length`` tokens are measured."""
    others = []
    if settings.chunk is not None and length >= 2 * settings.chunk:
        others.append(Situation(f"chunks of {settings.chunk}", chunk=settings.chunk))
    if settings.turn is not None and length >= 2 * settings.turn:
        others.append(
            Situation(
                f"{settings.turn} new after {length - settings.turn}", cached=length - settings.turn
            )
        )
    return others


def _rows_of(
    done: list[tuple[MethodSetting, LatencyRun]], length: int, situation: Situation
) -> list[EvalRow]:
    """Returns the rows of the runs of one length and situation; of dense kernels, all only for
    whole prompts.
    """
    dense = {
        case.method.variants[0]: result.median_s for case, result in done if case.method.is_dense
    }
    if situation is not WHOLE_PROMPT and dense:
        fastest = min(dense, key=lambda name: dense[name])
        dense = {fastest: dense[fastest]}
        done = [
            (case, result)
            for case, result in done
            if not case.method.is_dense or case.method.variants[0] == fastest
        ]
    return [as_row(case, length, result, dense, situation.name) for case, result in done]


@contextmanager
def _attach_dense(
    model: PreTrainedModel, kernel: str | None, *, measure_time: bool = False
) -> Iterator[SimpleNamespace]:
    timer = PhaseTimer(model.device)

    def timed_dense_attention(x: LayerInputs) -> Tensor:
        with timer.measure("attention") if measure_time else nullcontext():
            return dense_attention(x)

    # as in attached models
    with use_backend(kernel), tap(model, timed_dense_attention), fused(decoder(model)):
        seconds = partial(timer.seconds, "attention")
        yield SimpleNamespace(
            stats=lambda: {"sparsity": None, "selection_s": None, "attention_s": seconds()}
        )


@torch.inference_mode()
def first_token(
    model: PreTrainedModel, ids: Tensor, cache: Cache | None = None, chunk: int | None = None
) -> Tensor:
    """Returns the greedy token after ``ids [1, N]``, in passes of ``chunk`` tokens; keys and values
    go to a cache.
    """
    run_pass: Any = partial(model, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    *first_passes, last = ids.split(chunk or ids.shape[1], dim=1)
    for tokens in first_passes:
        run_pass(input_ids=tokens)
    return run_pass(input_ids=last).logits.argmax(-1)


def measure(
    model: PreTrainedModel,
    ids: Tensor,
    attached: Attached,
    seconds: float,
    situation: Situation = WHOLE_PROMPT,
    *,
    random_keys: bool,
) -> LatencyRun:
    """Runs a warm-up prompt, measures prompts until they took ``seconds``, and the parts of one
    more, whose timers cost time.

    Cached tokens are prefilled by the method itself, as in a conversation, or have random keys.
    They are those of the warm-up again, so that what an attached model keeps of them is known. The
    prompt whose parts are measured is alone in its context, so its sparsity includes no prefill of
    cached tokens.
    """
    new = ids[:, situation.cached :]
    next_cache = partial(_cache, model, ids, situation, random_keys)
    taken: list[float] = []
    peaks: list[float] = []
    with attached():
        cache = next_cache(None)
        first_token(model, new, cache, situation.chunk)
        while sum(taken) < seconds:
            cache = next_cache(cache)
            with cost(model.device) as spent:
                first_token(model, new, cache, situation.chunk)
            taken.append(spent.seconds)
            peaks.append(spent.peak_mb)
        cache = next_cache(cache)
    with attached(measure_time=True) as running:
        with cost(model.device) as timed:
            first_token(model, new, cache, situation.chunk)
        stats = running.stats()
    parts = {part: stats[f"{part}_s"] or 0.0 for part in ("selection", "attention")}
    return LatencyRun(taken, max(peaks), stats["sparsity"], parts, timed.seconds)


def _cache(
    model: PreTrainedModel, ids: Tensor, situation: Situation, random_keys: bool, used: Cache | None
) -> Cache | None:
    """Returns the cache before a prompt, ``used`` without its tokens if possible; None: the model
    creates one.
    """
    new_tokens = ids.shape[1] - situation.cached
    if situation.cached and used is not None and can_crop(used):
        used.crop(-new_tokens)
        return used
    if situation.cached and random_keys:
        return with_growing_layers(
            model, random_cache(model, 1, situation.cached, new_tokens=new_tokens, seed=0)
        )
    if situation is WHOLE_PROMPT:
        return None
    cache = with_growing_layers(model, DynamicCache(config=model.config))
    if situation.cached:
        first_token(model, ids[:, : situation.cached], cache)
    return cache


def as_row(
    case: MethodSetting, length: int, done: LatencyRun, dense: dict[str, float], situation: str = ""
) -> EvalRow:
    """Returns the row of a run; ``dense`` holds the seconds of each dense kernel at the same length
    and in its situation.
    """
    seconds, setting = done.median_s, replace(case.setting, situation=situation)
    extra: dict[str, Any] = {"length": length, "situation": situation}
    extra |= {f"{part}_s": value for part, value in done.parts.items()}
    extra |= {f"{part}_share": value / done.timed_s for part, value in done.parts.items()}
    extra |= {f"times_{name}": value / seconds for name, value in dense.items()}
    return EvalRow(
        "latency", case.method, setting, seconds, "seconds to the first token",
        ratio_to_dense=seconds / min(dense.values()) if dense else None,
        sparsity=done.sparsity, selectivity=None if done.sparsity is None else 1 - done.sparsity,
        latency_s=seconds, peak_memory_mb=done.peak_mb, samples=len(done.seconds), extra=extra,
    )  # fmt: skip


def _with_break_even(rows: list[EvalRow], notes: list[str]) -> list[EvalRow]:
    """Returns the rows with the break-even length of their setting, and appends a note on each
    setting to ``notes``.
    """
    lengths: dict[tuple[Method, Setting], int | None] = {}
    whole = [row for row in rows if not row.method.is_dense and not row.extra["situation"]]
    for method, setting in dict.fromkeys((row.method, row.setting) for row in whole):
        own = (row for row in rows if (row.method, row.setting) == (method, setting))
        ratios = {row.extra["length"]: row.ratio_to_dense for row in own if row.ratio_to_dense}
        lengths[method, setting] = tokens = break_even(ratios)
        where = "at no measured length" if tokens is None else f"from {tokens:,} tokens on"
        notes.append(f"{method}, {setting}: faster than the fastest dense attention {where}.")
    return [
        replace(row, extra=row.extra | {"break_even": lengths.get((row.method, row.setting))})
        for row in rows
    ]


def break_even(ratios: dict[int, float]) -> int | None:
    """Returns the length from which sparse attention stays faster than dense attention, or None.

    ``ratios`` maps each measured length to sparse over dense time. Between two lengths the ratio is
    interpolated linearly in the logarithms of both; there is no extrapolation below the shortest
    measured length.
    """
    lengths = sorted(ratios)
    slower = [i for i, length in enumerate(lengths) if ratios[length] >= 1]
    if not lengths or (slower and slower[-1] == len(lengths) - 1):
        return None
    if not slower:
        return lengths[0]
    low, high = lengths[slower[-1]], lengths[slower[-1] + 1]
    share = math.log(ratios[low]) / (math.log(ratios[low]) - math.log(ratios[high]))
    return math.ceil(low * (high / low) ** share)


TASK = Task(
    heading="Time to the first token",
    unit="prompts per row",
    columns=TOKENS
    | {"first token": ("score", SECONDS)}
    | SPEEDUPS
    | {part: (f"{part}_share", "{:.1%}") for part in ("selection", "attention")}
    | {"break-even": ("break_even", "{:,}")},
    reads=("blocks",),
    text="pretrained",
    form="{:.3g} s",
    hidden=("latency",),
    timed=True,
)
