"""AttnGate: scores of key blocks for each query block, from pooled queries and keys (SeerAttention,
section 3.1).

In each layer and head, queries and keys before RoPE are pooled over blocks, projected, and rotated
by the gate's own RoPE at the first position of each block. The scores are
``softmax(gq gk^T / sqrt(hidden))`` over the causally visible blocks. With ``gate.mean_weight`` a
trained gate adds the products of mean-pooled queries and keys after RoPE, times this weight, to its
own scores before the softmax. These products are uncapped even in models that cap their scores.
Gates are trained without them, because gates that had them as inputs selected worse blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast, final

import torch
from annotated_types import Interval
from torch import Tensor, nn
from torch.nn import functional as F

from msattn.kernels.common.checks import first_query
from msattn.kernels.gate_blocks import gate_blocks
from msattn.kernels.gate_scores import gate_scores
from msattn.kernels.pool_blocks import pool_blocks
from msattn.kernels.types import MaxPoolAttention
from msattn.trainer import artifacts, models
from msattn.trainer.config import BlockSizes, GateConfig
from msattn.trainer.errors import UserError
from msattn.trainer.methods.base import GateScorer, Method
from msattn.trainer.methods.blocks import (
    SINK_AND_LOCAL,
    AlwaysRead,
    RowCandidates,
    normalize_rows,
    row_span,
)
from msattn.trainer.methods.gate.artifact import GateArtifact, Shape
from msattn.trainer.methods.last_queries import last_masses, last_positions
from msattn.trainer.methods.thresholds import Allocation, BlockThresholds
from msattn.trainer.models import rope
from msattn.trainer.models.layer_attention import LayerInputs, block_map
from msattn.trainer.models.parallel import ModelShard
from msattn.trainer.storage.documents import checked

if TYPE_CHECKING:
    from transformers import PretrainedConfig


NORM_EPS = 1e-6
TARGET, MEAN_WEIGHT = "mass", 0.5  # used until they are chosen
# factor of queries and of keys, so that initial logits are a quarter of the scaled products of
# block means
INITIAL_SCALE = 0.5
LAST_QUERIES = 64
# weight of the mean attention of the last queries; 1 finds answers as well and loses more
# perplexity
COLUMNS = 0.5


def frequency_matched_projection(head_dim: int, hidden: int, channels: Tensor | None) -> Tensor:
    """Returns the projection ``[hidden, head_dim]`` that keeps each rotated pair of dimensions at
    its RoPE frequency.

    Pair ``j`` of the gate's ``hidden / 2`` rotates with ``base ** (-2 j / hidden)``, like pair
    ``j * head_dim / hidden`` of the model. The weights are scaled so that products scaled by
    ``hidden ** -0.5`` keep their magnitude when ``hidden`` is not ``head_dim``. ``channels``: int64
    ``[head_dim / 2, 2]``, the channels of the model's pairs; None: ``j`` and ``j + head_dim / 2``.
    """
    channels = torch.arange(head_dim).view(2, -1).T if channels is None else channels
    source = channels[torch.arange(hidden // 2) * head_dim // hidden].T.flatten()
    weight = torch.zeros(hidden, head_dim)
    weight[torch.arange(hidden), source] = (head_dim / hidden) ** 0.25
    return weight


class AttnGate(nn.Module):
    """The gate of one layer.

    Parameters
    ----------
    head_dim, num_heads, num_kv_heads : shape of the layer's attention.
    cfg : poolings, width and heads. With ``heads="kv"`` a gate head serves a whole query group, and
        its input is the concatenation of the group's pooled queries.
    channels : as for :func:`frequency_matched_projection`.

    Notes
    -----
    Weights are initialized to scaled identities that give all poolings equal weight and keep each
    dimension at its RoPE frequency. An untrained gate therefore ranks blocks by the scores of their
    means (or mid-ranges), not at random. ``INITIAL_SCALE`` flattens these scores, because the
    target is flatter: the maxima of a row block come from different queries, each with its own best
    column.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        cfg: GateConfig,
        channels: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.num_kv_heads = num_kv_heads
        self.heads = num_heads if cfg.heads == "query" else num_kv_heads
        self.hidden = cfg.hidden or head_dim
        self.shared_queries = num_heads // self.heads  # query heads in the input of a gate head
        projection = frequency_matched_projection(head_dim, self.hidden, channels)
        query, key = (
            projection.repeat(1, parts) * (INITIAL_SCALE / parts)
            for parts in (self.shared_queries * len(cfg.q_pool), len(cfg.k_pool))
        )
        # [Hg, hidden, shared * pools * D]
        self.query_weight = nn.Parameter(query.repeat(self.heads, 1, 1))
        self.key_weight = nn.Parameter(key.repeat(self.heads, 1, 1))  # [Hg, hidden, pools * D]
        if cfg.qk_norm:
            self.query_norm, self.key_norm = (
                nn.Parameter(torch.ones(self.heads, self.hidden)) for _ in range(2)
            )

    def forward(
        self,
        q_nope: Tensor,
        k_nope: Tensor,
        *,
        inv_freq: Tensor | None,
        kv_start: Tensor | None = None,
    ) -> Tensor:
        """Computes block scores before masking and softmax: fp32 ``[B, Hg, Tr, Tc]``, for ``Hg``
        gate heads.

        Queries ``q_nope [B, Hq, N, D]`` are the last ``N`` of the positions of
        ``k_nope [B, Hkv, M, D]``; both are before RoPE and after a q/k norm. ``inv_freq`` are those
        of the gate, None in a layer without RoPE; ``kv_start`` int32 ``[B]`` is the left padding.
        """
        num_queries, num_keys, sizes = q_nope.shape[2], k_nope.shape[2], self.cfg.sizes
        with torch.no_grad():
            first = first_query(num_queries, num_keys, kv_start, q_nope.device)
            pooled_q = pool_blocks(q_nope, self.cfg.q_pool, block_size=sizes.queries, start=first)
            pooled_q = (
                pooled_q.unflatten(1, (self.heads, self.shared_queries)).transpose(2, 3).flatten(3)
            )
            pooled_k = pool_blocks(k_nope, self.cfg.k_pool, block_size=sizes.keys, start=kv_start)
        rows, _ = row_span(num_queries, num_keys, sizes.queries, kv_start, q_nope.device)
        with torch.autocast(q_nope.device.type, enabled=False):
            return self.project_queries(pooled_q, rows, inv_freq) @ self.project_keys(
                pooled_k, inv_freq
            ).transpose(-1, -2)

    def project_queries(
        self, pooled_q: Tensor, positions: Tensor, inv_freq: Tensor | None
    ) -> Tensor:
        """Projects query inputs ``[B, Hg, T, P]`` and rotates them at ``positions [B | 1, T]``:
        ``[B, Hg, T, hidden]``.

        They are scaled so that their products with :meth:`project_keys` are the scores.
        """
        gate_q = torch.einsum("bhtp,hop->bhto", pooled_q, self.query_weight)
        if self.cfg.qk_norm:
            gate_q = F.rms_norm(gate_q, (self.hidden,), eps=NORM_EPS) * self.query_norm[:, None]
        if self.cfg.rope is True and inv_freq is not None:
            gate_q = rope.rotate(gate_q, *rope.cos_sin(inv_freq, positions))
        return gate_q * self.hidden**-0.5

    def project_keys(
        self, pooled_k: Tensor, inv_freq: Tensor | None, positions: Tensor | None = None
    ) -> Tensor:
        """Projects pooled keys ``[B, Hkv, Tc, P]`` and rotates them: ``[B, Hg, Tc, hidden]``.

        They are rotated at ``positions [B | 1, Tc]``, by default at the first position of their
        block.
        """
        key_weight = self.key_weight.unflatten(0, (self.num_kv_heads, -1))
        gate_k = torch.einsum("bhtp,hgop->bhgto", pooled_k, key_weight).flatten(1, 2)
        if self.cfg.qk_norm:
            gate_k = F.rms_norm(gate_k, (self.hidden,), eps=NORM_EPS) * self.key_norm[:, None]
        if self.cfg.rope is not True or inv_freq is None:
            return gate_k
        if positions is None:
            positions = (
                self.cfg.sizes.keys * torch.arange(gate_k.shape[2], device=gate_k.device)[None]
            )
        return rope.rotate(gate_k, *rope.cos_sin(inv_freq, positions))


