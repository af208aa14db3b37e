"""Selection of the key blocks that a layer reads: a scorer, a policy, and the blocks that are
always read.

A scorer gives each row block of a layer scores from 0 to 1, which are 0 outside of the causally
visible blocks. A policy turns them into a block mask for ``block_sparse_attention``, or a zoom map
for ``multiscale_attention``. Trained gates and baselines share this interface. Nothing here
synchronizes with the device.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from msattn.trainer.config.policies import Best, CalibratedLayer, TokenBudget, TopK
from msattn.trainer.config.select import SelectConfig
from msattn.trainer.config.sizes import BlockSizes
from msattn.trainer.config.values import require
from msattn.trainer.errors import UserError
from msattn.trainer.methods.base import GateScorer, Scorer
from msattn.trainer.methods.blocks import (
    SINK_AND_LOCAL,
    AlwaysRead,
    RowCandidates,
    candidate_blocks,
)
from msattn.trainer.methods.thresholds import SHORT_ROWS, BlockThresholds, shortest_row
from msattn.trainer.methods.untrained import untrained_scorer
from msattn.trainer.models.layer_attention import LayerInputs

SCORE_BYTES = 2**30  # of block scores or projected keys in memory at once
OWN_ALWAYS = ("sink_blocks", "local_blocks")  # what a gate records of AlwaysRead
Policy = Callable[[Tensor, RowCandidates], Tensor]  # see msattn.trainer.config.policies


@dataclass(frozen=True)
class Selection:
    """Selects the blocks of a layer that are read.

    Attributes
    ----------
    policy : one policy for all layers, or a sequence with one for each layer: block scores and
        candidates in, the blocks to read out, e.g. :class:`~msattn.trainer.config.policies.TopK`.
        :meth:`from_config` makes it from a configuration.
    scorer : source of the block scores.
    always : blocks that every row reads. They and the row's own (diagonal) block count towards the
        policy's share.
    earlier : policy of the chunks of a prompt before its last, if their scores have thresholds of
        their own; None: ``policy``.
    """

    policy: Policy | Sequence[Policy]
    scorer: Scorer
    always: AlwaysRead = SINK_AND_LOCAL
    earlier: Policy | Sequence[Policy] | None = None

    @property
    def sizes(self) -> BlockSizes:
        """The queries and keys of a block of the scorer."""
        return self.scorer.sizes

    @property
    def gate(self) -> Any:
        """The gate whose scores are used; None for other scores."""
        return self.scorer.gate if isinstance(self.scorer, GateScorer) else None

    def needs_keys(self, x: LayerInputs) -> bool:
        """Returns True if the scores of a pass need every key; gates may need only pooled keys."""
        if not isinstance(self.scorer, GateScorer):
            return True
        return x.ends_prompt and self.scorer.last_chunk_needs_keys

    @classmethod
    def from_config(
        cls,
        cfg: SelectConfig,
        gate: Any = None,
        *,
        scorer: Scorer | None = None,
        thresholds: BlockThresholds | None = None,
    ) -> "Selection":
        """Builds the selection that ``select.*`` describes.

        Gate scores need a ``gate`` (:class:`~msattn.trainer.methods.gate.attn_gate.Gate`); the
        scores ``a_shape`` need the ``scorer`` from ``measure_spans``. In other cases ``scorer``
        replaces the one named by ``cfg.scores``. The policy ``calibrated`` uses ``thresholds`` from
        ``calibrate_blocks``, or those of the gate. Raises UserError if one of these is missing, or
        if the thresholds were measured with other always-read blocks, or for the policy
        ``multiscale`` over blocks of fewer keys than queries.
        """
        scorer = scorer or _scorer(cfg, gate)
        equal = "expected another policy for blocks of fewer keys than queries"
        require(
            cfg.policy != "multiscale" or scorer.sizes.ratio == 1,
            "select.policy",
            cfg.policy,
            equal,
        )
        recorded = gate.always if cfg.by_gate and gate is not None else SINK_AND_LOCAL
        always = always_read(cfg, recorded)
        if cfg.policy != "calibrated":
            return cls(_policy(cfg, scorer.sizes), scorer, always)
        of_gate = {} if gate is None or not cfg.by_gate else gate.thresholds or {}
        if thresholds is None and cfg.by_gate and gate is not None:
            _check_always(always, recorded)
            thresholds = of_gate.get(cfg.scores)
        earlier = (
            _calibrated(cfg, always, scorer.sizes, of_gate["gate"]) if "gate" in of_gate else None
        )
        return cls(
            _calibrated(cfg, always, scorer.sizes, thresholds),
            scorer,
            always._replace(short_rows=SHORT_ROWS),
            earlier,
        )

    def blocks(self, x: LayerInputs) -> Tensor:
        """Returns the blocks of a layer to read: a mask ``[B, Hq | Hkv, Tr, Tc]`` or its bits, or
        zooms.

        Every row that sees a key reads at least one block. The scores of a gate are not held where
        the policy selects the best blocks.
        """
        policy, candidates = self._policy(x), self.candidates(x)
        held = -(-x.num_queries // self.sizes.queries)
        if isinstance(policy, Best) and isinstance(self.scorer, GateScorer):
            rule = policy.rule(candidates)
            if x.q.is_cuda:  # the kernels hold projected and mean keys, the reference scores
                held = 2 * x.q.shape[3]
            parts = [self.scorer.select(part, candidates, *rule) for part in self._parts(x, held)]
        else:
            parts = [policy(self.scorer(part), candidates) for part in self._parts(x, held)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _parts(self, x: LayerInputs, held: int) -> Iterator[LayerInputs]:
        """Yields the inputs in parts of a few heads, so that a gate holds at most ``SCORE_BYTES``
        at a time if one key/value head needs no more.

        ``held`` is how many fp32 numbers a query head holds for each block of keys. Other scores
        get all heads at once.
        """
        kv_heads = x.k.shape[1]
        scored = 4 * len(x.q) * x.q.shape[1] * held * -(-x.num_keys // self.sizes.keys)
        number = next(
            (n for n in range(1, kv_heads) if kv_heads % n == 0 and scored <= n * SCORE_BYTES),
            kv_heads,
        )
        if self.gate is None or number == 1:  # other scores are not computed by head
            yield x
            return
        for first in range(0, kv_heads, kv_heads // number):
            yield x.of_heads(slice(first, first + kv_heads // number))

    def choose(self, scores: Tensor, x: LayerInputs) -> Tensor:
        """Returns a mask or zooms for given scores, so that several policies can share them."""
        return self._policy(x)(scores, self.candidates(x))

    def _policy(self, x: LayerInputs) -> Policy:
        """Returns the policy of a layer in a pass."""
        policy = self.policy if x.ends_prompt or self.earlier is None else self.earlier
        return policy[x.layer] if isinstance(policy, Sequence) else policy

    def candidates(self, x: LayerInputs) -> RowCandidates:
        """Returns the blocks to select from."""
        always = self.always if x.ends_prompt else self.always._replace(dense_queries=0)
        return candidate_blocks(x, self.sizes, always)


def _scorer(cfg: SelectConfig, gate: Any) -> Scorer:
    if not cfg.by_gate:
        scorer = untrained_scorer(cfg.scores)
        given = vars(cfg) | cfg.sizes.arguments
        return scorer(
            **{item.name: given[item.name] for item in fields(scorer) if item.name in given}
        )
    if gate is None:
        raise UserError(
            f"select.scores={cfg.scores}: needs a gate artifact; run msattn train-gate, or choose "
            f"the scores of a baseline"
        )
    cfg.check_gate(gate.cfg.sizes)
    return replace(gate.scorer(cfg.scores), last_block=cfg.last_block)


def always_read(cfg: SelectConfig, recorded: AlwaysRead = SINK_AND_LOCAL) -> AlwaysRead:
    """Returns the blocks that ``cfg`` always reads; ``recorded`` are those of a gate's artifact."""
    given = {key: getattr(cfg, key) for key in OWN_ALWAYS if getattr(cfg, key) is not None}
    return recorded._replace(**given, dense_queries=cfg.dense_queries)


