"""Measurements on training text that compared methods need: thresholds, spans, numbers of probes
for a share of the keys.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msattn.trainer import artifacts, data
from msattn.trainer import methods as methods_package
from msattn.trainer.config import EvalRunConfig
from msattn.trainer.data.cache import cached
from msattn.trainer.data.overlap import check_heldout
from msattn.trainer.evaluate.compared import Compared, ComparedRouting, ComparedSelection, reads
from msattn.trainer.evaluate.task import lengths_of, task_of
from msattn.trainer.methods.base import Scorer
from msattn.trainer.methods.blocks import AlwaysRead, sparsity_in_reach
from msattn.trainer.methods.key_blocks import num_far
from msattn.trainer.methods.key_thresholds import KEY_CALIBRATION_CHUNKS, calibrate_keys
from msattn.trainer.methods.selection import Selection
from msattn.trainer.methods.thresholds import (
    CALIBRATION_CHUNKS,
    SHORT_ROWS,
    SPARSITIES,
    BlockThresholds,
    allocation_of,
    calibrate_blocks,
)
from msattn.trainer.methods.untrained.scores.a_shape import AShape, measure_spans
from msattn.trainer.models.families import check_length
from msattn.trainer.models.loading import Described, Loaded
from msattn.trainer.models.tap import LayerInputs, visit_layers
from msattn.trainer.progress import Progress
from msattn.trainer.storage.hashes import file_hash

SCORING = 0.5  # dense passes that take as long as the scores of a method on a chunk, on a CPU
# queries in the last eighth of a chunk: tokens are decoded at the end of a context
SHARE_CHUNKS, SHARE_QUERIES = 2, 32
# Relative difference from a share up to which a number of probes stands for it. At a quarter,
# "about 5 %" is 3.75 to 6.25 %. Shares that are a factor of 2 apart have ranges that do not meet:
# no number of probes stands for both, rows keep their order.
FARTHEST = 0.25


def calibrate(compared: Compared, cfg: EvalRunConfig, loaded: Loaded) -> Compared:
    """Returns ``compared`` with all that this module measures, and notes on shares that cannot be
    read.
    """
    compared = calibrate_selections(compared, cfg, loaded)
    calibrate_routers(compared, cfg, loaded)
    compared.notes.extend(unreachable_notes(compared, cfg))
    return match_key_shares(compared, cfg, loaded)


def calibrate_selections(compared: Compared, cfg: EvalRunConfig, loaded: Loaded) -> Compared:
    """Returns ``compared`` with the spans of the A shape and, if ``select`` is calibrated, with
    missing thresholds.

    Thresholds are missing for baselines, and for a gate whose artifact has none or has thresholds
    for other always-read blocks. All methods that always read the same blocks are measured in one
    pass, as in gate training, and kept in ``data.cache``.
    """
    needy = [each for each in compared.block_selections if each.scorer is None and _lacks(each)]
    if not needy or not reads(cfg, "blocks"):
        return compared
    kept = _Kept(cfg, loaded, calibration_chunks(cfg, loaded, CALIBRATION_CHUNKS))
    scorers = {str(each.method): kept.scorer(each) for each in needy}
    calibrated = [each for each in needy if each.select.policy == "calibrated"]
    tables: dict[str, BlockThresholds] = {}
    for always in dict.fromkeys(each.always for each in calibrated):
        identities = {
            str(each.method): _identity(each) for each in calibrated if each.always == always
        }
        tables |= kept.tables(scorers, identities, always)
    notes = [
        f"{each.method}: its artifact has no thresholds for this selection, so they were measured "
        f"now."
        for each in needy
        if each.gate is not None
    ]
    found = [
        replace(each, scorer=scorers[name], thresholds=tables.get(name))
        if (name := str(each.method)) in scorers
        else each
        for each in compared.block_selections
    ]
    return replace(compared, block_selections=found, notes=[*compared.notes, *notes])


def calibrate_routers(compared: Compared, cfg: EvalRunConfig, loaded: Loaded) -> None:
    """Calibrates routers that are measured at shares of the keys, if their artifacts hold no
    thresholds, as in their training.

    Raises UserError if the thresholds of an artifact do not cover a share.
    """
    for each in compared.bucket_routings if cfg.all_keys else ():
        if not each.router.predicts_attention:
            continue
        if each.router.thresholds is None:
            window = {"recent": each.recent, "sink": each.sink, "dense_layers": each.dense_layers}
            items = calibration_chunks(cfg, loaded, KEY_CALIBRATION_CHUNKS)
            each.router.thresholds = calibrate_keys(each.router, loaded.model, items, **window)
            compared.notes.append(
                f"{each.method}: its artifact has no thresholds for shares of the keys, so they "
                f"were measured now."
            )
        for share in cfg.all_keys:
            each.router.thresholds.density(share)


def is_needed(compared: Compared, cfg: EvalRunConfig) -> bool:
    """Returns True if a measurement of this module reads training text."""
    routings = compared.bucket_routings
    unknown = any(
        each.router.predicts_attention and each.router.thresholds is None for each in routings
    )
    blocks = reads(cfg, "blocks") and any(
        each.scorer is None and _lacks(each) for each in compared.block_selections
    )
    return blocks or bool(cfg.all_keys and unknown) or bool(cfg.eval.key_shares and routings)


def dense_passes(compared: Compared, cfg: EvalRunConfig) -> float:
    """Returns the number of dense passes over a chunk that take about as long as the calibration,
    if none is kept.
    """
    needy = [each for each in compared.block_selections if each.scorer is None and _lacks(each)]
    passes = len({each.always for each in needy}) + SCORING * len(needy)
    blocks = CALIBRATION_CHUNKS * passes if reads(cfg, "blocks") else 0
    routed = is_needed(replace(compared, block_selections=[]), cfg)
    return blocks + (KEY_CALIBRATION_CHUNKS if routed else 0)


def calibration_chunks(
    cfg: EvalRunConfig, model: Described | Loaded, number: int
) -> list[dict[str, Any]]:
    """Returns the first training chunks of ``data``, which hold no held-out text, with needles as
    in the training of gates.
    """
    check_length(model.config, cfg.data.seq_len)
    check_heldout(cfg.data)
    text = replace(cfg.data, needles=cfg.model.presets.needles)
    chunks = data.chunks(text, model.tokenizer, seed=cfg.seed, num_chunks=number)
    return [chunks[i] for i in range(len(chunks))]


def unreachable_notes(compared: Compared, cfg: EvalRunConfig) -> list[str]:
    """Returns a note for each length at which the always-read blocks exceed a requested share."""
    if not compared.block_selections:
        return []
    first = compared.block_selections[0]
    sizes = first.select.sizes if first.gate is None else first.gate.cfg.sizes
    always = first.always
    if first.select.policy == "calibrated":
        always = always._replace(short_rows=SHORT_ROWS)
    limited = [
        task for task in cfg.eval.tasks if "blocks" in task_of(task).reads and task_of(task).text
    ]
    asked: dict[int, set[float]] = {}
    for section in (getattr(cfg.eval, task) for task in limited):
        for length in lengths_of(section):
            asked.setdefault(length, set()).update(section.sparsities)
    notes = []
    for length, sparsities in sorted(asked.items()):
        blocks = -(-length // sizes.queries)
        most, short = sparsity_in_reach(blocks, always), always.num_short_rows(blocks)
        if beyond := sorted(each for each in sparsities if each > most):
            whole = f", rows of up to {short} blocks all of them" if short else ""
            notes.append(
                f"{length} tokens: every row reads its own block, the first {always.sink_blocks} "
                f"and the {always.local_blocks} before its own{whole}, so at most {100 * most:.1f} "
                "% of the blocks are left out, also at sparsity "
                f"{', '.join(f'{each:g}' for each in beyond)}."
            )
    return notes


def _lacks(method: ComparedSelection) -> bool:
    """Returns True for a method that needs spans or thresholds which neither it nor its gate
    has.
    """
    if method.gate is None:
        return method.method == AShape.method or method.select.policy == "calibrated"
    known = method.select.scores in (method.gate.thresholds or {})
    fits = known and method.always == method.gate.always
    return method.select.policy == "calibrated" and not fits


def _identity(method: ComparedSelection) -> str:
    """Returns what the scores of a method depend on, besides model and text."""
    if method.gate is not None and method.gate.artifact is not None:
        return f"{method.gate.artifact.manifest['content_hash']} {method.select.scores}"
    return f"{method.select.scores} {method.select.sizes} {method.select.seed}"


class _Kept:
    """Measurements on calibration chunks ``{"input_ids": int64 [N]}``, read from ``data.cache`` or
    made and kept there.
    """

    def __init__(self, cfg: EvalRunConfig, loaded: Loaded, items: list[dict[str, Any]]) -> None:
        self.folder, self.model, self.items = cfg.data.cache, loaded.model, items
        text = hashlib.sha256(
            b"".join(each["input_ids"].numpy().tobytes() for each in items)
        ).hexdigest()
        code = [
            file_hash(path) for path in sorted(Path(methods_package.__file__).parent.rglob("*.py"))
        ]
        device = loaded.model.device.type, str(loaded.model.dtype)
        self._depends_on = {
            "text": text,
            "model": artifacts.identity(loaded.fingerprint),
            "code": code,
            "device": device,
        }

    def array(self, what: str, identity: Any, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Returns the array of ``make``, or the one that was kept for the same ``identity``, model
        and text.
        """
        known = self._depends_on | {"what": what, "identity": identity}
        return cached(self.folder, what, lambda: known, make, quiet=True, however_short=True)

    def scorer(self, method: ComparedSelection) -> Scorer:
        """Returns the scorer of a method; that of the A shape is measured."""
        if method.method != AShape.method:
            return Selection.from_config(method.select.with_policy("topk"), method.gate).scorer
        sizes = method.select.sizes
        profile = self.array(
            "spans of heads",
            sizes,
            lambda: measure_spans(self.model, self.items, sizes).profile.float().cpu().numpy(),
        )
        return AShape(*sizes, torch.from_numpy(profile).to(self.model.device))

    def tables(
        self, scorers: Mapping[str, Scorer], identities: Mapping[str, str], always: AlwaysRead
    ) -> dict[str, BlockThresholds]:
        """Returns the results of ``calibrate_blocks`` by name, of one pass for all if those of one
        of them are not kept.
        """

        @cache
        def measured() -> dict[str, BlockThresholds]:
            return calibrate_blocks(
                {name: scorers[name] for name in identities}, self.model, self.items, always=always
            )

        def fits(name: str) -> np.ndarray:  # [layers, sparsities, 3]
            return np.array(
                [[each or [np.nan] * 3 for each in layer] for layer in measured()[name].layers]
            )

        def table(name: str) -> BlockThresholds:
            array = self.array("thresholds", [identities[name], *always], lambda: fits(name))
            layers = [
                [None if np.isnan(fit[0]) else fit for fit in layer] for layer in array.tolist()
            ]
            return BlockThresholds(allocation_of(scorers[name]).floor, list(SPARSITIES), layers)

        return {name: table(name) for name in identities}


