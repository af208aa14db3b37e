"""Tokens per second of ``generate``, with dense attention and with bucket routing, after caches of
random keys.

Decoding time depends on the number of keys that are read, so no prompt is needed and the cache may
be longer than the model's positions. ``generate`` runs as users call it, so its own overhead
counts. transformers uses PyTorch's SDPA kernels only with a copy of the cache for each token. Here
they are measured without this copy and, on a GPU, as a CUDA graph of one token, without any work of
the host.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from msattn.kernels.bench.timing import graphed, time_ms
from msattn.trainer.config import EvalRunConfig
from msattn.trainer.errors import UserError
from msattn.trainer.evaluate.compared import Compared, MethodSetting
from msattn.trainer.evaluate.job import Job
from msattn.trainer.evaluate.row import EvalRow, Setting
from msattn.trainer.evaluate.task import BATCH, LENGTH, RATE, SPEEDUPS, Task
from msattn.trainer.evaluate.tasks.timing import (
    ALWAYS_DENSE,
    TRANSFORMERS,
    cost,
    random_cache,
    random_dynamic_cache,
    random_router,
    speedups,
    with_growing_layers,
)
from msattn.trainer.memory import release_memory
from msattn.trainer.methods.base import DENSE, Method
from msattn.trainer.models.layer_attention import dense_attention
from msattn.trainer.models.loading import Described, Loaded
from msattn.trainer.models.tap import CACHE, tap
from msattn.trainer.models.timing import SDPA_BACKENDS, BackendUnavailable, TokenClock, use_backend
from msattn.trainer.serving.attach import Sparse

# not measured: buckets and index are built, kernels compile, the CUDA graph is captured
WARMUP_TOKENS = 4
TRANSFORMERS_TOKENS = 8  # measured for transformers alone, because its copies make each token slow
SAME_MACHINERY = DENSE.of("same cache and graphs")
MakeCache = Callable[[int, int], Cache]  # (batch, length) -> a cache of random keys
Attached = Callable[[], AbstractContextManager[Sparse | None]]


class DecodingRun(NamedTuple):
    """Tokens per second of all sequences, peak MiB, share of the keys that is read (None: dense),
    measured tokens of each.
    """

    rate: float
    peak_mb: float
    selectivity: float | None
    tokens: int
    note: str = ""


class DecodingCase(NamedTuple):
    """A method in a setting, what launches its tokens, a function of batch and length, and the
    largest batch to measure.
    """

    method: Method
    setting: Setting
    launched_by: str
    measure: Callable[[int, int], DecodingRun]
    largest_batch: int | None = None


def run(job: Job) -> list[EvalRow]:
    """Returns, for each length and batch, a row for each kind of dense attention and one for each
    setting of a routing.
    """
    settings, notes = job.cfg.eval.decoding, job.compared.notes
    cases = _cases(job)
    sizes = list(product(settings.lengths, settings.batches))
    advance = job.bar("decoding", len(cases) * len(sizes))
    rows: list[EvalRow] = []
    for length, batch in sizes:
        where = f"after {length:,} keys" + (f", batch {batch}" if batch > 1 else "")
        left_out = settings.max_keys is not None and batch * length > settings.max_keys
        if left_out:
            notes.append(
                f"decoding {where}: left out by eval.decoding.max_keys={settings.max_keys:,}"
            )
        done: list[tuple[DecodingCase, DecodingRun]] = []
        for case in cases:
            advance()
            if left_out or (case.largest_batch is not None and batch > case.largest_batch):
                continue
            release_memory()  # frees the last measurement's cache and graphs
            try:
                done.append((case, case.measure(batch, length)))
            except BackendUnavailable as reason:
                notes.append(f"{case.method} {where}: not timed: {reason}")
        notes.extend(
            f"{case.method} {where}: {result.note}" for case, result in done if result.note
        )
        dense = {
            case.method.variants[0]: result.rate for case, result in done if case.method.is_dense
        }
        rows += [as_row(case, batch, length, result, dense) for case, result in done]
    return rows


def check_sizes(cfg: EvalRunConfig, model: Described | Loaded, methods: Compared) -> None:
    probes, buckets = cfg.probes or 0, cfg.model.presets.num_buckets
    if not methods.bucket_routings and probes > buckets:
        raise UserError(
            f"probes={probes}: expected 0 to {buckets}, the number of buckets "
            f"(model.presets.num_buckets)"
        )
    for routing in methods.bucket_routings:
        routing.settings([probes])


def _cases(job: Job) -> list[DecodingCase]:
    model, cfg, routings = job.loaded.model, job.cfg, job.compared.bucket_routings
    if all(routing.router.artifact is None for routing in routings):
        routings = [random_router(cfg, model), *routings]
    tokens, seed = cfg.eval.decoding.tokens, cfg.seed
    growing = partial(random_dynamic_cache, model, seed=seed)  # transformers' default
    by_transformers = partial(
        measure_generate, model, growing, min(tokens, TRANSFORMERS_TOKENS), nullcontext
    )
    cases = [
        DecodingCase(
            TRANSFORMERS,
            Setting(),
            "generate",
            by_transformers,
            cfg.eval.decoding.transformers_batch,
        )
    ]
    # a pass more, before it stops
    fixed = partial(random_cache, model, new_tokens=WARMUP_TOKENS + tokens + 1, seed=seed)
    launched_by = "CUDA graph" if model.device.type == "cuda" else "host"
    for name, kernel in SDPA_BACKENDS[model.device.type].items():
        cases.append(
            DecodingCase(
                DENSE.of(name),
                Setting(),
                launched_by,
                partial(measure_kernel, model, kernel, fixed, tokens),
            )
        )
    same_machinery = partial(routings[0].attach, model, 0, dense_below=ALWAYS_DENSE)
    attached = [MethodSetting(SAME_MACHINERY, Setting(), same_machinery)]
    attached += [case for routing in routings for case in routing.cases(model)]
    return cases + [
        DecodingCase(
            case.method,
            case.setting,
            "generate",
            partial(measure_generate, model, fixed, tokens, case.attach),
        )
        for case in attached
    ]


def measure_generate(
    model: PreTrainedModel,
    make_cache: MakeCache,
    tokens: int,
    attached: Attached,
    batch: int,
    length: int,
) -> DecodingRun:
    """Measures the last ``tokens`` tokens of greedy generation after a cache of ``length`` keys of
    each sequence.
    """
    cache = make_cache(batch, length)
    ids = torch.zeros(batch, length + 1, dtype=torch.long, device=model.device)
    clock, new_tokens = TokenClock(), WARMUP_TOKENS + tokens
    generating: Any = model
    with use_backend(None), attached() as sparse, cost(model.device) as spent:
        generating.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **{CACHE: cache},
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
            # the cache that is passed is a StaticCache only until it is taken over
            disable_compile=True,
        )
    # The first time is that of the prompt.
    seconds = clock.times[new_tokens] - clock.times[WARMUP_TOKENS]
    stats = sparse.stats() if sparse else {}
    selectivity = None if stats.get("dense_by_choice") else stats.get("selectivity")
    fallbacks = stats.get("dense_fallbacks")
    note = (
        f"{fallbacks:,} passes of a layer were dense, because its keys have no buckets"
        if fallbacks
        else ""
    )
    return DecodingRun(batch * tokens / seconds, spent.peak_mb, selectivity, tokens, note)


def measure_kernel(
    model: PreTrainedModel,
    kernel: str | None,
    make_cache: MakeCache,
    tokens: int,
    batch: int,
    length: int,
) -> DecodingRun:
    """Measures dense attention with an SDPA kernel: one token as a CUDA graph or, on a CPU,
    ``tokens`` tokens.

    Raises BackendUnavailable if the kernel cannot run, or cannot be captured.
    """
    device, begin = model.device, torch.zeros(batch, 1, dtype=torch.long, device=model.device)
    with use_backend(kernel), tap(model, dense_attention):
        cache = with_growing_layers(model, make_cache(batch, length))
        if device.type == "cuda":
            with cost(device) as spent:
                step_ms = _graph_ms(partial(step, model, cache, begin), device)
            return DecodingRun(1e3 * batch / step_ms, spent.peak_mb, None, 1)
        token = begin
        for _ in range(WARMUP_TOKENS):
            token = next_token(model, cache, token)
        with cost(device) as spent:
            for _ in range(tokens):
                token = next_token(model, cache, token)
    return DecodingRun(batch * tokens / spent.seconds, spent.peak_mb, None, tokens)


def _graph_ms(call: Callable[[], object], device: torch.device) -> float:
    """Returns the milliseconds of a call as a CUDA graph; BackendUnavailable if it cannot be
    captured.
    """
    try:
        return time_ms(graphed(call, device.type), device.type).median
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise BackendUnavailable(f"no CUDA graph: {' '.join(str(error).split())}") from error


@torch.inference_mode()
def next_token(model: PreTrainedModel, cache: Cache, token: Tensor) -> Tensor:
    """Returns the greedy tokens after ``token [B, 1]``, and appends ``token`` to the cache."""
    generate: Any = model
    return generate(input_ids=token, **{CACHE: cache}, use_cache=True).logits[:, -1:].argmax(-1)


@torch.inference_mode()
def step(model: PreTrainedModel, cache: Any, token: Tensor) -> Tensor:
    """Runs :func:`next_token` and removes the token from the cache again, so that every call has
    the same shapes.
    """
    following_token = next_token(model, cache, token)
    cache.crop(-1)
    return following_token


def as_row(
    case: DecodingCase, batch: int, length: int, done: DecodingRun, dense: dict[str, float]
) -> EvalRow:
    """Returns the row of a run; ``dense`` holds the rates of dense attention with the same batch
    and length.
    """
    graph_rate = done.rate if case.launched_by == "CUDA graph" else None
    launched = {"launched_by": case.launched_by, "device_tokens_per_s": graph_rate}
    extra = {"length": length, "batch": batch, **launched, **speedups(dense, done.rate)}
    spent = {
        "latency_s": batch / done.rate,
        "peak_memory_mb": done.peak_mb,
        "selectivity": done.selectivity,
    }
    ratio = done.rate / max(dense.values()) if dense else None
    fields: dict[str, Any] = {
        "ratio_to_dense": ratio,
        **spent,
        "samples": done.tokens,
        "extra": extra,
    }
    return EvalRow("decoding", case.method, case.setting, done.rate, "tokens a second", **fields)


TASK = Task(
    heading="Tokens per second in decoding",
    unit="tokens per row",
    columns={"launched by": ("launched_by", "{}"), "batch": BATCH, "keys": LENGTH, "tokens/s": RATE}
    | SPEEDUPS,
    reads=("routings",),
    form="{:.4g} tokens/s",
    hidden=("latency",),
    timed=True,
    fits_positions=False,  # there is no prompt
)
