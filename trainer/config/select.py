"""Selection of blocks: the keys of ``select``, those of its policy and those that all policies
share; the names of block scores and routers.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, fields, replace
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Any

from msattn.trainer.config.policies import OWN_KEYS, POLICIES, PolicyKeys, own_keys
from msattn.trainer.config.schema import BlockSize, OneOf, Seed, Text, TokensOrZero, key, schema
from msattn.trainer.config.sizes import BlockSizes
from msattn.trainer.config.values import nearest, one_of, require
from msattn.trainer.errors import UserError

# a module of its packages is a method; its import would import torch
UNTRAINED = Path(__file__).parents[1] / "methods/untrained"
BASELINES, ROUTERS = (
    tuple(sorted(module.name for module in iter_modules([str(UNTRAINED / kind)])))
    for kind in ("scores", "routers")
)
GATE_SCORES = ("gate", "gate_question")
SCORES = (*GATE_SCORES, *BASELINES)
BLOCK_SIZE = 64  # tokens


@schema("select.")
class SharedKeys:
    """The keys of ``select`` that all policies share."""

    policy: Annotated[Text, OneOf(POLICIES)] = key(
        "policy that turns block scores into a block mask", default="topk"
    )
    _: KW_ONLY
    scores: Annotated[Text, OneOf(SCORES)] = key(
        "gate_question (a gate's, with the attention of the prompt's last queries), gate, or a "
        "training-free method (msattn help select)",
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


@schema("select.")
class SelectConfig(PolicyKeys, SharedKeys):
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

    def __post_init__(self) -> None:
        _ = self.sizes  # refuses blocks of more keys than queries
        defaults = own_keys(self.policy)
        for name in OWN_KEYS:
            if name in defaults and getattr(self, name) is None:
                object.__setattr__(self, name, defaults[name])
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

    def make_policy(self) -> Any:
        """Returns the policy, with the values of its keys."""
        keys = own_keys(self.policy)
        return POLICIES[self.policy](**{name: getattr(self, name) for name in keys})

    def as_dict(self) -> dict[str, Any]:
        """Returns the keys of the policy, and those that all policies share, with their values."""
        foreign = OWN_KEYS.keys() - own_keys(self.policy)
        return {name: value for name, value in asdict(self).items() if name not in foreign}

    def with_policy(self, policy: str, **keys: Any) -> "SelectConfig":
        """Returns a selection by another policy; the keys that both policies have keep their
        values.
        """
        one_of("select.policy", policy, POLICIES)
        foreign: dict[str, Any] = dict.fromkeys(OWN_KEYS.keys() - own_keys(policy))
        return replace(self, policy=policy, **(foreign | keys))


SHARED_KEYS = [item.name for item in fields(SharedKeys) if item.name != "policy"]


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
    accepted = [*own_keys(policy), *SHARED_KEYS]
    owners = [name for name in POLICIES if key in own_keys(name)]
    hint = f"; {key} belongs to policy={' and '.join(owners)}" if owners else nearest(key, accepted)
    return f"select.{key}: policy={policy} accepts {', '.join(accepted)}{hint}"