def match_key_shares(compared: Compared, cfg: EvalRunConfig, loaded: Loaded) -> Compared:
    """Returns ``compared`` with routings measured at ``cfg.eval.key_shares``, if there are any.

    For each share, a routing gets the number of probes whose mean share of the visible keys, over
    queries, heads and layers of training chunks, is nearest. The notes give these numbers, and the
    shares that a routing cannot read because its buckets or the dense window are larger.
    """
    shares, routings = cfg.eval.key_shares, compared.bucket_routings
    if not shares or not routings:
        return compared
    curves = [
        curve.tolist()
        for curve in measure_curves(loaded, routings, calibration_chunks(cfg, loaded, SHARE_CHUNKS))
    ]
    matched, notes = [], list(compared.notes)
    for routing, curve in zip(routings, curves, strict=True):
        counts = range(min(1, len(curve) - 1), len(curve))  # without a probe no routing is measured
        nearest = {
            share: min(counts, key=lambda p, share=share: abs(curve[p] - share)) for share in shares
        }
        probes = {
            share: count
            for share, count in nearest.items()
            if abs(curve[count] - share) <= FARTHEST * share
        }
        matched.append(replace(routing, by_share=probes))
        found = [
            f"{count} for {share:.3g} (reads {curve[count]:.3g})"
            for share, count in nearest.items()
        ]
        left_out = ", ".join(f"{share:.3g}" for share in shares if share not in probes)
        notes.append(
            f"{routing.method}: probes by share of the keys, on training text: {', '.join(found)}"
            + (f"; not measured: {left_out}" if left_out else "")
        )
    return replace(compared, bucket_routings=matched, notes=notes)