def pool_keys(
    pools: Sequence[str], k_nope: Tensor, k: Tensor, *, block_size: int, start: Tensor | None = None
) -> Tensor:
    """Pools blocks of keys before RoPE ``k_nope [B, Hkv, n, D]``, and after it, ``k``, for a last
    pooling ``rope``, their mean.

    Returns fp32 ``[B, Hkv, blocks, len(pools) * D]``; ``start`` as in ``pool_blocks``.
    """
    of_keys = [name for name in pools if name != "rope"]
    return pool_blocks(
        k_nope, of_keys, block_size=block_size, start=start, rotated=k if "rope" in pools else None
    )


def pool_from(
    x: LayerInputs,
    pools: Sequence[str],
    rotation: rope.Rotation | None,
    *,
    block_size: int,
    first: int = 0,
    start: Tensor | None = None,
) -> Tensor:
    """Returns the pooled keys of the blocks from key ``first`` on, with padding up to ``start``.

    Those of earlier passes are recovered by inverting the rotation of cached keys.
    """
    tail = rope.keys_before_rope(x, first, rotation)
    return pool_keys(pools, tail, x.k[:, :, first:], block_size=block_size, start=start)


@dataclass(frozen=True)
class GateDetails:
    """Schema of the manifest entries of :meth:`Gate.details`."""

    gate: GateConfig
    thresholds: dict[str, BlockThresholds] | None
    layers: list[int]
    sink_blocks: Annotated[int, Interval(ge=0, le=10**9)]
    local_blocks: Annotated[int, Interval(ge=0, le=10**9)]

    def __post_init__(self) -> None:
        if not self.layers or sorted(set(self.layers)) != self.layers or self.layers[0] < 0:
            raise ValueError("layers must increase from 0 or more")