def _check_always(asked: AlwaysRead, recorded: AlwaysRead) -> None:
    for key in OWN_ALWAYS:
        if getattr(asked, key) != getattr(recorded, key):
            raise UserError(
                f"select.{key}={getattr(asked, key)}: the gate was calibrated with "
                f"{getattr(recorded, key)}; select.policy=topk accepts any number"
            )


def _policy(cfg: SelectConfig, sizes: BlockSizes) -> Policy:
    policy = cfg.make_policy()
    return replace(policy, block_size=sizes.keys) if isinstance(policy, TokenBudget) else policy


def _calibrated(
    cfg: SelectConfig, always: AlwaysRead, sizes: BlockSizes, table: BlockThresholds | None
) -> list[Policy]:
    assert cfg.sparsity is not None
    if table is None:
        raise UserError(
            f"select.policy=calibrated: needs calibrated thresholds of "
            f"select.scores={cfg.scores}; topk needs none"
        )
    if cfg.sparsity > table.sparsities[-1]:
        raise UserError(
            f"select.sparsity={cfg.sparsity}: {cfg.scores} is calibrated up to "
            f"{table.sparsities[-1]}"
        )
    share = 1 - cfg.sparsity
    above = shortest_row(cfg.sparsity, always, sizes)
    thresholds = [table.row_threshold(layer, cfg.sparsity) for layer in range(len(table.layers))]
    top_k = TopK(sparsity=cfg.sparsity)
    return [
        top_k if of_rows is None else CalibratedLayer(share * table.floor, *of_rows, above)
        for of_rows in thresholds
    ]
