"""Configuration of block selection: one dataclass for each policy, with the keys that this policy accepts."""

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msattn.trainer.config.values import check, choices, nearest, one_of, power_of_two, require, within
from msattn.trainer.errors import UserError

if TYPE_CHECKING:
    from typing import Self

UNTRAINED = Path(__file__).parent.parent / "methods" / "untrained"


def untrained_methods(kind: str) -> tuple[str, ...]:
    """Returns the names of the methods without training that define ``kind``, scorer or router, without importing them."""
    return tuple(sorted(file.stem for file in UNTRAINED.glob("*.py") if f"\n{kind} = " in file.read_text(encoding="utf-8")))


BASELINES, ROUTERS = untrained_methods("scorer"), untrained_methods("router")
SCORES = ("gate", *BASELINES)
POLICIES: dict[str, type["SelectConfig"]] = {}  # by name; filled below the classes


@dataclass(frozen=True)
class SelectConfig:
    """Selects the key blocks that prefill reads, by block scores and a policy.

    ``SelectConfig(policy="nucleus", mass=0.9)`` constructs the dataclass of that policy (:data:`POLICIES`), a subclass.
    ``dataclasses.replace`` changes the values of its keys, and :meth:`with_policy` the policy.

    Attributes
    ----------
    policy : ``topk``, ``calibrated``, ``threshold``, ``nucleus``, ``token_budget`` or ``multiscale``.
    scores : source of the block scores: ``gate``, or a baseline.
    sink_blocks, local_blocks : numbers of leading blocks, and of blocks before the query's own, that every row reads. They and
        the query's own block count towards the share of a policy. None stands for the numbers that the artifact of a gate
        records (0 for imported gates, as in their paper), and for 1 each with other scores.
    dense_queries : number of last queries of a pass whose row blocks read every block, so that a question at the end of a
        prompt misses none. Passes of no more tokens are dense, counted in ``stats()["dense_by_choice"]``.
    dense_below : prompts shorter than this many tokens use dense attention, which is faster for them, and are counted in
        ``stats()["dense_by_choice"]``. The length of a batch is that of its longest prompt. ``auto`` is the break-even length
        measured on GPUs for gates at ``sparsity`` (:func:`msattn.trainer.models.break_even.break_even`), and 0 on a CPU, for
        other scores and for policies without a sparsity. ``msattn eval`` always measures sparse attention.
    block_size : tokens in a block, for scores other than the gate's own.
    seed : seed of the scores ``random``.

    Raises
    ------
    UserError : a value out of range, or a key that the policy does not have.
    """

    policy: str = field(default="topk", metadata=choices(POLICIES))
    _: KW_ONLY
    scores: str = field(default="gate", metadata=choices(SCORES))
    sink_blocks: int | None = field(default=None, metadata=within("[0, 1e9]"))
    local_blocks: int | None = field(default=None, metadata=within("[0, 1e9]"))
    dense_queries: int = field(default=0, metadata=within("[0, 1e9]"))
    dense_below: int | str = "auto"
    block_size: int = field(default=64, metadata=within("[16, 128]"))
    seed: int = field(default=0, metadata=within("[0, 4294967295]"))

    def __new__(cls, /, policy: str | None = None, **keys: Any) -> "Self":
        kind: Any = policy_class(policy or cls.policy)
        require(issubclass(kind, cls), "select.policy", policy, f"a {cls.__name__} has {cls.policy}; with_policy changes it")
        check_keys(kind, keys)
        return object.__new__(kind)

    if TYPE_CHECKING:  # the keys depend on the policy

        def __init__(self, policy: str = "topk", **keys: Any) -> None: ...

    def __post_init__(self) -> None:
        check(self, "select.")
        ok = self.dense_below == "auto" if isinstance(self.dense_below, str) else 0 <= self.dense_below <= 1e9
        require(ok, "select.dense_below", self.dense_below, "auto, or 0 or more tokens")
        require(power_of_two(self.block_size), "select.block_size", self.block_size, "a power of two from 16 to 128")

    def with_policy(self, policy: str, **keys: Any) -> "SelectConfig":
        """Returns a selection by another policy; the keys that both policies have keep their values."""
        kept = {key: getattr(self, key) for key in keys_of(policy_class(policy)) if hasattr(self, key)}
        return SelectConfig(policy, **(kept | keys))


@dataclass(frozen=True)
class SparsityConfig(SelectConfig):
    """Base class of the policies that read a given share of the blocks.

    Attributes
    ----------
    sparsity : share of the causally visible blocks that is not read, in [0, 1).
    """

    sparsity: float = field(default=0.5, metadata=within("[0, 1)"))


@dataclass(frozen=True)
class TopKConfig(SparsityConfig):
    """Selects the best blocks of each row, ``1 - sparsity`` of the visible ones."""

    policy: str = field(default="topk", metadata=choices(POLICIES))