class ModulesByLayer(nn.ModuleDict):
    """Modules of some of a model's layers, by the number of the layer."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        super().__init__({str(layer): module for layer, module in modules.items()})

    def __getitem__(self, layer: int) -> nn.Module:  # type: ignore[override]
        if str(layer) not in self:
            raise ValueError(f"layer={layer}: there are gates for layers {', '.join(self)}")
        return super().__getitem__(str(layer))


class Gate(GateArtifact[dict[str, BlockThresholds]]):
    """Gates of all layers of a model that may be sparse, trained by ``msattn train-gate`` and used
    by ``msattn.attach``.

    Attributes
    ----------
    layers : an :class:`AttnGate` for each of ``layer_numbers``, by number.
    thresholds : calibrated thresholds (``calibrate_blocks``) of the block scores in
        ``GATE_SCORES``, by name; None before training.
    always : blocks that every row reads by default, with which ``thresholds`` were measured.
    """

    phase = "prefill"

    def __init__(
        self,
        shape: Shape,
        cfg: GateConfig,
        inv_freq: Tensor,
        *,
        layers: list[int],
        channels: Tensor | None = None,
    ) -> None:
        weight = MEAN_WEIGHT if cfg.mean_weight is None else cfg.mean_weight
        cfg = replace(cfg, target=cfg.target or TARGET, mean_weight=weight)
        super().__init__(shape, cfg, inv_freq)
        self.always = SINK_AND_LOCAL
        self.layer_numbers = list(layers)
        of_layer = shape.head_dim, shape.num_heads, shape.num_kv_heads, cfg, channels
        self.layers = ModulesByLayer({layer: AttnGate(*of_layer) for layer in self.layer_numbers})

    @classmethod
    def build(cls, config: "PretrainedConfig", cfg: GateConfig) -> "Gate":
        """Builds untrained gates for a model's ``config``."""
        shape, inv_freq = cls.of_model(config, cfg)
        options = {"layers": models.served_layers(config), "channels": rope.channel_pairs(config)}
        return cls(shape, cfg, inv_freq, **options)

    @classmethod
    def load(cls, path: str | Path) -> "Gate":
        """Loads a trained gate from the folder or Hub id of an artifact, on the CPU.

        Raises UserError if it is missing, damaged or of another kind or phase, or its tensors do
        not match its manifest.
        """
        artifact = artifacts.read(path, kind="gate")
        details = checked(artifact.manifest["details"], GateDetails, f"artifact {path}: details")
        for key in ("target", "mean_weight"):
            if getattr(details.gate, key) is None:
                raise UserError(f"artifact {path}: details.gate has no {key}")
        thresholds = details.thresholds
        layers = details.layers
        num_layers = artifact.manifest["model"]["num_layers"]
        if layers[-1] >= num_layers:
            raise UserError(
                f"artifact {path}: details.layers={layers}: the model has {num_layers} layers"
            )
        for name, table in (thresholds or {}).items():
            if len(table.layers) != num_layers:
                given = f"details.thresholds.{name} has {len(table.layers)} layers"
                raise UserError(f"artifact {path}: {given}, the model {num_layers}")
        gate = cls._restore(artifact, details.gate, thresholds, len(layers), layers=layers)
        gate.always = AlwaysRead(details.sink_blocks, details.local_blocks)
        return gate

    def true_map(self, x: LayerInputs) -> MaxPoolAttention:
        """Returns dense attention of a layer and the block map that its gates learn."""
        return block_map(x, self.cfg.sizes, cast(str, self.cfg.target))

    def scorer(self, name: str) -> "GateScores":
        """Returns the block scores by these gates that have this name in ``select.scores``."""
        return GATE_SCORERS[name](self)

    def shard(self, part: ModelShard) -> "Gate":
        """Returns the gates of the layers and heads of a rank."""
        own = self._part(part, layers=part.own(self.layer_numbers))
        own.always = self.always
        return own

    def details(self) -> dict[str, Any]:
        always = {"sink_blocks": self.always.sink_blocks, "local_blocks": self.always.local_blocks}
        return super().details() | {"layers": self.layer_numbers} | always

    def logits(self, x: LayerInputs) -> Tensor:
        """Computes the trained scores of a layer's blocks before masking, fp32 ``[B, Hg, Tr, Tc]``.

        Raises ValueError if keys were cached before this pass, because the gate pools keys before
        RoPE and caches hold keys after RoPE.
        """
        check_keys(x)
        return self.layers[x.layer](
            *self._inputs(x), inv_freq=self._inv_freq(x), kv_start=x.kv_start
        )

    @torch.no_grad()
    def scores(self, x: LayerInputs, **given: Any) -> Tensor:
        """Computes the block probabilities of a layer, fp32 ``[B, Hg, Tr, Tc]``.

        They are the softmax over the visible blocks of :meth:`logits` and of the products of
        mean-pooled queries and keys after RoPE, in one operation without gradients. ``Hg`` is the
        number of query heads or of key/value heads, by ``gate.heads``. ``given`` are further
        arguments of :func:`~msattn.kernels.gate_scores.gate_scores`: ``last_queries``, ``columns``
        and the like. Where a cache keeps pooled keys, ``x.pooled`` stand for all keys. Raises
        ValueError as :meth:`logits`, without ``x.pooled``.
        """
        return gate_scores(**self._arguments(x), **given)

    @torch.no_grad()
    def select(
        self,
        x: LayerInputs,
        candidates: RowCandidates,
        counts: Tensor,
        limit: Mapping[str, Any],
        **given: Any,
    ) -> Tensor:
        """Selects blocks by :meth:`scores`, see
        :class:`~msattn.trainer.methods.base.GateScorer`; ``given`` as there.
        """
        return gate_blocks(
            **self._arguments(x),
            counts=counts,
            local=candidates.local,
            sink_blocks=candidates.sink_blocks,
            **limit,
            **given,
        )

    def _arguments(self, x: LayerInputs) -> dict[str, Any]:
        """Returns the arguments of the operations on gates."""
        layer, cfg, pooled = cast(AttnGate, self.layers[x.layer]), self.cfg, x.pooled
        weight = cast(float, cfg.mean_weight)
        queries, keys = self._inputs(x)
        query_weight, key_weight = (
            each.unflatten(0, (layer.num_kv_heads, -1))[x.kv_heads].flatten(0, 1)
            for each in (layer.query_weight, layer.key_weight)
        )
        if pooled is None:
            check_keys(x)
            pooled_keys = pool_keys(
                cfg.cached_pools, keys, x.k, block_size=cfg.sizes.keys, start=x.kv_start
            )
        else:
            pooled_keys = pooled.keys
        return {
            "q": queries,
            "pooled_k": pooled_keys,
            "query_weight": query_weight,
            "key_weight": key_weight,
            "inv_freq": self._inv_freq(x),
            "q_pool": cfg.q_pool,
            "num_keys": x.num_keys,
            "kv_start": x.kv_start,
            "q_rope": x.q if weight else None,
            "mean_weight": weight * x.scale,
            **cfg.sizes.arguments,
        }

    def _inputs(self, x: LayerInputs) -> tuple[Tensor, Tensor]:
        """Returns the queries and keys that are pooled: before RoPE, or for the paper's baseline
        after the model's.
        """
        return (x.q, x.k) if self.cfg.rope == "model" else (x.q_nope, x.k_nope)

    def _inv_freq(self, x: LayerInputs) -> Tensor | None:
        """Returns the frequencies of the gate's own RoPE; None without it, as in layers of the
        model that do not rotate.
        """
        return self.inv_freq if x.rotates and self.cfg.rope is True else None


