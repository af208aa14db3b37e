"""Seconds and memory of a block of code, and common parts of the tasks of speed: random keys and
random weights.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import CacheLayerMixin

from msattn.trainer import models
from msattn.trainer.config import EvalRunConfig, GateConfig
from msattn.trainer.evaluate.compared import ComparedRouting, ComparedSelection
from msattn.trainer.memory import peak_memory
from msattn.trainer.methods.base import DENSE, RANDOM_WEIGHTS
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.gate.attn_gate import GATE_SCORERS, Gate
from msattn.trainer.serving.contiguous.install import install_layers

ALWAYS_DENSE = 10**9  # keys; no cache is as long
TRANSFORMERS = DENSE.of("transformers")
CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass
class Cost:
    """Wall-clock ``seconds``, and ``peak_mb``: peak MiB of CUDA allocations, or of the process's
    resident memory on a CPU.
    """

    seconds: float = 0.0
    peak_mb: float = 0.0


@contextmanager
def cost(device: torch.device) -> Iterator[Cost]:
    """Measures the body, including the device work that it launches and excluding work launched
    before.
    """
    measured = Cost()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    elif CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")  # Linux: resets the peak of resident memory (man 5 proc)
    begin = time.perf_counter()
    yield measured
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    measured.seconds = time.perf_counter() - begin
    measured.peak_mb = peak_memory(device) / 2**20


def random_cache(
    model: PreTrainedModel, batch: int, length: int, *, new_tokens: int, seed: int
) -> Cache:
    """Returns a cache of ``length`` random keys and values of each sequence, with room for
    ``new_tokens`` more.

    An attached model takes it over without copying it. It grows where some layers keep the model's
    own attention.
    """
    config: Any = model.config
    if len(models.served_layers(config)) < models.num_layers(config):
        return random_dynamic_cache(model, batch, length, seed=seed)
    cache = StaticCache(config=config, max_cache_len=length + new_tokens)
    cache.early_initialization(
        batch_size=batch,
        num_heads=models.num_kv_heads(config),
        head_dim=models.head_dim(config),
        dtype=model.dtype,
        device=model.device,
    )
    generator = torch.Generator(model.device).manual_seed(seed)
    layers: list[Any] = cache.layers
    for layer in layers:
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
        layer.cumulative_length.fill_(length)
    return cache


def with_growing_layers(model: PreTrainedModel, cache: Cache) -> Cache:
    """Returns ``cache`` with layers that append a token without copying the others, also where
    nothing is attached.
    """
    config = model.config
    install_layers(cache, None, num_layers=len(cache.layers), served=models.served_layers(config))
    return cache


def random_dynamic_cache(
    model: PreTrainedModel, batch: int, length: int, *, seed: int
) -> DynamicCache:
    """Returns transformers' default cache with ``length`` random keys and values of each sequence.

    Layers of linear attention begin with an empty state, whose size does not depend on the length.
    """
    config = model.config
    cache = DynamicCache(config=config)
    generator = torch.Generator(model.device).manual_seed(seed)
    for layer in [
        i for i, cache_layer in enumerate(cache.layers) if isinstance(cache_layer, CacheLayerMixin)
    ]:
        own: Any = models.text_config(config).per_layer_config[layer]
        size = batch, models.num_kv_heads(own), length, models.head_dim(own)
        k, v = (
            torch.randn(size, generator=generator, dtype=model.dtype, device=model.device)
            for _ in range(2)
        )
        cache.update(k, v, layer)
    return cache


def random_router(cfg: EvalRunConfig, model: PreTrainedModel) -> ComparedRouting:
    """Returns classifiers with random weights over random centroids, which have the cost of trained
    ones.
    """
    config, presets = model.config, cfg.model.presets
    layers, heads = models.served_layers(config), models.num_kv_heads(config)
    generator = torch.Generator().manual_seed(cfg.seed)
    centroids = torch.randn(
        len(layers), heads, presets.num_buckets, models.head_dim(config), generator=generator
    )
    partition = KMeans(F.normalize(centroids, dim=-1), layers)
    qmodel = QModel(partition, heads, presets.qmodel_hidden, seed=cfg.seed)
    router = qmodel.requires_grad_(False).eval().to(model.device)
    routing = ComparedRouting.configured(router.method.of(RANDOM_WEIGHTS), router, cfg)
    return replace(routing, keys=None)  # it has no thresholds


def random_gate(cfg: EvalRunConfig, model: PreTrainedModel) -> ComparedSelection:
    """Returns a gate with random weights, which has the cost of a trained one."""
    presets = cfg.model.presets
    sizes = cfg.select.sizes.arguments
    shape = GateConfig(**sizes, q_pool=presets.gate_q_pool, k_pool=presets.gate_k_pool)
    # random weights have no thresholds
    policy = "topk" if cfg.select.policy == "calibrated" else cfg.select.policy
    gate = Gate.build(model.config, shape).requires_grad_(False).to(model.device)
    method = GATE_SCORERS[cfg.select.scores].method.of(RANDOM_WEIGHTS)
    return ComparedSelection(method, cfg.select.with_policy(policy), gate)


def speedups(dense: Mapping[str, float], of: float) -> dict[str, float]:
    """Returns ``of`` relative to each value of ``dense``, under the names of columns of results."""
    return {f"times_{name}": of / value for name, value in dense.items()}
