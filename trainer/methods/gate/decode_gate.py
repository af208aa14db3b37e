"""DecodeGate: scores of key blocks for single queries, which decoding uses to choose blocks
(SeerAttention-R, section 3).

A gate serves a query group. The group's queries before RoPE are concatenated and projected, keys
before RoPE are pooled over blocks and projected, and both are rotated by the gate's own RoPE:
queries at their position, keys at the first position of their block. With ``gate.qk_norm`` an
RMSNorm precedes RoPE. The scores are ``softmax(gq gk^T / sqrt(hidden))`` over the blocks before the
dense window.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import torch
from annotated_types import Interval
from torch import Tensor, nn

from msattn.kernels.pool_blocks import pool_blocks
from msattn.trainer import artifacts, models
from msattn.trainer.config import GateConfig
from msattn.trainer.config.values import require
from msattn.trainer.errors import UserError
from msattn.trainer.methods.base import Method, check_finite
from msattn.trainer.methods.buckets import DecodeDefaults, Router
from msattn.trainer.methods.budgets import Budget, KeyShare, KeyThresholds, Probability, Probes
from msattn.trainer.methods.gate.artifact import GateArtifact, Shape
from msattn.trainer.methods.gate.attn_gate import AttnGate, check_keys
from msattn.trainer.methods.key_blocks import BlockRouter, block_products
from msattn.trainer.models.families import check_shape
from msattn.trainer.models.layer_attention import LayerInputs
from msattn.trainer.models.parallel import ModelShard
from msattn.trainer.storage.documents import checked

if TYPE_CHECKING:
    from transformers import PretrainedConfig


Finished = Literal["first", "last"]


@dataclass(frozen=True)
class DecodeGateDetails:
    """Schema of the manifest entries of :meth:`DecodeGate.details`."""

    gate: GateConfig
    num_blocks: Annotated[int, Interval(ge=1, lt=2**31)]
    finished_at: Finished
    thresholds: KeyThresholds | None
    serving: DecodeDefaults = field(default_factory=DecodeDefaults)


class DecodeGate(BlockRouter, GateArtifact[KeyThresholds]):
    """Decode gates of all layers of a model, trained by ``msattn train-gate gate.phase=decode``.

    A router whose buckets are blocks: a query with ``p`` probes reads the ``p`` blocks with the
    highest scores.

    Parameters
    ----------
    num_blocks : blocks of the longest sequence, the largest number of probes.
    finished_at : position (first or last key) for RoPE of the pooled key of a block that new tokens
        completed after the last prompt. Other blocks use their first key, as in training.

    Attributes
    ----------
    gates : an :class:`~msattn.trainer.methods.gate.attn_gate.AttnGate` for each attention layer.
    thresholds : calibrated thresholds
        (:func:`msattn.trainer.methods.key_thresholds.calibrate_keys`); None before training.
    """

    phase = "decode"
    method = Method("decode gate", trained=True, style={"color": "#0072B2", "marker": "o"})
    predicts_attention = True

    def __init__(
        self,
        shape: Shape,
        cfg: GateConfig,
        inv_freq: Tensor,
        *,
        num_blocks: int,
        finished_at: Finished = "first",
    ) -> None:
        super().__init__(shape, cfg, inv_freq)
        self.finished_at: Finished = finished_at
        self.block_size, self.pools, self.num_buckets = cfg.block_size, cfg.k_pool, num_blocks
        self.layers, self.kv_heads = list(range(shape.num_layers)), shape.num_kv_heads
        of_groups = replace(cfg, heads="kv", q_pool=["avg"])  # a single query is its own mean
        of_layer = shape.head_dim, shape.num_heads, shape.num_kv_heads, of_groups
        self.gates = nn.ModuleList(AttnGate(*of_layer) for _ in self.layers)

    @classmethod
    def build(
        cls, config: "PretrainedConfig", cfg: GateConfig, finished_at: Finished = "first"
    ) -> "DecodeGate":
        """Builds untrained gates for a model's ``config``.

        Raises UserError: a layer keeps the model's own attention, or computes other scores than
        Llama's.
        """
        if not models.family_of(config).llama_layers or len(
            models.served_layers(config)
        ) < models.num_layers(config):
            raise UserError(
                "gate.phase=decode: expected a model whose layers are Llama's, with full attention"
            )
        shape, inv_freq = cls.of_model(config, cfg)
        num_blocks = -(-models.max_length(config) // cfg.block_size)
        return cls(shape, cfg, inv_freq, num_blocks=num_blocks, finished_at=finished_at)

    @classmethod
    def load(cls, path: str | Path) -> "DecodeGate":
        """Loads trained gates from the folder or Hub id of an artifact, on the CPU.

        Raises UserError if it is missing, damaged or of another kind or phase, or its tensors do
        not match its manifest.
        """
        artifact = artifacts.read(path, kind="decode_gate")
        details = checked(
            artifact.manifest["details"], DecodeGateDetails, f"artifact {path}: details"
        )
        num_gates = artifact.manifest["model"]["num_layers"]
        options = {"num_blocks": details.num_blocks, "finished_at": details.finished_at}
        return cls._restore(artifact, details.gate, details.thresholds, num_gates, **options)

    def shard(self, part: ModelShard) -> "DecodeGate":
        """Returns the gates of a part of the heads, for tensor parallelism."""
        return self._part(part, num_blocks=self.num_buckets, finished_at=self.finished_at)

    def assigns_like(self, other: Router) -> bool:
        if self is other or not isinstance(other, DecodeGate):
            return self is other
        # with which blocks are summarized
        weights = self.state_dict().values(), other.state_dict().values()
        return self.cfg == other.cfg and all(map(torch.equal, *weights))

    def check_model(self, config: Any) -> None:
        check_shape("qmodel", self.model_shape(), config)
        check_finite("qmodel", self)

    def budget(
        self, *, probes: int = 0, keys: float | None = None, threshold: float | None = None
    ) -> Budget:
        if threshold is not None:
            # probabilities sum to 1
            return Probability(threshold, int(min(1 / threshold, self.num_buckets)))
        if keys is None or keys < 1:
            return super().budget(probes=probes, keys=keys)
        size, most = self.block_size, self.block_size * self.num_buckets
        accepted = f"expected {size} (a block) to {most:,} keys, or a share of them"
        require(size <= keys <= most, "keys", f"{keys:g}", accepted)
        return Probes(int(keys) // size)

    def mean_keys(self, budget: Budget) -> tuple[int, float]:
        return (
            super().mean_keys(budget)
            if isinstance(budget, KeyShare)
            else (budget.most * self.block_size, 0.0)
        )

    def details(self) -> dict[str, Any]:
        return super().details() | {"num_blocks": self.num_buckets, "finished_at": self.finished_at}

    def logits(self, x: LayerInputs, positions: Tensor) -> Tensor:
        """Computes the scores of a layer's blocks before softmax, for the queries at
        ``positions [n]`` of a whole prompt.

        Returns fp32 ``[B, Hkv, n, Tc]``, not masked.
        """
        queries = self._project_queries(x.layer, x.q_nope[:, :, positions], positions[None])
        return queries @ self.summarize(x).mT

    def summarize(self, x: LayerInputs) -> Tensor:
        """Returns the projected keys of each block: fp32 ``[B, Hkv, Tc, hidden]``, fp64 for fp64.

        Raises ValueError if keys were cached before this pass and ``x.pooled`` does not hold
        them.
        """
        if x.pooled is not None:
            pooled = x.pooled.keys
        else:
            check_keys(x)
            pooled = pool_blocks(
                x.k_nope.detach(), self.cfg.k_pool, block_size=self.block_size, start=x.kv_start
            )
        with torch.autocast(pooled.device.type, enabled=False):
            return self._gate(x.layer).project_keys(
                pooled, self.inv_freq, self._positions(x, pooled.shape[2])
            )

    def _positions(self, x: LayerInputs, blocks: int) -> Tensor | None:
        """Returns the RoPE positions of the blocks' pooled keys, ``[B | 1, blocks]``; None: the
        first positions.
        """
        prompt_keys = None if x.pooled is None else x.pooled.prompt_keys
        if self.finished_at == "first" or prompt_keys is None:
            return None
        prompt = torch.full((1, 1), prompt_keys, device=x.k.device) - (
            0 if x.kv_start is None else x.kv_start[:, None]
        )
        first = self.block_size * torch.arange(blocks, device=x.k.device)
        last = first + (self.block_size - 1)
        return torch.where(last < prompt, first, last)

    def scores(
        self, layer: int, summaries: Tensor, q_nope: Tensor, q: Tensor, positions: Tensor
    ) -> Tensor:
        """Returns the block scores of each query group before softmax: fp32 ``[B, Hkv, P]``."""
        return block_products(
            self._project_queries(layer, q_nope, positions[:, None]), summaries
        ).squeeze(2)

    def head_scores(
        self, layer: int, summaries: Tensor, q_nope: Tensor, q: Tensor, positions: Tensor
    ) -> Tensor:
        """Returns :meth:`scores` for each query head, which are those of its group: fp32
        ``[B, Hq, P]``.
        """
        of_groups = self.scores(layer, summaries, q_nope, q, positions)
        return of_groups.repeat_interleave(q_nope.shape[1] // self.kv_heads, dim=1)

    def _gate(self, layer: int) -> AttnGate:
        return cast(AttnGate, self.gates[layer])

    def _project_queries(self, layer: int, q_nope: Tensor, positions: Tensor) -> Tensor:
        """Returns the projected queries of each group: ``[B, Hkv, N, hidden]``, for queries
        ``[B, Hq, N, D]``.
        """
        gate = self._gate(layer)
        # [B, Hkv, N, group * D]
        grouped = q_nope.detach().unflatten(1, (self.kv_heads, -1)).transpose(2, 3).flatten(3)
        with torch.autocast(q_nope.device.type, enabled=False):
            return gate.project_queries(
                grouped.to(gate.query_weight.dtype), positions, self.inv_freq
            )