def check_keys(x: LayerInputs) -> None:
    """Raises ValueError if keys were cached before this pass, so that they are known only after
    RoPE.
    """
    if x.num_keys != x.k_nope.shape[2]:
        raise ValueError(
            f"num_keys={x.num_keys}: a gate needs every key before RoPE, and this pass has "
            f"{x.k_nope.shape[2]}"
        )


@dataclass(frozen=True)
class GateScores(GateScorer):
    """Scores blocks by the probabilities of a trained gate.

    The last row block often holds a question in which only some tokens look far back, which pooling
    hides. With ``last_block="queries"`` its scores are therefore the largest probability over the
    pooled queries and each of the last ``block_size`` queries; this applies only to the last chunk
    of a prompt. With ``"pooled"`` only the pooled queries count, as in the paper.
    """

    method: ClassVar = Method(
        "gate", trained=True, style={"color": "#0072B2", "marker": "o"}, other_color="#7B68EE"
    )
    allocation: ClassVar = Allocation(floor=0.5, pooled=True)
    last_chunk_needs_keys: ClassVar = False
    gate: Gate
    last_block: str = "queries"

    @property
    def sizes(self) -> BlockSizes:
        return self.gate.cfg.sizes

    @final
    def __call__(self, x: LayerInputs) -> Tensor:
        return self.gate.scores(x, **self.given(x))

    @final
    def select(
        self,
        x: LayerInputs,
        candidates: RowCandidates,
        counts: Tensor,
        limit: Mapping[str, Any],
    ) -> Tensor:
        return self.gate.select(x, candidates, counts, limit, **self.given(x))

    def given(self, x: LayerInputs) -> dict[str, Any]:
        """Returns further arguments of :meth:`Gate.scores` and ``gate_blocks`` for a pass: what its
        scores depend on besides pooled queries and keys. Subclasses override this.
        """
        return {"last_queries": self.last_block == "queries" and x.ends_prompt}


