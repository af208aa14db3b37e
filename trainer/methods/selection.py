"""Selection of the key blocks that a layer reads: a scorer, a policy, and the blocks that are always read.

A scorer gives each row block of a layer scores from 0 to 1, which are 0 outside of the causally visible blocks. A policy turns
them into a block mask for ``block_sparse_attention``, or a zoom map for ``multiscale_attention``. Trained gates and baselines
share this interface. Nothing here synchronizes with the device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from msattn.kernels.best_blocks import block_softmax
from msattn.kernels.block_sparse_attention import block_sparse_attention
from msattn.kernels.common.checks import first_query
from msattn.kernels.multiscale_attention import multiscale_attention
from msattn.kernels.pool_blocks import pool_blocks
from msattn.kernels.types import SparseAttention
from msattn.trainer.config import (
    CalibratedConfig,
    MultiscaleConfig,
    NucleusConfig,
    SelectConfig,
    ThresholdConfig,
    TokenBudgetConfig,
    TopKConfig,
)
from msattn.trainer.errors import UserError
from msattn.trainer.methods.block_thresholds import SHORT_ROWS, shortest_row, threshold_at
from msattn.trainer.methods.blocks import (
    SINK_AND_LOCAL,
    AlwaysRead,
    Candidates,
    aligned_blocks,
    candidate_blocks,
    normalize_rows,
    sparsity,
    visible_blocks,
)
from msattn.trainer.methods.policies import Calibrated, Multiscale, Nucleus, Policy, Threshold, TokenBudget, TopK
from msattn.trainer.methods.untrained.vertical_slash import VerticalSlash
from msattn.trainer.models.layer_attention import block_map, score_options, with_sinks

if TYPE_CHECKING:
    from msattn.trainer.methods.gate.attn_gate import Gate
    from msattn.trainer.models.tap import LayerInputs

__all__ = [
    "Calibrated",
    "GateScores",
    "MeanPool",
    "Multiscale",
    "Nucleus",
    "Oracle",
    "Quest",
    "Random",
    "Selection",
    "SinkLocal",
    "Threshold",
    "TokenBudget",
    "TopK",
    "VerticalSlash",
    "selected_attention",
    "sparsity",
    "visible_blocks",
]

QUEST_CHUNK_BYTES = 2**28


class Scorer(Protocol):
    """Interface of a scorer, which returns the block scores of a layer: fp32 ``[B, Hq | Hkv, Tr, Tc]``.

    Rows sum to 1 over the visible blocks and are 0 elsewhere; the last row of :class:`GateScores` may sum to more.
    """

    @property
    def block_size(self) -> int: ...

    def __call__(self, x: "LayerInputs") -> Tensor: ...


@dataclass(frozen=True)
class GateScores:
    """Scores blocks by the probabilities of a trained gate.

    The last row block often holds a question, of which only some tokens look far back. Their mean hides that, so its blocks get
    the largest probability of the pooled queries and of each of the last ``block_size`` queries.
    """

    gate: "Gate"

    @property
    def block_size(self) -> int:
        return self.gate.cfg.block_size

    def __call__(self, x: "LayerInputs") -> Tensor:
        scores = self.gate.scores(x)
        single, row = self.gate.scores_of_last_queries(x)
        row = row[:, None, None, None].expand(*scores.shape[:2], 1, scores.shape[3])
        return scores.scatter_reduce(2, row, single.amax(2, keepdim=True), "amax")


@dataclass(frozen=True)
class Oracle:
    """Scores blocks by the true block map (max-pooled attention probabilities), which is the target of a gate's training."""

    block_size: int = 64

    def __call__(self, x: "LayerInputs") -> Tensor:
        pooled = block_map(x, self.block_size).pooled
        return normalize_rows(pooled)


@dataclass(frozen=True)
class Random:
    """Scores blocks by uniform random numbers, determined by seed, layer and shape."""

    block_size: int = 64
    seed: int = 0

    def __call__(self, x: "LayerInputs") -> Tensor:
        visible = _visible(x, self.block_size)
        generator = torch.Generator(x.q.device).manual_seed(self.seed * 1_000_003 + x.layer)
        shape = (x.q.shape[0], x.q.shape[1], *visible.shape[2:])
        return normalize_rows(torch.rand(shape, generator=generator, device=x.q.device) * visible)


@dataclass(frozen=True)
class SinkLocal:
    """Scores the first block highest, then the nearest ones (the A shape of StreamingLLM), regardless of content."""

    block_size: int = 64

    def __call__(self, x: "LayerInputs") -> Tensor:
        visible = _visible(x, self.block_size)
        cols = torch.arange(visible.shape[-1], device=x.q.device)
        distance = visible.sum(-1, keepdim=True) - 1 - cols
        scores = visible / (1 + distance.clamp(min=0)).masked_fill(cols == 0, 1)
        return normalize_rows(scores).expand(x.q.shape[0], x.q.shape[1], -1, -1)


