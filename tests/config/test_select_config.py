"""Selection policies in the configuration: each has keys of its own and refuses those of the
others.
"""

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msattn.trainer.commands.compose import compose
from msattn.trainer.commands.jobs import Command
from msattn.trainer.commands.launch import launch
from msattn.trainer.config import POLICIES, SelectConfig
from msattn.trainer.config.commands import EvalRunConfig
from msattn.trainer.config.policies import OWN_KEYS, own_keys
from msattn.trainer.config.select import SHARED_KEYS, select_config
from msattn.trainer.errors import UserError

VALUES: dict[str, tuple[str, Any]] = {  # a key of each policy, and a value that is not its default
    "topk": ("sparsity", 0.8),
    "calibrated": ("sparsity", 0.7),
    "threshold": ("threshold", 0.001),
    "nucleus": ("mass", 0.5),
    "token_budget": ("tokens", 256),
    "multiscale": ("shares", [0.2, 0.1, 0.2, 0.4]),
}
FOREIGN = [
    ("topk", "mass"),
    ("calibrated", "threshold"),
    ("nucleus", "sparsity"),
    ("token_budget", "shares"),
]


def composed(*overrides: str) -> SelectConfig:
    cfg = compose("eval", overrides)
    assert isinstance(cfg, EvalRunConfig)
    return cfg.select


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_has_its_own_key_and_the_shared_ones(policy: str) -> None:
    key, value = VALUES[policy]
    select = SelectConfig(policy=policy, seed=3, **{key: value})
    assert [*own_keys(policy)] == [key]
    assert {name for name in OWN_KEYS if getattr(select, name) is not None} == {key}
    assert getattr(select, key) == value
    assert getattr(SelectConfig(policy), key) == own_keys(policy)[key]
    assert replace(select, **{key: value, "seed": 4}) == SelectConfig(
        policy, seed=4, **{key: value}
    )
    assert copy.deepcopy(select) == pickle.loads(pickle.dumps(select)) == select


@pytest.mark.parametrize(("policy", "key"), FOREIGN)
def test_policy_keys_other_policies_are_refused_in_python(policy: str, key: str) -> None:
    with pytest.raises(UserError) as caught:
        SelectConfig(policy, **{key: dict(VALUES.values())[key]})
    assert_names(str(caught.value), policy, key)
    with pytest.raises(UserError, match=f"policy={policy} accepts"):
        replace(SelectConfig(policy), **{key: dict(VALUES.values())[key]})


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "key", "added"), [(*FOREIGN[0], ""), (*FOREIGN[2], "+")])
def test_policy_keys_other_policies_are_refused_on_the_command_line(
    policy: str, key: str, added: str
) -> None:
    with pytest.raises(UserError) as caught:
        compose("eval", [f"select={policy}", f"{added}select.{key}=0.5"])
    assert_names(str(caught.value), policy, key)


def assert_names(message: str, policy: str, key: str) -> None:
    """The message is one line with the key, the policy, the keys that it accepts, and the policy
    that the key is of.
    """
    assert message.startswith(
        f"select.{key}: policy={policy} accepts {', '.join([*own_keys(policy), *SHARED_KEYS])}; "
        f"{key} belongs to "
    )
    assert all(
        owner in message.partition("belongs to")[2]
        for owner, (own, _) in VALUES.items()
        if own == key
    )
    assert "\n" not in message


def test_misspelt_keys_and_policies_get_a_hint() -> None:
    sparsity = r"unknown key select.sparsty \(did you mean select.sparsity\?\)"
    for make, message in (
        (lambda: select_config({"sparsty": 0.5}), sparsity),
        (lambda: composed("select.sparsty=0.5"), sparsity),
        (
            lambda: SelectConfig("nucleos"),
            r"select.policy=nucleos: expected topk, .* \(did you mean nucleus\?\)",
        ),
    ):
        with pytest.raises(UserError, match=message):
            make()


def test_the_policy_changes_with_the_keys_that_both_have() -> None:
    select = SelectConfig("calibrated", sparsity=0.7, scores="quest", seed=5)
    assert select.with_policy("topk") == SelectConfig("topk", sparsity=0.7, scores="quest", seed=5)
    assert select.with_policy("topk", sparsity=0.2, seed=1) == SelectConfig(
        "topk", sparsity=0.2, scores="quest", seed=1
    )
    assert select.with_policy("nucleus", mass=0.5) == SelectConfig(
        "nucleus", mass=0.5, scores="quest", seed=5
    )
    with pytest.raises(UserError, match=r"select.sparsity: policy=nucleus"):
        select.with_policy("nucleus", sparsity=0.5)
    with pytest.raises(UserError, match=r"select.sparsity: policy=nucleus"):
        replace(select, policy="nucleus")


@pytest.mark.parametrize(
    ("policy", "value", "says"),
    [
        ("topk", 1.0, r"select.sparsity=1.0: expected a number in \[0, 1\)"),
        ("calibrated", -0.1, r"select.sparsity=-0.1: expected a number in \[0, 1\)"),
        ("threshold", 1.0, r"select.threshold=1.0: expected a number in \[0, 1\)"),
        ("nucleus", 0.0, r"select.mass=0.0: expected a number in \(0, 1\]"),
        ("token_budget", 0, r"select.tokens=0: expected an integer in \[1, 1e9\]"),
        ("multiscale", [0.5, 0.5], r"select.shares=\[0.5, 0.5\]: expected four shares"),
    ],
)
def test_values_out_of_range_are_refused(policy: str, value: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        SelectConfig(policy, **{VALUES[policy][0]: value})
    with pytest.raises(UserError, match=r"^select\.key_block_size=32: expected select\.block_size"):
        SelectConfig(policy, block_size=16, key_block_size=32)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_the_command_line_sets_the_key_of_a_policy(policy: str) -> None:
    key, value = VALUES[policy]
    assert composed(f"select={policy}", f"select.{key}={value}".replace(" ", "")) == SelectConfig(
        policy, **{key: value}
    )


@pytest.mark.slow
def test_the_policy_alone_changes_where_the_keys_are_the_same() -> None:
    assert composed("select.policy=topk") == SelectConfig("topk")
    with pytest.raises(
        UserError, match=r"select.sparsity: policy=nucleus .*; select=nucleus sets the policy"
    ) as caught:
        composed("select.policy=nucleus")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_policies_can_be_swept(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Command, "run", lambda self, cfg, arguments: cfg.select)
    assert launch("generate", ["select=topk,threshold"], multirun=True) == [
        SelectConfig("topk"),
        SelectConfig("threshold"),
    ]
    both = launch("generate", ["select=topk,calibrated", "select.sparsity=0.5"], multirun=True)
    assert both == [SelectConfig("topk", sparsity=0.5), SelectConfig("calibrated", sparsity=0.5)]
    with pytest.raises(UserError, match=r"select.sparsity: policy=threshold accepts"):
        launch("generate", ["select=topk,threshold", "select.sparsity=0.5"], multirun=True)