@dataclass(frozen=True)
class QuestionScores(GateScores):
    """Scores blocks by a gate and by the exact attention of the last queries of a prompt.

    A gate scores blocks for each row independently, without the question that often ends a prompt.
    The last queries contain the question, and other rows also need the keys that these queries
    attend to. A block's score in a row is the gate's probability or half of the block's share of
    the attention of the last queries, whichever is larger; rows sum to 1. The row block of the last
    query gets its exact block map: the largest mass of its queries in each block. A row block that
    also contains earlier queries gets the maximum of both.

    Only the last chunk of a prompt contains the question. Where ``LayerInputs.ends_prompt`` tells
    it from earlier chunks, these use the gate's probabilities alone; otherwise every chunk takes
    its own last queries for the question.
    """

    method: ClassVar = Method(
        "gate_question",
        "gate and question",
        trained=True,
        style={"color": "#009E73", "marker": "P"},
        other_color="#66C2A5",
    )
    last_chunk_needs_keys: ClassVar = True

    @torch.no_grad()
    def given(self, x: LayerInputs) -> dict[str, Any]:
        """Returns the arguments that add the attention of the last queries to the gate's scores:
        least scores of all rows, and exact ones of the last rows.
        """
        if not x.ends_prompt:
            return {}
        masses = last_masses(x, LAST_QUERIES, self.sizes.keys)
        if self.gate.cfg.heads == "kv":  # a gate head serves all query heads of a group
            masses = masses.unflatten(1, (x.k.shape[1], -1)).amax(2)  # [B, Hg, n, Tc]
        last_rows, whole = self._exact_rows(x, masses)
        columns = COLUMNS * normalize_rows(masses.sum(2))
        return {"columns": columns, "last_rows": last_rows, "whole": whole}

    def _exact_rows(self, x: LayerInputs, masses: Tensor) -> tuple[Tensor, Tensor]:
        """Returns exact scores of the row blocks that contain the last queries, from the attention
        ``masses [B, Hg, n, Tc]`` of these, and which of the row blocks contain no other query.
        """
        n, size = masses.shape[2], self.sizes.queries
        rows = row_span(x.num_queries, x.num_keys, size, x.kv_start, x.q.device)
        positions = last_positions(x, n)
        touched = min(rows.last.shape[1], 1 + -(-(n - 1) // size))
        last_row = rows.last.argmax(1)  # it holds the last query; row blocks after it are empty
        base = (last_row[:, None] - (touched - 1)).clamp(min=0)
        # padded queries, before row 0, have no mass
        row = ((positions - rows.first[:, :1]) // size - base).clamp(min=0)
        exact = masses.new_zeros(*masses.shape[:2], touched, masses.shape[3])
        exact.scatter_reduce_(2, row[:, None, :, None].expand_as(masses), masses, "amax")
        index = base + torch.arange(touched, device=x.q.device)
        return normalize_rows(exact), rows.first.gather(1, index) >= positions[:, :1]


# by their names in ``select.scores``
GATE_SCORERS: dict[str, type[GateScores]] = {
    each.method.name: each for each in (GateScores, QuestionScores)
}