def measure_curves(
    loaded: Loaded, routings: list[ComparedRouting], chunks: list[dict[str, Tensor]]
) -> list[Tensor]:
    """Returns, for each routing, the share of the visible keys that 0, 1, ... and all probes read:
    fp64 ``[C + 1]``.

    Layers that are dense or not routed do not count, as in the reported shares.
    """
    found: list[list[Tensor]] = [[] for _ in routings]

    def measure(x: LayerInputs) -> None:
        for routing, curves in zip(routings, found, strict=True):
            if x.layer in routing.router.layers and x.layer not in routing.dense_layers:
                curves.append(share_curve(x, routing))

    what = "measuring the keys that numbers of probes read, chunks"
    with Progress() as progress:
        visit_layers(loaded.model, measure, progress.track(chunks, description=what))
    every_layer_dense = torch.ones(1, dtype=torch.float64)
    return [torch.stack(curves).mean(0).cpu() if curves else every_layer_dense for curves in found]


def share_curve(x: LayerInputs, routing: ComparedRouting) -> Tensor:
    """Returns the share of the visible keys that 0, 1, ... and all probes read in a layer: fp64
    ``[C + 1]``.
    """
    positions = (
        torch.linspace(x.num_keys * 7 // 8, x.num_keys - 1, SHARE_QUERIES, device=x.q.device)
        .round()
        .long()
    )
    router = routing.router
    buckets, num_buckets = router.buckets_of_keys(x)
    scores = router.scores_at(x, positions, routing.recent)  # [n, Hkv, C]
    keys, newest = torch.arange(x.num_keys, device=x.q.device), positions[:, None]
    far = (keys >= routing.sink) & (keys <= newest - routing.recent)  # [n, M]
    sizes = torch.zeros(*scores.shape[:2], num_buckets, dtype=torch.float64, device=x.q.device)
    members = buckets.long().expand(len(positions), -1, -1)
    sizes.scatter_add_(2, members, far[:, None].expand_as(members).double())
    best = router.ranked(scores)
    read = sizes.gather(2, best.clamp(min=0).long()).masked_fill(best < 0, 0).cumsum(-1)
    # keys outside the window, by number of visited buckets
    read = torch.cat([torch.zeros_like(read[..., :1]), read], -1)
    probes = torch.arange(router.num_buckets + 1, device=x.q.device).expand(*scores.shape[:2], -1)
    probes = router.visited(num_far(scores), probes)
    window = (newest + 1 - far.sum(-1, keepdim=True))[:, None]
    return ((read.gather(2, probes) + window) / (newest + 1)[:, None]).mean((0, 1))
