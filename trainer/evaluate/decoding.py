"""Tokens a second in decoding, dense beside routed, after caches that are filled with random keys instead of a prompt.

So a cache may be longer than the model has positions for, and no prompt has to be read: time hangs on how many keys are read.
Every layer has room to grow, dense ones too, which is faster than transformers' own cache: that copies all keys each time.
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
from msattn.trainer.evaluate.latency import DENSE
from msattn.trainer.evaluate.methods import Methods, Router, Routing
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.models.sdpa import SDPA_BACKENDS, BackendUnavailable, use_backend
from msattn.trainer.models.tap import LayerInputs, dense_attention, tap
from msattn.trainer.saap.kmeans import KMeans
from msattn.trainer.saap.qmodel import QModel
from msattn.trainer.serving.cache import BucketLayer, install

if TYPE_CHECKING:
    from rich.progress import Progress
    from transformers import Cache, PreTrainedModel

    from msattn.trainer.attach import Sparse
    from msattn.trainer.models.loading import Loaded

WARM = 3  # tokens that find kernels and memory unprepared


class Way(NamedTuple):
    """One line of the table: a method in a setting, SDPA's ``kernel`` meanwhile, and what makes the model attend so.

    The cache keeps buckets of ``router``, but for ``dense_layers``.
    """

    method: str
    setting: str
    kernel: str | None
    router: Router
    dense_layers: tuple[int, ...]
    attached: Callable[[], AbstractContextManager["Sparse | None"]]


@dataclass(frozen=True)
class Run:
    """Tokens a second as the host drives the model, and as the device runs (None: ``note`` says why, or it is a CPU); peak MiB;
    share of keys read.
    """

    rate: float
    device_rate: float | None
    peak_mb: float
    selectivity: float | None
    note: str = ""


def run(loaded: "Loaded", cfg: EvalRunConfig, methods: Methods, progress: "Progress") -> list[EvalRow]:
    """At each length a row for each dense kernel, and one for each routing with ``probes`` buckets."""
    model, settings = loaded.model, cfg.eval.decoding
    routings = methods.routing or [_untrained(cfg, model)]
    ways = [
        Way(f"{DENSE}{name}", "", kernel, routings[0].router, (), partial(tap, model, dense_attention))
        for name, kernel in SDPA_BACKENDS[model.device.type].items()
    ]
    for routing in routings:
        ((label, probes),) = routing.settings([cfg.probes])
        attached = partial(routing.attach, model, probes)
        ways.append(Way(routing.name, label, None, routing.router, routing.dense_layers, attached))
    bar = progress.add_task("decoding", total=len(ways) * len(settings.lengths))
    rows: list[EvalRow] = []
    for length in settings.lengths:
        done: list[tuple[Way, Run]] = []
        for way in ways:
            try:
                with use_backend(way.kernel):
                    done.append((way, measure(model, way, length, cfg)))
            except BackendUnavailable as reason:
                methods.notes.append(f"{way.method} after {length:,} keys, absent: {reason}")
            progress.advance(bar)
        methods.notes.extend(f"{way.method} after {length:,} keys: {each.note}" for way, each in done if each.note)
        dense = {way.method.removeprefix(DENSE): each for way, each in done if way.method.startswith(DENSE)}
        rows += [row(way.method, way.setting, length, each, dense, settings.tokens) for way, each in done]
    return rows


def _untrained(cfg: EvalRunConfig, model: "PreTrainedModel") -> Routing:
    """Classifiers as they are before training over random centroids: they take the time of trained ones."""
    config, presets = model.config, cfg.model.presets
    layers, heads = models.num_layers(config), models.num_kv_heads(config)
    generator = torch.Generator().manual_seed(cfg.seed)
    centroids = torch.randn(layers, heads, presets.num_buckets, models.head_dim(config), generator=generator)
    partition = KMeans(F.normalize(centroids, dim=-1), list(range(layers)))
    qmodel = QModel(partition, heads, presets.qmodel_hidden, residual=presets.qmodel_residual, seed=cfg.seed)
    router = qmodel.requires_grad_(False).eval().to(model.device)
    return Routing("classifier, untrained", router, cfg.recent, cfg.sink, tuple(cfg.dense_layers))


@torch.inference_mode()
def filled_cache(model: "PreTrainedModel", router: Router, dense_layers: tuple[int, ...], length: int, seed: int) -> "Cache":
    """A cache of ``length`` random keys and values, in the buckets of ``router`` but for those of ``dense_layers``."""
    from transformers import DynamicCache

    config = model.config
    cache: Any = DynamicCache(config=config)
    install(cache, router, num_layers=models.num_layers(config), dense_layers=dense_layers)
    generator = torch.Generator(model.device).manual_seed(seed)
    size = 2, 1, models.num_kv_heads(config), length, models.head_dim(config)
    for number, layer in enumerate(cache.layers):
        k, v = layer.update(*torch.randn(size, generator=generator, dtype=model.dtype, device=model.device))
        if isinstance(layer, BucketLayer):
            x = LayerInputs(number, k, k, v, k, k, cos=k, sin=k, scale=1.0, kv_start=None, cache=layer)
            layer.assign(router, x)  # which looks at the keys alone
    return cache


@torch.inference_mode()
def next_token(model: "PreTrainedModel", cache: "Cache", token: Tensor) -> Tensor:
    """The first choice after ``token [1, 1]``, which joins the cache."""
    generate: Any = model
    return generate(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)


def measure(model: "PreTrainedModel", way: Way, length: int, cfg: EvalRunConfig) -> Run:
    """Tokens driven by the host, then, on a GPU, one as a CUDA graph, over and over."""
    device, tokens = model.device, cfg.eval.decoding.tokens
    cache = filled_cache(model, way.router, way.dense_layers, length, cfg.seed)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    with way.attached() as sparse:
        for _ in range(WARM):
            token = next_token(model, cache, token)
        with cost(device) as spent:
            for _ in range(tokens):
                token = next_token(model, cache, token)
        selectivity = sparse.stats()["selectivity"] if sparse else None
    driven = Run(tokens / spent.seconds, None, spent.peak_mb, selectivity)
    if device.type != "cuda":
        return driven
    try:
        with way.attached():
            alone = time_ms(graphed(partial(step, model, cache, token), device.type), device.type)
    except RuntimeError as error:
        return replace(driven, note=f"no CUDA graph ({' '.join(str(error).split())})")
    return replace(driven, device_rate=1e3 / alone.median)


@torch.inference_mode()
def step(model: "PreTrainedModel", cache: Any, token: Tensor) -> Tensor:
    """:func:`next_token`, after which the cache is as it was: every call has the same shapes."""
    following = next_token(model, cache, token)
    cache.crop(-1)
    return following


def row(method: str, setting: str, length: int, done: Run, dense: dict[str, Run], tokens: int) -> EvalRow:
    """A run as a row; ``dense``: those of the dense kernels at the same length."""
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
