"""Numbers of probes with which all routings read the same shares of the keys: ``eval.key_shares``."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from msattn.trainer.config import EvalRunConfig
from msattn.trainer.evaluate.calibration import calibration_chunks
from msattn.trainer.evaluate.methods import BucketRoutingMethod, ComparedMethods
from msattn.trainer.methods.pages import PageRouter, num_far
from msattn.trainer.methods.probing import bucket_scores, buckets_of_keys
from msattn.trainer.models.tap import LayerInputs, dense_attention, run_backbone, tap

if TYPE_CHECKING:
    from msattn.trainer.models.loading import Loaded

CHUNKS = 2
# Relative difference from a share up to which a number of probes stands for it. At a quarter, "about 5 %" is 3.75 to 6.25 %.
# Shares that are a factor of 2 apart have ranges that do not meet: no number of probes stands for both, rows keep their order.
FARTHEST = 0.25
QUERIES = 32  # of a chunk, in its last eighth: tokens are decoded at the end of a context


def match_key_shares(methods: ComparedMethods, cfg: EvalRunConfig, loaded: "Loaded") -> ComparedMethods:
    """Returns ``methods`` whose routings are measured at ``cfg.eval.key_shares``, if there are any.

    For each share, a routing gets the number of probes with which it reads the nearest share of the visible keys, in the mean
    over queries, heads and layers of training chunks. The notes say how many, and which shares a routing cannot read, as its
    buckets or the dense window are larger.

    Raises
    ------
    UserError : as :func:`msattn.trainer.evaluate.calibration.calibration_chunks`.
    """
    shares, routings = cfg.eval.key_shares, methods.bucket_routings
    if not shares or not routings:
        return methods
    curves = [curve.tolist() for curve in measure_curves(loaded, routings, calibration_chunks(cfg, loaded, CHUNKS))]
    matched, notes = [], list(methods.notes)
    for routing, curve in zip(routings, curves, strict=True):
        counts = range(min(1, len(curve) - 1), len(curve))  # without a probe no routing is measured
        nearest = {share: min(counts, key=lambda p, share=share: abs(curve[p] - share)) for share in shares}
        probes = {share: count for share, count in nearest.items() if abs(curve[count] - share) <= FARTHEST * share}
        matched.append(replace(routing, by_share=probes))
        found = [f"{count} for {share:.3g} (reads {curve[count]:.3g})" for share, count in nearest.items()]
        left_out = ", ".join(f"{share:.3g}" for share in shares if share not in probes)
        notes.append(
            f"{routing.method}: probes by share of the keys, on training text: {', '.join(found)}"
            + (f"; not measured: {left_out}" if left_out else "")
        )
    return replace(methods, bucket_routings=matched, notes=notes)


@torch.inference_mode()
def measure_curves(loaded: "Loaded", routings: list[BucketRoutingMethod], chunks: list[dict[str, Tensor]]) -> list[Tensor]:
    """Returns, for each routing, the share of the visible keys that 0, 1, ... and all probes read: fp64 ``[C + 1]``.

    Layers that are dense or not routed do not count, as in the reported shares.
    """
    found: list[list[Tensor]] = [[] for _ in routings]

    def measured_dense_attention(x: LayerInputs) -> Tensor:
        for routing, curves in zip(routings, found, strict=True):
            if x.layer in routing.router.layers and x.layer not in routing.dense_layers:
                curves.append(share_curve(x, routing))
        return dense_attention(x)

    with tap(loaded.model, measured_dense_attention):
        for chunk in chunks:
            run_backbone(loaded.model, chunk["input_ids"][None].to(loaded.model.device))
    every_layer_dense = torch.ones(1, dtype=torch.float64)
    return [torch.stack(curves).mean(0).cpu() if curves else every_layer_dense for curves in found]


def share_curve(x: LayerInputs, routing: BucketRoutingMethod) -> Tensor:
    """Returns the share of the visible keys that 0, 1, ... and all probes read in a layer: fp64 ``[C + 1]``."""
    positions = torch.linspace(x.num_keys * 7 // 8, x.num_keys - 1, QUERIES, device=x.q.device).round().long()
    router = routing.router
    buckets, num_buckets = buckets_of_keys(x, router)
    scores = bucket_scores(x, router, positions, routing.recent)  # [n, Hkv, C]
    keys, newest = torch.arange(x.num_keys, device=x.q.device), positions[:, None]
    far = (keys >= routing.sink) & (keys <= newest - routing.recent)  # [n, M]
    sizes = torch.zeros(*scores.shape[:2], num_buckets, dtype=torch.float64, device=x.q.device)
    members = buckets.long().expand(len(positions), -1, -1)
    sizes.scatter_add_(2, members, far[:, None].expand_as(members).double())
    best = router.choose(scores, router.num_buckets) if isinstance(router, PageRouter) else scores.argsort(-1, descending=True)
    read = sizes.gather(2, best.clamp(min=0).long()).masked_fill(best < 0, 0).cumsum(-1)
    read = torch.cat([torch.zeros_like(read[..., :1]), read], -1)  # keys outside the window, by number of visited buckets
    probes = torch.arange(router.num_buckets + 1, device=x.q.device).expand(*scores.shape[:2], -1)
    if isinstance(router, PageRouter):
        probes = router.visited(num_far(scores), probes)
    window = (newest + 1 - far.sum(-1, keepdim=True))[:, None]
    return ((read.gather(2, probes) + window) / (newest + 1)[:, None]).mean((0, 1))