@dataclass(frozen=True)
class MeanPool:
    """Scores blocks by the softmax over products of mean-pooled queries and keys after RoPE; needs no training."""

    block_size: int = 64

    def __call__(self, x: "LayerInputs") -> Tensor:
        mean_q = pool_blocks(x.q, ["avg"], block_size=self.block_size, start=_first_query(x))
        mean_k = pool_blocks(x.k, ["avg"], block_size=self.block_size, start=x.kv_start)
        mean_q = mean_q.unflatten(1, (x.k.shape[1], -1)).flatten(2, 3)  # one product for all heads of a query group
        logits = (mean_q @ mean_k.transpose(-1, -2)).unflatten(2, (-1, _row_blocks(x, self.block_size)))
        return block_softmax(x.capped(logits.flatten(1, 2) * x.scale), _visible(x, self.block_size))


@dataclass(frozen=True)
class Quest:
    """Scores blocks by upper bounds on the scores of the row block's queries with a block's keys; needs no training.

    The bound of Tang et al. 2024 (Quest, Eq. 1), ``sum_d max(q_d max_d, q_d min_d)``, is computed for each query, and the row
    block takes the largest. Row blocks are processed in chunks, so that the bounds of single queries never take more than
    ``QUEST_CHUNK_BYTES``.
    """

    block_size: int = 64

    def __call__(self, x: "LayerInputs") -> Tensor:
        queries = aligned_blocks(x.q, _first_query(x), self.block_size)  # [B, Hq, Tr, block, D]
        bounds = pool_blocks(x.k, ["max", "min"], block_size=self.block_size, start=x.kv_start)  # [B, Hkv, Tc, 2 D]
        bounds = bounds.transpose(-1, -2)
        row_bytes = 4 * queries.shape[0] * queries.shape[1] * self.block_size * (bounds.shape[-1] + bounds.shape[-2])
        logits = [
            x.capped(self._largest_bound(rows, bounds) * x.scale)
            for rows in queries.split(max(1, QUEST_CHUNK_BYTES // row_bytes), dim=2)
        ]
        return block_softmax(torch.cat(logits, dim=2), _visible(x, self.block_size))

    def _largest_bound(self, rows: Tensor, bounds: Tensor) -> Tensor:
        signed = torch.cat([rows.clamp(min=0), rows.clamp(max=0)], dim=-1).float()
        grouped = signed.unflatten(1, (bounds.shape[1], -1))  # [B, Hkv, G, rows, block, 2 D]
        products = grouped.flatten(2, 4) @ bounds
        return products.unflatten(2, grouped.shape[2:5]).amax(dim=4).flatten(1, 2)


@dataclass(frozen=True)
class Selection:
    """Selects the blocks of a layer that are read.

    Attributes
    ----------
    policy : one policy for all layers, or a sequence with one for each layer.
    scorer : source of the block scores.
    always : blocks that every row reads. They and the row's own (diagonal) block count towards the policy's share.
    """

    policy: Policy | Sequence[Policy]
    scorer: Scorer
    always: AlwaysRead = SINK_AND_LOCAL

    @property
    def block_size(self) -> int:
        """Number of tokens in a block of the scorer."""
        return self.scorer.block_size

    @property
    def gate(self) -> "Gate | None":
        """The gate whose scores are used, if they are those of a gate."""
        return self.scorer.gate if isinstance(self.scorer, GateScores) else None

    @classmethod
    def from_config(
        cls,
        cfg: SelectConfig,
        gate: "Gate | None" = None,
        *,
        scorer: Scorer | None = None,
        thresholds: Mapping[str, Any] | None = None,
    ) -> "Selection":
        """Builds the selection that ``select.*`` describes.

        Parameters
        ----------
        gate : the gate whose scores are used, with ``scores="gate"``.
        scorer : source of the scores ``a_shape``, from ``measure_spans``; None: the one that
            ``cfg.scores`` names.
        thresholds : table of ``calibrate`` for the policy ``calibrated``; None: the gate's.

        Raises
        ------
        UserError
            The scores are those of a gate and there is no gate, those of the A shape and there is no ``scorer``, or the policy
            is calibrated and there are no thresholds, or they were measured with other blocks that are always read.
        """
        scorer = scorer or _scorer(cfg, gate)
        recorded = gate.always if cfg.scores == "gate" and gate is not None else SINK_AND_LOCAL
        always = always_read(cfg, recorded)
        if not isinstance(cfg, CalibratedConfig):
            return cls(_policy(cfg, scorer.block_size), scorer, always)
        if thresholds is None and cfg.scores == "gate" and gate is not None:
            _check_always(always, recorded)
            thresholds = gate.thresholds
        return cls(_calibrated(cfg, always, thresholds), scorer, always._replace(short_rows=SHORT_ROWS))

    def blocks(self, x: "LayerInputs") -> Tensor:
        """Returns the blocks of a layer to read, a mask or zooms ``[B, Hq | Hkv, Tr, Tc]``.

        Every row that sees a key reads at least one block.
        """
        return self.choose(self.scorer(x), x)

    def choose(self, scores: Tensor, x: "LayerInputs") -> Tensor:
        """Returns the result of :meth:`blocks` for given scores, so that several policies can share them."""
        policy = self.policy[x.layer] if isinstance(self.policy, Sequence) else self.policy
        return policy(scores, self.candidates(x))

    def candidates(self, x: "LayerInputs") -> Candidates:
        """Returns the blocks to select from."""
        return candidate_blocks(x.num_queries, x.num_keys, self.block_size, x.kv_start, x.q.device, self.always)


def _scorer(cfg: SelectConfig, gate: "Gate | None") -> Scorer:
    if cfg.scores == "gate" and gate is None:
        raise UserError("select.scores=gate: needs a gate artifact; run msattn train-gate, or choose the scores of a baseline")
    if cfg.scores == "a_shape":
        raise UserError("select.scores=a_shape: needs spans that msattn eval measures on text; sink_local has equal spans")
    scorers: dict[str, Callable[[], Scorer]] = {
        "gate": lambda: GateScores(gate),  # pyrefly: ignore[bad-argument-type]
        "oracle": lambda: Oracle(cfg.block_size),
        "random": lambda: Random(cfg.block_size, cfg.seed),
        "sink_local": lambda: SinkLocal(cfg.block_size),
        "mean_pool": lambda: MeanPool(cfg.block_size),
        "quest": lambda: Quest(cfg.block_size),
        "vertical_slash": lambda: VerticalSlash(cfg.block_size),
    }
    return scorers[cfg.scores]()


def always_read(cfg: SelectConfig, recorded: AlwaysRead = SINK_AND_LOCAL) -> AlwaysRead:
    """Returns the blocks that ``cfg`` always reads; ``recorded`` are those of a gate's artifact."""
    sink, local = (
        default if given is None else given
        for given, default in ((cfg.sink_blocks, recorded.sink_blocks), (cfg.local_blocks, recorded.local_blocks))
    )
    return AlwaysRead(sink, local, cfg.dense_queries)


def _check_always(asked: AlwaysRead, recorded: AlwaysRead) -> None:
    for key in ("sink_blocks", "local_blocks"):
        if getattr(asked, key) != getattr(recorded, key):
            raise UserError(
                f"select.{key}={getattr(asked, key)}: the gate was calibrated with {getattr(recorded, key)}; "
                "select.policy=topk accepts any number"
            )


def _policy(cfg: SelectConfig, block_size: int) -> Policy:
    match cfg:
        case TopKConfig():
            return TopK(cfg.sparsity)
        case ThresholdConfig():
            return Threshold(cfg.threshold)
        case NucleusConfig():
            return Nucleus(cfg.mass)
        case TokenBudgetConfig():
            return TokenBudget(cfg.tokens, block_size)
        case MultiscaleConfig():
            return Multiscale(cfg.shares)
    raise NotImplementedError(cfg.policy)


def _calibrated(cfg: CalibratedConfig, always: AlwaysRead, table: Mapping[str, Any] | None) -> list[Policy]:
    if table is None:
        raise UserError(f"select.policy=calibrated: needs calibrated thresholds of select.scores={cfg.scores}; topk needs none")
    if cfg.sparsity > table["sparsities"][-1]:
        raise UserError(f"select.sparsity={cfg.sparsity}: {cfg.scores} is calibrated up to {table['sparsities'][-1]}")
    share = 1 - cfg.sparsity
    above = shortest_row(cfg.sparsity, always)
    found = [threshold_at(table, layer, cfg.sparsity) for layer in range(len(table["layers"]))]
    return [TopK(cfg.sparsity) if each is None else Calibrated(share * table["floor"], *each, above) for each in found]


def selected_attention(x: "LayerInputs", selected: Tensor, block_size: int) -> SparseAttention:
    """Computes the attention of a layer over the selected blocks.

    ``selected [B | 1, Hq | Hkv | 1, Tr, Tc]`` is a bool block mask for ``block_sparse_attention``, or uint8 zooms for
    ``multiscale_attention``.
    """
    operation = block_sparse_attention if selected.dtype == torch.bool else multiscale_attention
    return with_sinks(x, operation(x.q, x.k, x.v, selected, block_size=block_size, **score_options(x)))


def _visible(x: "LayerInputs", block_size: int) -> Tensor:
    return visible_blocks(x.num_queries, x.num_keys, block_size, x.kv_start, x.q.device)


def _first_query(x: "LayerInputs") -> Tensor | None:
    return first_query(x.num_queries, x.num_keys, x.kv_start, x.q.device)


def _row_blocks(x: "LayerInputs", block_size: int) -> int:
    return -(-x.num_queries // block_size)
