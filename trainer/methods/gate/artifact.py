"""GateArtifact, the common base of gates for prefill and for decoding."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
from pydantic import RootModel
from torch import Tensor
from torch.nn import functional as F

from msattn.trainer import artifacts, models
from msattn.trainer.config import GateConfig
from msattn.trainer.errors import UserError
from msattn.trainer.models import rope
from msattn.trainer.models.parallel import ModelShard

if TYPE_CHECKING:
    from transformers import PretrainedConfig


Thresholds = TypeVar("Thresholds")


class Shape(NamedTuple):
    """Numbers of a model that its gates depend on, named as in its fingerprint."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class GateArtifact(artifacts.ArtifactModule, Generic[Thresholds]):
    """Gates of a model's layers, each an :class:`~msattn.trainer.methods.gate.attn_gate.AttnGate`.

    Attributes
    ----------
    phase : the phase of the gates, see :class:`~msattn.trainer.config.GateConfig`.
    shape : of the model, or of the part of its heads that this rank computes.
    inv_freq : fp32 ``[hidden / 2]``, stored with the weights; 0 for channels that do not rotate.
    thresholds : calibrated thresholds, of one or of several block scores; None before training.
    """

    phase: ClassVar[str]
    inv_freq: Tensor

    def __init__(self, shape: Shape, cfg: GateConfig, inv_freq: Tensor) -> None:
        super().__init__()
        self.shape, self.cfg = shape, cfg
        self.thresholds: Thresholds | None = None
        self.register_buffer("inv_freq", inv_freq.float())

    @staticmethod
    def of_model(config: "PretrainedConfig", cfg: GateConfig) -> tuple[Shape, Tensor]:
        """Returns the shape of a model, and the frequencies of its gates, which do not use YaRN's
        attention factor.
        """
        shape = Shape(**models.shape(config))
        hidden = cfg.hidden or shape.head_dim
        inv_freq, _ = rope.inverse_frequencies(config, dim=hidden)
        return shape, F.pad(inv_freq, (0, hidden // 2 - len(inv_freq)))

    def details(self) -> dict[str, Any]:
        """Returns the manifest entries from which :meth:`load` rebuilds these gates."""
        return {"gate": asdict(self.cfg), "thresholds": RootModel(self.thresholds).model_dump()}

    def model_shape(self) -> dict[str, int]:
        """Returns the shape of the model that the gates are for, under the keys of its
        fingerprint.
        """
        return self.shape._asdict()

    @classmethod
    def _restore(
        cls,
        artifact: artifacts.Artifact,
        cfg: GateConfig,
        thresholds: Thresholds | None,
        num_gates: int,
        **options: Any,
    ) -> Self:
        """Returns the frozen gates of an ``artifact``, on the CPU; the other arguments come from
        its manifest.

        Raises UserError if they are for another phase, or if the tensors do not match ``num_gates``
        gates.
        """
        if cfg.phase != cls.phase:
            raise UserError(
                f"artifact {artifact.path}: details.gate.phase={cfg.phase}: expected {cls.phase}"
            )
        expected = 1 + (4 if cfg.qk_norm else 2) * num_gates
        if len(artifact.tensors) != expected:  # before modules are built
            raise UserError(
                f"artifact {artifact.path}: {len(artifact.tensors)} tensors, expected {expected}"
            )
        shape = Shape(*(artifact.manifest["model"][name] for name in Shape._fields))
        with torch.device("meta"):
            gate = cls(shape, cfg, torch.empty((cfg.hidden or shape.head_dim) // 2), **options)
        artifacts.check_tensors(
            artifact, {name: tensor.shape for name, tensor in gate.state_dict().items()}
        )
        gate.load_state_dict(artifact.tensors, assign=True)
        gate.artifact, gate.thresholds = artifact, thresholds
        return gate.requires_grad_(False)

    def _part(self, part: ModelShard, **options: Any) -> Self:
        """Returns frozen gates of a part of the heads, for tensor parallelism; ``options`` may
        leave out layers.
        """
        heads, kv_heads = (
            number // part.ranks for number in (self.shape.num_heads, self.shape.num_kv_heads)
        )
        own = type(self)(
            self.shape._replace(num_heads=heads, num_kv_heads=kv_heads),
            self.cfg,
            self.inv_freq,
            **options,
        )
        whole = self.state_dict()
        own.load_state_dict(
            {
                name: whole[name] if name == "inv_freq" else part.of(whole[name], 0)
                for name in own.state_dict()
            }
        )
        own.artifact, own.thresholds = self.artifact, self.thresholds
        return own.requires_grad_(False)
