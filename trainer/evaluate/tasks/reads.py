"""Data of the report's pictures: block maps of a prefill, and the keys that one decoded token
reads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from msattn.trainer import models
from msattn.trainer.config import EvalRunConfig
from msattn.trainer.evaluate.compared import Compared, ComparedRouting
from msattn.trainer.evaluate.row import WINDOW, Setting
from msattn.trainer.methods.base import Method
from msattn.trainer.methods.blocks import visible_blocks
from msattn.trainer.methods.gate.maps import BlockMaps
from msattn.trainer.methods.selection import Selection
from msattn.trainer.methods.untrained.scores.oracle import Oracle
from msattn.trainer.methods.untrained.scores.random import Random
from msattn.trainer.models.loading import Loaded
from msattn.trainer.models.tap import LayerInputs, visit_layers

MAP_SIDE = 64  # blocks; larger maps are max-pooled to this size
BINS = 128  # groups of neighboring keys in the picture of a decoded token
DIGITS = 5  # decimal places of stored shares


def collect(
    loaded: Loaded, chunk: dict[str, Tensor], methods: Compared, cfg: EvalRunConfig
) -> dict[Method, dict[str, Any]]:
    """Runs one prefill of a chunk and returns ``{method: {"maps" or "decoded": data}}`` for the
    rows of two methods.

    Maps show the first gate, or the first baseline other than the oracle, at its highest sparsity.
    Decoding shows the layer with the most mass outside the dense window.
    """
    config, routings = loaded.model.config, methods.bucket_routings
    maps = BlockMaps(models.served_layers(config), models.num_heads(config), heads=1, side=MAP_SIDE)
    shown = [selection for selection in methods.block_selections if selection.gate] or [
        selection
        for selection in methods.block_selections
        if selection.method.is_served and selection.method != Random.method
    ]
    settings = shown[0].settings(sorted(cfg.eval.recall.sparsities)) if shown else []
    probes = (
        min(routings[0].probes, *(routing.router.num_buckets for routing in routings))
        if routings
        else 0
    )
    most, decoded = -1.0, {}

    def add(x: LayerInputs) -> None:
        nonlocal most, decoded
        if settings and maps.shows(x.layer):
            _add_maps(maps, x, shown[0].selection(settings[-1][1]))
        if routed := [
            routing
            for routing in routings
            if x.layer in routing.router.layers and x.layer not in routing.dense_layers
        ]:
            far, reads = _reads_of_newest(x, routed, probes)
            if far > most:
                most, decoded = far, reads

    visit_layers(loaded.model, add, [chunk])
    by_method: dict[Method, dict[str, Any]] = {}
    if settings:
        heads = [
            {
                "layer": layer,
                "head": head,
                "maps": [[_rounded(row) for row in blocks] for blocks in of_head],
            }
            for (layer, head), of_head in maps.maps.items()
        ]
        by_method[shown[0].method] = {
            "maps": {
                "method": shown[0].method.label,
                "setting": str(settings[-1][0]),
                "heads": heads,
            }
        }
    if decoded:
        by_method[routings[0].method] = {"decoded": decoded}
    return by_method


def _add_maps(maps: BlockMaps, x: LayerInputs, selection: Selection) -> None:
    """Adds the true block map of a layer, the scores of a selection and the blocks that it
    reads.
    """
    sizes, scores = selection.sizes, selection.scorer(x)
    visible = visible_blocks(x, sizes)
    target: Any = "mass" if selection.gate is None else selection.gate.cfg.target
    maps.add(x.layer, visible, Oracle(*sizes, target)(x), scores, selection.choose(scores, x) > 0)


def _reads_of_newest(
    x: LayerInputs, routings: list[ComparedRouting], probes: int
) -> tuple[float, dict[str, Any]]:
    """Returns what the newest token reads with ``probes`` buckets, in the head with the most mass
    outside the window.

    The first number is this mass. Shares of mass and of keys are those of up to ``BINS`` groups of
    neighboring keys.
    """
    query, queries_of_head = x.q[0, :, -1].float(), x.q.shape[1] // x.k.shape[1]
    logits = query.unflatten(0, (-1, queries_of_head)) @ x.k[0].float().transpose(1, 2) * x.scale
    mass = x.capped(logits).softmax(-1).mean(1)  # [Hkv, M]
    reads = {WINDOW: _keys_of_newest(x, routings[0], 0)}
    reads |= {routing.method: _keys_of_newest(x, routing, probes) for routing in routings}
    far, head = (mass * ~reads[WINDOW]).sum(-1).max(0)
    return float(far), {
        "layer": x.layer,
        "head": int(head),
        "keys": x.num_keys,
        "mass": _rounded(_bins(mass[head]).sum(-1)),
        "reads": {method.label: _summary(read[head], mass[head]) for method, read in reads.items()},
        "setting": str(Setting("probes", probes)),
    }


def keys_read(
    buckets: Tensor, positions: Tensor, probes: Tensor, method: ComparedRouting
) -> Tensor:
    """Returns the keys that each query group reads in ``probes [n, Hkv, L]`` and in the dense
    window: bool ``[n, Hkv, M]``.

    ``buckets [1, Hkv, M]`` are those of the keys; ``positions [n]`` are those of the queries. -1 is
    no bucket.
    """
    batch, kv_heads, _ = probes.shape
    none = max(method.router.num_buckets, buckets.shape[2])  # no more buckets have a key
    visited = torch.zeros(batch, kv_heads, none + 1, dtype=torch.bool, device=probes.device)
    visited.scatter_(2, probes.long().where(probes >= 0, none), True)
    read = visited.gather(2, buckets.long().expand(batch, -1, -1))
    keys, newest = torch.arange(buckets.shape[2], device=buckets.device), positions[:, None, None]
    read |= (keys < method.sink) | (keys > newest - method.recent)
    return read & (keys <= newest)


def _keys_of_newest(x: LayerInputs, method: ComparedRouting, probes: int) -> Tensor:
    newest = torch.tensor([x.num_keys - 1], device=x.k.device)
    visited = method.buckets(method.router.scores_at(x, newest, method.recent), probes)
    return keys_read(method.router.buckets_of_keys(x)[0], newest, visited, method)[0]


def _summary(read: Tensor, mass: Tensor) -> dict[str, Any]:
    """Returns the shares of keys and mass that ``read [M]`` covers, and the share of keys read in
    each bin.
    """
    in_bins = _bins(read.float()).sum(-1) / _bins(torch.ones_like(mass)).sum(-1)
    return {
        "keys": read.float().mean().item(),
        "mass": (mass * read).sum().item(),
        "bins": _rounded(in_bins),
    }


def _bins(values: Tensor) -> Tensor:
    """Splits ``values [M]`` into at most ``BINS`` groups of neighbors: ``[groups, size]``, padded
    with zeros.
    """
    size = -(-len(values) // BINS)
    return F.pad(values, (0, -len(values) % size)).unflatten(0, (-1, size))


def _rounded(values: Tensor) -> list[float | None]:
    return [None if value != value else round(value, DIGITS) for value in values.tolist()]
