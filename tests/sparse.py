"""Gates and routers of small models."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from msattn.trainer import artifacts
from msattn.trainer.config import GateConfig, SelectConfig
from msattn.trainer.config.policies import TopK
from msattn.trainer.methods.blocks import AlwaysRead
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.gate.attn_gate import Gate, GateScores
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from msattn.trainer.methods.selection import Selection
from msattn.trainer.models.families import head_dim, num_kv_heads, served_layers
from msattn.trainer.models.identity import fingerprint
from msattn.trainer.models.loading import Loaded
from msattn.trainer.serving.attach import Sparse, attach
from tests.factory import random_partition

BLOCK, BUCKETS, LAYERS = 16, 6, 2
EVERY_BLOCK = SelectConfig(sparsity=0.0)
NEAREST_HALF = SelectConfig(sparsity=0.5, sink_blocks=0, local_blocks=0)
HALF: Any = SelectConfig(sparsity=0.5, scores="gate", sink_blocks=0, local_blocks=0)


def gate_for(model: Any) -> Gate:
    return Gate.build(model.config, GateConfig(block_size=BLOCK)).requires_grad_(False)


def by_pooled_scores(model: Any, sparsity: float = 0.5) -> Selection:
    """Returns a selection by pooled queries alone, which chunks of a prompt do not change."""
    return Selection(
        TopK(sparsity=sparsity), GateScores(gate_for(model), last_block="pooled"), AlwaysRead(0, 0)
    )


@contextmanager
def attach_reading_all(model: Any, **options: Any) -> Iterator[Sparse]:
    """Attaches a gate and a router so that every key is read."""
    settings: dict[str, Any] = {
        "probes": BUCKETS,
        "recent": 1,
        "sink": 0,
        "dense_layers": (),
        "qmodel": random_partition(),
    }
    with attach(model, gate=gate_for(model), select=EVERY_BLOCK, **settings | options) as sparse:
        yield sparse


def save(
    folder: Path, model: Any, module: Gate | DecodeGate | KMeans | QModel, **details: Any
) -> Path:
    """Writes an artifact for ``model`` to the folder of its kind; ``details`` are further entries
    of its manifest.
    """
    kind = {Gate: "gate", DecodeGate: "decode_gate", KMeans: "kmeans", QModel: "qmodel"}[
        type(module)
    ]
    own = (
        {"layers": module.layers, "rope": module.rope}
        if isinstance(module, KMeans | QModel)
        else module.details()
    )
    facts: dict[str, Any] = {
        "config": {},
        "data": "",
        "seed": 0,
        "metrics": {},
        "details": own | details,
    }
    identity = model.fingerprint if isinstance(model, Loaded) else fingerprint(model, id="tiny")
    return artifacts.write(
        folder / kind, kind=kind, tensors=module.state_dict(), model=identity, **facts
    )


def partition_for(model: Any) -> KMeans:
    heads, size = num_kv_heads(model.config), head_dim(model.config)
    return random_partition(BUCKETS, layers=served_layers(model.config), heads=heads, size=size)


def attached(model: Any, *, sparsity: float, probes: int, measure_recall: bool = False) -> Any:
    """Attaches a gate and a router."""
    window: dict[str, Any] = {
        "recent": 1,
        "sink": 0,
        "dense_layers": (),
        "measure_recall": measure_recall,
    }
    select = by_pooled_scores(model, sparsity)
    return attach(
        model, select=select, qmodel=partition_for(model), probes=probes, dense_below=0, **window
    )


def run_in_passes(
    model: Any, ids: Tensor, lengths: list[int], mask: Tensor | None = None
) -> Tensor:
    """Returns the logits of ``ids``, which are read in passes of the given lengths over one
    cache.
    """
    mask = torch.ones_like(ids) if mask is None else mask
    cache = DynamicCache(config=model.config)
    parts = ids.split(lengths, dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits, end = [], 0
    for part in parts:
        begin, end = end, end + part.shape[1]
        place = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
        logits.append(model(part, past_key_values=cache, **place).logits)
    return torch.cat(logits, dim=1)
