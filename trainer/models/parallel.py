"""Parts of a model that a rank computes: heads of each layer (tensor parallelism, in transformers
with ``tp_plan="auto"``), and layers (pipeline parallelism, in vLLM).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from msattn.trainer.errors import UserError
from msattn.trainer.models.families import decoder, family_of, num_kv_heads, served_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelShard(NamedTuple):
    """The ``rank``-th of ``ranks`` equal parts of the heads, in their order, in some ``layers``."""

    rank: int = 0
    ranks: int = 1
    layers: frozenset[int] | None = None  # numbers of the model's layers; None: all

    @property
    def is_whole(self) -> bool:
        """True if the rank computes the whole model."""
        return self.ranks == 1 and self.layers is None

    def own(self, layers: Sequence[int]) -> list[int]:
        """Returns those of ``layers`` that the rank computes."""
        return [layer for layer in layers if self.layers is None or layer in self.layers]

    def rows(self, layers: Sequence[int]) -> list[int]:
        """Returns the positions in ``layers`` of those that the rank computes."""
        return [layers.index(layer) for layer in self.own(layers)]

    def of(self, weights: Tensor, dim: int) -> Tensor:
        """Returns the part of ``weights``, whose dimension ``dim`` is one of heads."""
        return weights.chunk(self.ranks, dim)[self.rank].clone()


def head_shard(model: "PreTrainedModel") -> ModelShard:
    """Returns the heads that this rank computes; all of them without tensor parallelism.

    Raises UserError if q_proj, k_proj and v_proj are divided in another way than by heads, or the
    layers are not Llama's.
    """
    attention = decoder(model).layers[served_layers(model.config)[0]].self_attn
    projections = {
        name: module.weight
        for name, module in attention.named_modules()
        if hasattr(module, "weight")
    }
    divided = {name: weight for name, weight in projections.items() if isinstance(weight, DTensor)}
    if not divided:
        return ModelShard()
    if not family_of(model.config).llama_layers:
        raise UserError(
            f"model_type={model.config.model_type}: tensor parallelism is not supported for this "
            f"family"
        )
    if not all(
        name in divided and divided[name].placements == (Shard(0),)
        for name in ("q_proj", "k_proj", "v_proj")
    ):
        raise UserError(
            "model: expected tensor parallelism that divides q_proj, k_proj and v_proj by heads; "
            "divided are " + ", ".join(divided)
        )
    mesh = divided["q_proj"].device_mesh
    heads, ranks = num_kv_heads(model.config), mesh.size()
    if heads % ranks:
        raise UserError(
            f"model: divided among {ranks} ranks; expected a number that divides its {heads} "
            f"key/value heads"
        )
    return ModelShard(mesh.get_local_rank(), ranks)
