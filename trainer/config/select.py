"""Selection of blocks: one dataclass for each policy, which is its keys in the configuration and the function of block scores.

``policy(scores, candidates)`` returns the blocks to read. ``scores`` are fp32 ``[B, H, Tr, Tc]``, each row a distribution over
the visible blocks (larger in the last row of a gate), ``candidates`` a :class:`~msattn.trainer.methods.blocks.Candidates`. The
result has the shape of the scores: a bool mask, or uint8 zooms (a block at zoom z is read at 1 / z of its tokens, at 0 not at
all). It contains ``candidates.always`` (zoom 1) and nothing outside of ``candidates.visible``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval
from pydantic import model_validator

from msattn.trainer.config.schema import (
    BlockSize,
    Number,
    OneOf,
    Seed,
    Share,
    Sparsity,
    Text,
    Tokens,
    TokensOrZero,
    key,
    schema,
)
from msattn.trainer.config.values import nearest, one_of, require
from msattn.trainer.errors import UserError

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

ZOOMS = (1, 2, 4, 8)
UNTRAINED = Path(__file__).parent.parent / "methods" / "untrained"


def untrained_methods(kind: str) -> tuple[str, ...]:
    """Returns the names of the methods without training that define ``kind``, scorer or router.

    Their files are searched for the line that defines it: importing them would import torch, for which ``--help`` cannot wait.
    """
    return tuple(sorted(file.stem for file in UNTRAINED.glob("*.py") if f"\n{kind} = " in file.read_text(encoding="utf-8")))


BASELINES, ROUTERS = untrained_methods("scorer"), untrained_methods("router")
GATE_SCORES = {"gate": "attn_gate", "gate_question": "question"}  # by name, the module of trainer/methods/gate
SCORES = (*GATE_SCORES, *BASELINES)
POLICIES: dict[str, type["SelectConfig"]] = {}  # by name; filled below the classes

POLICY = "how block scores become blocks"
PolicyName = Annotated[Text, OneOf(POLICIES)]
Scores = Annotated[Text, OneOf(SCORES)]


@schema("select.")
class SelectConfig:
    """Selects the key blocks that prefill reads, by block scores and a policy.

    ``SelectConfig(policy="nucleus", mass=0.9)`` constructs the dataclass of that policy (:data:`POLICIES`), a subclass.
    ``dataclasses.replace`` changes the values of its keys, and :meth:`with_policy` the policy.

    Sink blocks, local blocks and the query's own count towards the share of a policy; imported gates record 0 sink and local
    blocks, as in their paper. ``dense_queries`` are for a question at the end of a prompt. Passes of no more tokens are dense
    and counted in ``stats()["dense_by_choice"]``. A value out of range, or a key that the policy does not have, raises
    UserError.
    """

    policy: PolicyName = key(POLICY, default="topk")
    _: KW_ONLY
    scores: Scores = key(
        "gate, gate_question (joined with the last queries' attention), or a method without training (msattn help select)",
        default="gate",
    )
    sink_blocks: TokensOrZero | None = key(
        "number of leading blocks that every row reads; null: as the gate's artifact records, else 1", default=None
    )
    local_blocks: TokensOrZero | None = key(
        "number of blocks before a row's own that it reads; null: as the gate's artifact records, else 1", default=None
    )
    last_block: Annotated[Text, OneOf(("queries", "pooled"))] = key(
        "a gate's scores in a prompt's last row block: the largest of the pooled and each query's own, or pooled (the paper)",
        default="queries",
    )
    dense_queries: TokensOrZero = key("number of last tokens of a prompt that read every block", default=0)
    block_size: BlockSize = key("tokens in a block, for scores other than the gate's own", default=64)
    seed: Seed = key("seed of random scores", default=0)

    def __new__(cls, /, policy: str | None = None, **keys: Any) -> "Self":
        kind: Any = policy_class(policy or cls.policy)
        require(issubclass(kind, cls), "select.policy", policy, f"a {cls.__name__} has {cls.policy}; with_policy changes it")
        check_keys(kind, keys)
        return object.__new__(kind)

    if TYPE_CHECKING:  # the keys depend on the policy

        def __init__(self, policy: str = "topk", **keys: Any) -> None: ...

    def __call__(self, scores: "Tensor", candidates: Any) -> "Tensor":
        """Returns the blocks to read, see the module."""
        raise NotImplementedError

    @model_validator(mode="wrap")  # pyrefly: ignore[bad-argument-type]
    @classmethod
    def _of_policy(cls, values: Any, validate: Callable[[Any], "SelectConfig"]) -> "SelectConfig":
        """Returns the selection that a mapping of Hydra describes."""
        if not isinstance(values, dict):
            return validate(values)
        kind = policy_class(values.get("policy", SelectConfig.policy))
        try:
            check_keys(kind, values)
        except UserError as error:
            raise UserError(f"{error}; select={kind.policy} sets the policy together with its keys") from error
        return kind(**values)

    @property
    def by_gate(self) -> bool:
        """True if the scores need a gate."""
        return self.scores in GATE_SCORES

    def with_policy(self, policy: str, **keys: Any) -> "SelectConfig":
        """Returns a selection by another policy; the keys that both policies have keep their values."""
        shared = {key: getattr(self, key) for key in policy_keys(policy_class(policy)) if hasattr(self, key)}
        return SelectConfig(policy, **(shared | keys))


@schema("select.")
class SparsityConfig(SelectConfig):
    """Base class of the policies that read a given share of the blocks."""

    sparsity: Sparsity = key(
        "share of the causally visible blocks that is not read, with select=calibrated on average over a layer", default=0.5
    )


@schema("select.")
class TopK(SparsityConfig):
    """Selects the best blocks of each row, ``1 - sparsity`` of the visible ones."""

    policy: PolicyName = key(POLICY, default="topk")

    def __call__(self, scores: "Tensor", candidates: Any) -> "Tensor":
        return candidates.best(scores, candidates.share(1 - self.sparsity))


@schema("select.")
class Calibrated(SparsityConfig):
    """Selects part of each row's top-k share, and blocks above a threshold.

    The threshold is that of the layer and of the row's length; ``sparsity`` is the mean over the rows and heads of a layer.
    Thresholds are stored with a gate; ``msattn eval`` measures those of other scores on training text. A ``Selection`` holds a
    function of the scores for each layer, made of them.
    """

    policy: PolicyName = key(POLICY, default="calibrated")


@schema("select.")
class Threshold(SelectConfig):
    """Selects every block whose row-normalised score is at least ``threshold``."""

    policy: PolicyName = key(POLICY, default="threshold")
    threshold: Sparsity = key("smallest row-normalised score that is read", default=0.002)

    def __call__(self, scores: "Tensor", candidates: Any) -> "Tensor":
        return candidates.best(scores, candidates.share(0.0), threshold=self.threshold)


@schema("select.")
class Nucleus(SelectConfig):
    """Selects the fewest blocks of each row whose scores sum to ``mass``."""

    policy: PolicyName = key(POLICY, default="nucleus")
    mass: Annotated[Number, Interval(gt=0, le=1)] = key("sum of the row-normalised scores of the blocks read", default=0.95)

    def __call__(self, scores: "Tensor", candidates: Any) -> "Tensor":
        order = scores.masked_fill(candidates.always, float("inf")).argsort(dim=-1, descending=True)
        ranked = scores.gather(-1, order)
        before = ranked.cumsum(-1) - ranked
        needed = before < self.mass * ranked.sum(-1, keepdim=True)
        return needed.scatter(-1, order, needed) & candidates.visible | candidates.always


@schema("select.")
class TokenBudget(SelectConfig):
    """Selects the best blocks of each row that together hold ``tokens`` keys."""

    policy: PolicyName = key(POLICY, default="token_budget")
    tokens: Tokens = key("keys that a query block may read", default=1024)

    def __call__(self, scores: "Tensor", candidates: Any) -> "Tensor":
        return candidates.best(scores, candidates.number(max(1, self.tokens // self.block_size)))


@schema("select.")
class Multiscale(SelectConfig):
    """Selects the best blocks whole and the next ones at lower resolution.

    A block at zoom z is read at 1 / z of its tokens.
    """

    policy: PolicyName = key(POLICY, default="multiscale")
    shares: list[Share] = key(
        "shares of the visible blocks, best first, that are read at zoom 1, 2, 4 and 8", default=[0.1, 0.1, 0.2, 0.4]
    )

    def __post_init__(self) -> None:
        fits = len(self.shares) == 4 and 0 < sum(self.shares) <= 1 + 1e-9
        require(fits, "select.shares", self.shares, "four shares, for zoom 1, 2, 4 and 8, with a sum in (0, 1]")

    @property
    def cost(self) -> float:
        """Share of the visible tokens that is read, where a pooled token counts as one."""
        return sum(share / zoom for share, zoom in zip(self.shares, ZOOMS, strict=True))

    def __call__(self, scores: "Tensor", candidates: Any) -> "Tensor":
        import torch

        zooms = torch.zeros_like(scores, dtype=torch.uint8)
        for end, zoom in reversed([*zip(accumulate(self.shares), ZOOMS, strict=True)]):  # finer zooms overwrite coarser ones
            zooms.masked_fill_(candidates.best(scores, candidates.share(end)), zoom)
        return zooms


for _kind in (TopK, Calibrated, Threshold, Nucleus, TokenBudget, Multiscale):
    POLICIES[_kind.policy] = _kind


def select_config(select: SelectConfig | Mapping[str, Any] | str, *, sparsity: float | None = None) -> SelectConfig:
    """Returns the selection that a user describes: one, its keys, or the name of a policy or of a baseline's scores.

    Of the latter the top blocks are read. ``sparsity`` replaces that of the policy. Raises UserError for an unknown name or
    key, a value out of range, or a ``sparsity`` for a policy that has none.
    """
    if isinstance(select, str):
        one_of("select", select, (*POLICIES, *BASELINES))
        select = SelectConfig(select) if select in POLICIES else SelectConfig(scores=select)
    elif isinstance(select, Mapping):
        select = SelectConfig(**{key if isinstance(key, str) else repr(key): value for key, value in select.items()})
    if sparsity is None:
        return replace(select)
    given: dict[str, Any] = {"sparsity": sparsity}
    return replace(select, **given)


def check_usable(select: SelectConfig, refused: Mapping[str, str]) -> None:
    """Raises UserError for a policy or scores that are ``refused``, with the reason that is given there."""
    for name in ("policy", "scores"):
        value = getattr(select, name)
        require(value not in refused, f"select.{name}", value, refused.get(value, ""))


def policy_class(policy: str) -> type[SelectConfig]:
    """Returns the dataclass of a policy; raises UserError for an unknown policy."""
    one_of("select.policy", policy, POLICIES)
    return POLICIES[policy]


def check_keys(kind: type[SelectConfig], keys: Iterable[str]) -> None:
    """Raises UserError for keys that the policy of ``kind`` does not have."""
    for name in keys:
        if name not in ("policy", *policy_keys(kind)):
            raise UserError(foreign_key(kind, name))


def policy_keys(kind: type[SelectConfig]) -> list[str]:
    """Returns the keys of a policy other than ``policy``: its own first, then those that all policies share."""
    return own_keys(kind) + [item.name for item in fields(SelectConfig) if item.name != "policy"]


def own_keys(kind: type[SelectConfig]) -> list[str]:
    """Returns the keys that ``kind`` has in addition to those of :class:`SelectConfig`."""
    shared = {item.name for item in fields(SelectConfig)}
    return [item.name for item in fields(kind) if item.name not in shared]


def foreign_key(kind: type[SelectConfig], key: str) -> str:
    """Returns the error message for a key that the policy of ``kind`` does not have, with the keys that it accepts."""
    accepted = policy_keys(kind)
    owners = [name for name, other in POLICIES.items() if key in policy_keys(other)]
    hint = f"; {key} belongs to policy={' and '.join(owners)}" if owners else nearest(key, accepted)
    return f"select.{key}: policy={kind.policy} accepts {', '.join(accepted)}{hint}"
