"""Selection of blocks: the keys of ``select``, of which each policy has some, and the names of
block scores and routers.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import KW_ONLY, asdict, field, fields, replace
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any

from annotated_types import Interval
from pydantic import AfterValidator

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
from msattn.trainer.config.sizes import BlockSizes
from msattn.trainer.config.values import nearest, one_of, require
from msattn.trainer.errors import UserError

# by name: its own keys with their defaults, filled from the fields of SelectConfig
POLICIES: dict[str, dict[str, Any]] = {}
# a module of its packages is a method; its import would import torch
UNTRAINED = "msattn.trainer.methods.untrained"
BASELINES, ROUTERS = (
    tuple(
        sorted(
            module.name for module in iter_modules(import_module(f"{UNTRAINED}.{kind}").__path__)
        )
    )
    for kind in ("scores", "routers")
)
# name -> module in trainer/methods/gate
GATE_SCORES = {"gate": "attn_gate", "gate_question": "question"}
SCORES = (*GATE_SCORES, *BASELINES)
BLOCK_SIZE = 64  # tokens


def _four_shares(shares: list[float]) -> list[float]:
    fits = len(shares) == 4 and 0 < sum(shares) <= 1 + 1e-9
    require(
        fits,
        "select.shares",
        shares,
        "expected four shares, for zoom 1, 2, 4 and 8, with a sum in (0, 1]",
    )
    return shares


def _own_key(text: str, **policies: Any) -> Any:
    """Returns the field of a key that only ``policies`` have, each with the default that it has
    there.
    """
    return field(default=None, metadata={"help": text, "policies": policies})


@schema("select.")
class SelectConfig:
    """Selects the key blocks that prefill reads, by block scores and a policy.

    Blocks may have fewer keys than queries. Sink and local blocks are always counted in blocks of
    as many keys as queries.

    The last keys belong to some policies: null stands for their default, and other policies refuse
    it. Sink blocks, local blocks and the query's own count towards the share of a policy; imported
    gates record 0 sink and local blocks, as in their paper.
    ``dense_queries`` are for a question at the end of a prompt. Passes of no more tokens are dense
    and counted in ``stats()["dense_by_choice"]``. A value out of range, or a key that the policy
    does not have, raises UserError.
    """

    policy: Annotated[Text, OneOf(POLICIES)] = key(
        "policy that turns block scores into a block mask", default="topk"
    )
    _: KW_ONLY
    scores: Annotated[Text, OneOf(SCORES)] = key(
        "gate_question (a gate's, with the attention of the prompt's last queries), gate, or a "
        "training-free method "
        "(msattn help select)",
        default="gate_question",
    )
    sink_blocks: TokensOrZero | None = key(
        "number of first blocks that every row reads; null: as recorded in the gate's artifact, "
        "else 1",
        default=None,
    )
    local_blocks: TokensOrZero | None = key(
        "number of blocks before its own that every row reads; null: as recorded in the gate's "
        "artifact, else 1",
        default=None,
    )
    last_block: Annotated[Text, OneOf(("queries", "pooled"))] = key(
        "gate scores of a prompt's last row block: queries, the largest over pooled and single "
        "queries; or pooled (the paper)",
        default="queries",
    )
    dense_queries: TokensOrZero = key(
        "number of last tokens of a pass that read every block", default=0
    )
    block_size: BlockSize | None = key(
        "tokens per block; null: 64, or those of the gate, which has no other", default=None
    )
    key_block_size: BlockSize | None = key(
        "keys per block, if they are fewer than its queries; null: select.block_size, or those of "
        "the gate, which has no other",
        default=None,
    )
    seed: Seed = key("seed of random scores", default=0)
    sparsity: Sparsity | None = _own_key(
        "share of the causally visible blocks that is not read; with select=calibrated a mean "
        "over rows and heads",
        topk=0.5,
        calibrated=0.5,
    )
    threshold: Sparsity | None = _own_key(
        "smallest row-normalized score that is read", threshold=0.002
    )
    mass: Annotated[Number, Interval(gt=0, le=1)] | None = _own_key(
        "sum of the row-normalized scores of the blocks read", nucleus=0.95
    )
    tokens: Tokens | None = _own_key(
        "largest number of keys that a query block reads, at least the blocks that are always read",
        token_budget=1024,
    )
    shares: Annotated[list[Share], AfterValidator(_four_shares)] | None = _own_key(
        "shares of the visible blocks, best first, that are read at zooms 1, 2, 4 and 8",
        multiscale=[0.1, 0.1, 0.2, 0.4],
    )

    def __post_init__(self) -> None:
        _ = self.sizes  # refuses blocks of more keys than queries
        defaults = POLICIES[self.policy]
        for name in OWN_KEYS:
            if name in defaults and getattr(self, name) is None:
                object.__setattr__(self, name, copy(defaults[name]))
            elif name not in defaults and getattr(self, name) is not None:
                how = f"; select={self.policy} sets the policy together with its keys"
                raise UserError(foreign_key(self.policy, name) + how)

    @property
    def sizes(self) -> BlockSizes:
        """The queries and keys of a block, for scores other than a gate's."""
        return BlockSizes.configured("select", self.block_size or BLOCK_SIZE, self.key_block_size)

    def check_gate(self, sizes: BlockSizes) -> None:
        """Raises UserError for a given size of blocks that is not that of a gate."""
        for name, expected in sizes.arguments.items():
            given = getattr(self, name)
            require(
                given in (None, expected),
                f"select.{name}",
                given,
                f"the gate's blocks have {expected}; expected this size, or null",
            )

    @property
    def by_gate(self) -> bool:
        """True if the scores need a gate."""
        return self.scores in GATE_SCORES

    def as_dict(self) -> dict[str, Any]:
        """Returns the keys of the policy, and those that all policies share, with their values."""
        foreign = OWN_KEYS - POLICIES[self.policy].keys()
        return {name: value for name, value in asdict(self).items() if name not in foreign}

    def with_policy(self, policy: str, **keys: Any) -> "SelectConfig":
        """Returns a selection by another policy; the keys that both policies have keep their
        values.
        """
        one_of("select.policy", policy, POLICIES)
        foreign: dict[str, Any] = dict.fromkeys(OWN_KEYS - POLICIES[policy].keys())
        return replace(self, policy=policy, **(foreign | keys))


