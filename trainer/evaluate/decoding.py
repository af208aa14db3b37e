"""Tokens per second in decoding, with dense attention and with bucket routing, after caches of random keys instead of a prompt.

Decoding time depends on the number of keys that are read, so no prompt is needed and the cache may be longer than the model's
positions. All layers, also dense ones, use a cache with free positions, because transformers' cache copies all keys for each
token.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from msattn.kernels.bench.timing import graphed, time_ms
from msattn.trainer import models
from msattn.trainer.config import EvalRunConfig
from msattn.trainer.evaluate.cost import cost
from msattn.trainer.evaluate.latency import DENSE_PREFIX
from msattn.trainer.evaluate.methods import BucketRoutingMethod, ComparedMethods, Router
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.models.sdpa import SDPA_BACKENDS, BackendUnavailable, use_backend
from msattn.trainer.models.tap import LayerInputs, dense_attention, tap
from msattn.trainer.saap.kmeans import KMeans
from msattn.trainer.saap.qmodel import QModel
from msattn.trainer.serving.cache import BucketLayer, install_layers

if TYPE_CHECKING:
    from rich.progress import Progress
    from transformers import Cache, PreTrainedModel

    from msattn.trainer.attach import Sparse
    from msattn.trainer.models.loading import Loaded

WARMUP_TOKENS = 3  # not measured: kernels compile and memory is allocated


class DecodingCase(NamedTuple):
    """A method in a setting, the SDPA ``kernel`` that it uses, and a context manager that attaches it to the model.

    The cache keeps the buckets of ``router``, except in ``dense_layers``.
    """

    method: str
    setting: str
    kernel: str | None
    router: Router
    dense_layers: tuple[int, ...]
    attached: Callable[[], AbstractContextManager["Sparse | None"]]


@dataclass(frozen=True)
class DecodingRun:
    """Measurements of one method after one cache length.

    Attributes
    ----------
    rate : tokens per second, each launched by the host.
    device_rate : tokens per second of a CUDA graph; None on a CPU, or for the reason in ``note``.
    peak_mb : peak memory in MiB.
    selectivity : share of the keys that is read.
    """

    rate: float
    device_rate: float | None
    peak_mb: float
    selectivity: float | None
    note: str = ""


def run(loaded: "Loaded", cfg: EvalRunConfig, methods: ComparedMethods, progress: "Progress") -> list[EvalRow]:
    """Returns, for each length, a row for each dense kernel and one for each routing with ``probes`` buckets."""
    model, settings = loaded.model, cfg.eval.decoding
    routings = methods.bucket_routings or [_untrained_router(cfg, model)]
    cases = [
        DecodingCase(f"{DENSE_PREFIX}{name}", "", kernel, routings[0].router, (), partial(tap, model, dense_attention))
        for name, kernel in SDPA_BACKENDS[model.device.type].items()
    ]
    for routing in routings:
        ((label, probes),) = routing.settings([routing.probes])
        attached = partial(routing.attach, model, probes)
        cases.append(DecodingCase(routing.name, label, None, routing.router, routing.dense_layers, attached))
    bar = progress.add_task("decoding", total=len(cases) * len(settings.lengths))
    rows: list[EvalRow] = []
    for length in settings.lengths:
        done: list[tuple[DecodingCase, DecodingRun]] = []
        for case in cases:
            try:
                with use_backend(case.kernel):
                    done.append((case, measure(model, case, length, cfg)))
            except BackendUnavailable as reason:
                methods.notes.append(f"{case.method} after {length:,} keys: not timed: {reason}")
            progress.advance(bar)
        methods.notes.extend(f"{case.method} after {length:,} keys: {each.note}" for case, each in done if each.note)
        dense = {case.method.removeprefix(DENSE_PREFIX): each for case, each in done if case.method.startswith(DENSE_PREFIX)}
        rows += [as_row(case.method, case.setting, length, each, dense, settings.tokens) for case, each in done]
    return rows


def _untrained_router(cfg: EvalRunConfig, model: "PreTrainedModel") -> BucketRoutingMethod:
    """Returns untrained classifiers over random centroids, which have the cost of trained ones."""
    config, presets = model.config, cfg.model.presets
    layers, heads = models.num_layers(config), models.num_kv_heads(config)
    generator = torch.Generator().manual_seed(cfg.seed)
    centroids = torch.randn(layers, heads, presets.num_buckets, models.head_dim(config), generator=generator)
    partition = KMeans(F.normalize(centroids, dim=-1), list(range(layers)))
    qmodel = QModel(partition, heads, presets.qmodel_hidden, seed=cfg.seed)
    router = qmodel.requires_grad_(False).eval().to(model.device)
    return BucketRoutingMethod.configured("classifier, untrained", router, cfg)


@torch.inference_mode()
def filled_cache(model: "PreTrainedModel", router: Router, dense_layers: tuple[int, ...], length: int, seed: int) -> "Cache":
    """Returns a cache of ``length`` random keys and values, with buckets of ``router`` except in ``dense_layers``."""
    from transformers import DynamicCache

    config = model.config
    cache: Any = DynamicCache(config=config)
    install_layers(cache, router, num_layers=models.num_layers(config), dense_layers=dense_layers)
    generator = torch.Generator(model.device).manual_seed(seed)
    size = 2, 1, models.num_kv_heads(config), length, models.head_dim(config)
    for number, layer in enumerate(cache.layers):
        k, v = layer.update(*torch.randn(size, generator=generator, dtype=model.dtype, device=model.device))
        if isinstance(layer, BucketLayer):
            x = LayerInputs(number, k, k, v, k, k, cos=k, sin=k, scale=1.0, kv_start=None, cache=layer)
            layer.assign(router, x)  # reads only the keys of x
    return cache


@torch.inference_mode()
def next_token(model: "PreTrainedModel", cache: "Cache", token: Tensor) -> Tensor:
    """Returns the greedy token after ``token [1, 1]``, and appends ``token`` to the cache."""
    generate: Any = model
    return generate(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)


def measure(model: "PreTrainedModel", case: DecodingCase, length: int, cfg: EvalRunConfig) -> DecodingRun:
    """Measures tokens launched by the host and, on a GPU, one token replayed as a CUDA graph."""
    device, tokens = model.device, cfg.eval.decoding.tokens
    cache = filled_cache(model, case.router, case.dense_layers, length, cfg.seed)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    with case.attached() as sparse:
        for _ in range(WARMUP_TOKENS):
            token = next_token(model, cache, token)
        with cost(device) as spent:
            for _ in range(tokens):
                token = next_token(model, cache, token)
        selectivity = sparse.stats()["selectivity"] if sparse else None
    host_run = DecodingRun(tokens / spent.seconds, None, spent.peak_mb, selectivity)
    if device.type != "cuda":
        return host_run
    try:
        with case.attached():
            graph_ms = time_ms(graphed(partial(step, model, cache, token), device.type), device.type)
    except RuntimeError as error:
        return replace(host_run, note=f"not timed as a CUDA graph: {' '.join(str(error).split())}")
    return replace(host_run, device_rate=1e3 / graph_ms.median)


@torch.inference_mode()
def step(model: "PreTrainedModel", cache: Any, token: Tensor) -> Tensor:
    """Runs :func:`next_token` and removes the token from the cache again, so that every call has the same shapes."""
    following_token = next_token(model, cache, token)
    cache.crop(-1)
    return following_token


def as_row(method: str, setting: str, length: int, done: DecodingRun, dense: dict[str, DecodingRun], tokens: int) -> EvalRow:
    """Returns the row of a run; ``dense`` holds the runs of the dense kernels at the same length."""
    times = {f"times_{name}": done.rate / each.rate for name, each in dense.items()}
    if done.device_rate:
        on_device = {name: each.device_rate for name, each in dense.items() if each.device_rate}
        times |= {f"device_times_{name}": done.device_rate / rate for name, rate in on_device.items()}
    return EvalRow(
        task="decoding",
        method=method,
        setting=setting,
        score=done.rate,
        score_name="tokens a second",
        ratio_to_dense=done.rate / max(each.rate for each in dense.values()) if dense else None,
        selectivity=done.selectivity,
        latency_s=1 / done.rate,
        peak_memory_mb=done.peak_mb,
        samples=tokens,
        extra={"length": length, "device_tokens_per_s": done.device_rate, **times},
    )
