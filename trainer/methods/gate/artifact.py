"""GateArtifact: what gates for prefill and gates for decoding have in common as artifacts."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from msattn.trainer import artifacts
from msattn.trainer.config import GateConfig
from msattn.trainer.errors import UserError
from msattn.trainer.models.parallel import HeadShard

if TYPE_CHECKING:
    from msattn.trainer.methods.thresholds import BlockThresholds, KeyThresholds


class GateArtifact(artifacts.ArtifactModule):
    """Gates of a model's layers, each an :class:`~msattn.trainer.methods.gate.attn_gate.AttnGate`.

    Attributes
    ----------
    phase : the phase of the gates, see :class:`~msattn.trainer.config.GateConfig`.
    inv_freq : fp32 ``[hidden / 2]``, stored with the weights.
    thresholds : calibrated thresholds; None before training.
    """

    phase: ClassVar[str]
    cfg: GateConfig
    inv_freq: Tensor
    thresholds: dict[str, Any] | None = None

    def details(self) -> dict[str, Any]:
        """Returns the manifest entries from which :meth:`load` rebuilds these gates."""
        return {"gate": asdict(self.cfg), "thresholds": self.thresholds}

    @classmethod
    def _restore(
        cls,
        artifact: artifacts.Artifact,
        cfg: GateConfig,
        num_gates: int,
        thresholds: "BlockThresholds | KeyThresholds | None",
        build: Callable[[Tensor], Self],
    ) -> Self:
        """Returns frozen gates with the weights of ``artifact``, on the CPU.

        Parameters
        ----------
        cfg, num_gates, thresholds : what its manifest says.
        build : from inverse frequencies to the gates, whose weights are then replaced.

        Raises
        ------
        UserError
            If the gates are for another phase, or the tensors are not those of ``num_gates`` gates.
        """
        if cfg.phase != cls.phase:
            raise UserError(f"artifact {artifact.path}: details.gate.phase={cfg.phase}: accepted is {cls.phase}")
        expected = 1 + (4 if cfg.qk_norm else 2) * num_gates
        if len(artifact.tensors) != expected:  # before modules are built
            raise UserError(f"artifact {artifact.path}: {len(artifact.tensors)} tensors, accepted are {expected}")
        with torch.device("meta"):
            gate = build(torch.empty((cfg.hidden or artifact.manifest["model"]["head_dim"]) // 2))
        artifacts.check_tensors(artifact, {name: tensor.shape for name, tensor in gate.state_dict().items()})
        gate.load_state_dict(artifact.tensors, assign=True)
        gate.artifact, gate.thresholds = artifact, None if thresholds is None else asdict(thresholds)
        return gate.requires_grad_(False)

    def _take_part(self, whole: "GateArtifact", part: HeadShard) -> Self:
        """Takes the weights of a part of the heads of ``whole``, and returns these gates, frozen."""
        self.load_state_dict({name: x if name == "inv_freq" else part.of(x, 0) for name, x in whole.state_dict().items()})
        self.artifact, self.thresholds = whole.artifact, whole.thresholds
        return self.requires_grad_(False)