for _item in fields(SelectConfig):
    for _policy, _default in _item.metadata.get("policies", {}).items():
        POLICIES.setdefault(_policy, {})[_item.name] = _default
OWN_KEYS = {name for keys in POLICIES.values() for name in keys}
SHARED_KEYS = [
    item.name
    for item in fields(SelectConfig)
    if item.name not in OWN_KEYS and item.name != "policy"
]


def select_config(
    select: SelectConfig | Mapping[str, Any] | str, *, sparsity: float | None = None
) -> SelectConfig:
    """Returns the selection that a user describes: one, its keys, or the name of a policy or of a
    baseline's scores.

    Of the latter the top blocks are read. ``sparsity`` replaces that of the policy. Raises
    UserError for an unknown name or key, a value out of range, or a ``sparsity`` for a policy that
    has none.
    """
    if isinstance(select, str):
        one_of("select", select, (*POLICIES, *BASELINES))
        select = SelectConfig(select) if select in POLICIES else SelectConfig(scores=select)
    elif isinstance(select, Mapping):
        select = SelectConfig(
            **{key if isinstance(key, str) else repr(key): value for key, value in select.items()}
        )
    return select if sparsity is None else replace(select, sparsity=sparsity)


def check_usable(select: SelectConfig, refused: Mapping[str, str]) -> None:
    """Raises UserError for a policy or scores that are ``refused``, with the reason that is given
    there.
    """
    for name in ("policy", "scores"):
        value = getattr(select, name)
        require(value not in refused, f"select.{name}", value, refused.get(value, ""))


def foreign_key(policy: str, key: str) -> str:
    """Returns the error message for a key that ``policy`` does not have, with the keys that it
    accepts.
    """
    accepted = [*POLICIES[policy], *SHARED_KEYS]
    owners = [name for name, keys in POLICIES.items() if key in keys]
    hint = f"; {key} belongs to policy={' and '.join(owners)}" if owners else nearest(key, accepted)
    return f"select.{key}: policy={policy} accepts {', '.join(accepted)}{hint}"