@dataclass(frozen=True)
class CalibratedConfig(SparsityConfig):
    """Selects part of each row's top-k share, and blocks above a threshold per layer.

    ``sparsity`` is the mean over the rows and heads of a layer. Thresholds are stored with a gate; ``msattn eval`` measures
    those of other scores on training text.
    """

    policy: str = field(default="calibrated", metadata=choices(POLICIES))


@dataclass(frozen=True)
class ThresholdConfig(SelectConfig):
    """Selects every block whose row-normalised score is at least ``threshold``, in [0, 1)."""

    policy: str = field(default="threshold", metadata=choices(POLICIES))
    threshold: float = field(default=0.002, metadata=within("[0, 1)"))


@dataclass(frozen=True)
class NucleusConfig(SelectConfig):
    """Selects the fewest blocks of each row whose row-normalised scores sum to ``mass``, in (0, 1]."""

    policy: str = field(default="nucleus", metadata=choices(POLICIES))
    mass: float = field(default=0.95, metadata=within("(0, 1]"))


@dataclass(frozen=True)
class TokenBudgetConfig(SelectConfig):
    """Selects the best blocks of each row that together hold ``tokens`` keys."""

    policy: str = field(default="token_budget", metadata=choices(POLICIES))
    tokens: int = field(default=1024, metadata=within("[1, 1e9]"))


@dataclass(frozen=True)
class MultiscaleConfig(SelectConfig):
    """Selects the best blocks whole and the next ones at lower resolution.

    Attributes
    ----------
    shares : shares of the visible blocks, best first, that are read whole and at a half, a quarter and an eighth of their
        tokens; the rest is skipped.
    """

    policy: str = field(default="multiscale", metadata=choices(POLICIES))
    shares: list[float] = field(default_factory=lambda: [0.1, 0.1, 0.2, 0.4], metadata=within("[0, 1]"))

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = len(self.shares) == 4 and 0 < sum(self.shares) <= 1 + 1e-9
        require(fits, "select.shares", self.shares, "four shares, for zoom 1, 2, 4 and 8, with a sum in (0, 1]")


for _kind in (TopKConfig, CalibratedConfig, ThresholdConfig, NucleusConfig, TokenBudgetConfig, MultiscaleConfig):
    POLICIES[_kind.policy] = _kind


def select_config(select: SelectConfig | Mapping[str, Any] | str, *, sparsity: float | None = None) -> SelectConfig:
    """Returns the selection that a user describes.

    Parameters
    ----------
    select : a selection, its keys, the name of a policy, or that of a baseline's scores, of which the top blocks are read.
    sparsity : replaces the ``sparsity`` of the policy.

    Raises
    ------
    UserError : an unknown name or key, a value out of range, or a ``sparsity`` for a policy that has none.
    """
    if isinstance(select, str):
        one_of("select", select, (*POLICIES, *BASELINES))
        select = SelectConfig(select) if select in POLICIES else SelectConfig(scores=select)
    elif isinstance(select, Mapping):
        select = SelectConfig(**{key if isinstance(key, str) else repr(key): value for key, value in select.items()})
    if sparsity is None:
        return replace(select)
    given: dict[str, Any] = {"sparsity": sparsity}
    checked = replace(select, **given)
    given["sparsity"] = float(sparsity)  # fractions do not multiply tensors
    return replace(checked, **given)


def policy_class(policy: str) -> type[SelectConfig]:
    """Returns the dataclass of a policy; raises UserError for an unknown policy."""
    one_of("select.policy", policy, POLICIES)
    return POLICIES[policy]


def check_keys(kind: type[SelectConfig], keys: Iterable[str]) -> None:
    """Raises UserError for keys that the policy of ``kind`` does not have."""
    for key in keys:
        if key not in ("policy", *keys_of(kind)):
            raise UserError(foreign_key(kind, key))


def keys_of(kind: type[SelectConfig]) -> list[str]:
    """Returns the keys of a policy other than ``policy``: its own first, then those that all policies share."""
    return own_keys(kind) + [item.name for item in fields(SelectConfig) if item.name != "policy"]


def own_keys(kind: type[SelectConfig]) -> list[str]:
    """Returns the keys that ``kind`` has in addition to those of :class:`SelectConfig`."""
    shared = {item.name for item in fields(SelectConfig)}
    return [item.name for item in fields(kind) if item.name not in shared]


def foreign_key(kind: type[SelectConfig], key: str) -> str:
    """Returns the error message for a key that the policy of ``kind`` does not have, with the keys that it accepts."""
    accepted = keys_of(kind)
    owners = [name for name, other in POLICIES.items() if key in keys_of(other)]
    hint = f"; {key} belongs to policy={' and '.join(owners)}" if owners else nearest(key, accepted)
    return f"select.{key}: policy={kind.policy} accepts {', '.join(accepted)}{hint}"
