"""Methods, which choose the blocks or keys that are read, and the interface of block scorers."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from msattn.trainer.config.sizes import BlockSizes
from msattn.trainer.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from msattn.trainer.methods.blocks import RowCandidates
    from msattn.trainer.models.layer_attention import LayerInputs

CALIBRATED = "calibrated"
TOP_K = "top-k"
INDEPENDENT = "independent"
RANDOM_WEIGHTS = "untrained"
ROPE = "RoPE"
NOT_SERVED = {TOP_K, INDEPENDENT, RANDOM_WEIGHTS}  # variants that are measured for comparison
TRAINED_STYLE = {"linewidth": 2.2, "zorder": 4}
VARIANT_STYLES: dict[str, dict[str, Any]] = {
    CALIBRATED: {"marker": "^", "linestyle": "-."},
    TOP_K: {"linestyle": ":", "fillstyle": "none"},
    ROPE: {"color": "#7B68EE", "marker": "X"},
}


@dataclass(frozen=True)
class Method:
    """A method as named in results, tables and figures; ``str(method)`` is its name in results."""

    name: str
    title: str | None = field(default=None, compare=False)  # in tables and figures; None: the name
    trained: bool = field(default=False, compare=False)  # something was trained for it
    # False if it needs dense attention, or is no way to serve
    servable: bool = field(default=True, compare=False)
    # keyword arguments of Axes.plot
    style: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    # for a second artifact of the same kind
    other_color: str | None = field(default=None, compare=False, repr=False)
    source: str = ""  # where a second artifact of the same kind comes from
    variants: tuple[str, ...] = ()  # differences from the way in which the method is served

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Method":
        """Returns the method with these fields, which were read from a file (``dataclasses.asdict``
        of a method).
        """
        method = cls(**fields)
        return replace(method, variants=tuple(method.variants))

    def __str__(self) -> str:
        return self._with_variants(self.name)

    @property
    def label(self) -> str:
        """Name in tables and figures."""
        return self._with_variants(self.title or self.name)

    @property
    def is_dense(self) -> bool:
        """True for dense attention with any kernel."""
        return self.name == DENSE.name

    @property
    def is_served(self) -> bool:
        """True for a method in the variant in which it is served."""
        return self.servable and not NOT_SERVED & {*self.variants}

    @property
    def is_trained(self) -> bool:
        """True for a trained method in the variant in which it is served."""
        return self.trained and self.is_served

    @property
    def line(self) -> dict[str, Any]:
        """Keyword arguments of ``Axes.plot``, from the method, its source and its variants."""
        found = {"linewidth": 1.3, "markersize": 5, "color": "#B8860B", "marker": "d", **self.style}
        if self.source:
            found |= {"color": self.other_color or found["color"], "marker": "h"}
        if self.is_trained:
            found |= TRAINED_STYLE
        for variant in self.variants:
            found |= VARIANT_STYLES.get(variant, {})
        return found

    def of(self, *variants: str, source: str = "") -> "Method":
        """Returns the method with additional variants."""
        return replace(self, variants=(*self.variants, *variants), source=source or self.source)

    def _with_variants(self, name: str) -> str:
        return ", ".join([f"{name} ({self.source})" if self.source else name, *self.variants])


DENSE = Method("dense")


def check_finite(name: str, module: "nn.Module") -> None:
    """Raises UserError, which begins with ``name``, if a weight of ``module`` is NaN or
    infinite.
    """
    for weight, values in module.state_dict().items():
        if not values.isfinite().all():
            raise UserError(
                f"{name}: its {weight} holds values that are not finite; expected numbers"
            )


class Scorer(Protocol):
    """Interface of a scorer, which returns the block scores of a layer: fp32
    ``[B, Hq | Hkv, Tr, Tc]``.

    Rows sum to 1 over the visible blocks and are 0 elsewhere; the last row of a gate's scores may
    sum to more.
    """

    @property
    def sizes(self) -> BlockSizes: ...

    def __call__(self, x: "LayerInputs") -> "Tensor": ...


@dataclass(frozen=True)
class GateScorer(Scorer):
    """Base class of scorers by a gate, which can select blocks without holding their scores.

    Attributes
    ----------
    gate : the gate.
    last_chunk_needs_keys : its scores of the last chunk of a prompt need every key, not only pooled
        keys.
    """

    gate: Any
    last_chunk_needs_keys: ClassVar[bool]

    @abstractmethod
    def select(
        self,
        x: "LayerInputs",
        candidates: "RowCandidates",
        counts: "Tensor",
        limit: Mapping[str, Any],
    ) -> "Tensor":
        """Returns the bits of a block mask, int32 ``[B, Hq | Hkv, Tr, ceil(Tc / 32)]``.

        ``counts`` and ``limit`` are the number of the best blocks and the threshold of
        :class:`~msattn.trainer.config.policies.Best`.
        """
