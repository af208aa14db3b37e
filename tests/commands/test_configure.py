"""``msattn configure``: what serves a model, in its config.json beside what others wrote; refusals
change nothing.
"""

import json
import shutil
from pathlib import Path

import pytest

from msattn.trainer.artifacts import SHIPPED
from msattn.trainer.embedded import EMBEDDED_MODEL
from tests.commands.conftest import Refused
from tests.factory import tiny_config
from tests.running import succeed

OTHERS = {
    "algorithm": "skip_softmax",
    "targets": ["LlamaAttention"],
    "target_sparsity": {"prefill": 0.5},
}
REFUSED = {
    "nothing": ([], "attach: nothing to attach; give gate=, select= or qmodel="),
    "no value": (["sparsity"], "sparsity: expected key=value"),
    "a key": (["selct=quest"], "=selct: expected gate, select, sparsity"),
    "an option of Python alone": (["select=quest", "strict=true"], "=strict: expected gate"),
    "a value": (
        ["select={scores: quest, sparsity: 2}"],
        "select.sparsity=2: expected a number in [0, 1)",
    ),
    "YAML": (["select={"], "select is not valid YAML"),
    "a gate": (["gate=nowhere"], "nowhere: no such folder"),
    "a router as a gate": (["gate=quest"], "quest: no such folder"),
    "another model": ([f"gate={SHIPPED / 'gate'}"], "made for embedded: its num_layers is 6"),
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    shutil.copy(EMBEDDED_MODEL / "config.json", tmp_path)
    return tmp_path / "config.json"


def test_settings_are_replaced_and_those_of_others_kept(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = json.loads(config.read_text())
    section = {
        "config_groups": {"group_0": OTHERS},
        "producer": {"name": "modelopt", "version": "0.37.0"},
    }
    config.write_text(json.dumps(before | {"sparse_attention_config": section}))
    succeed("configure", str(config.parent), f"gate={SHIPPED / 'gate'}", "sparsity=0.8")
    assert (
        f"{config}  sparse_attention_config: gate={SHIPPED / 'gate'}, sparsity=0.8"
        in capsys.readouterr().out
    )
    succeed("configure", str(config.parent), "select={scores: quest}", "qmodel=embedded")
    own = {
        "algorithm": "msattn",
        "targets": ["Attention"],
        "select": {"scores": "quest"},
        "qmodel": "embedded",
    }
    assert json.loads(config.read_text()) == before | {
        "sparse_attention_config": section | {"config_groups": {"group_0": OTHERS, "group_1": own}}
    }
    succeed("configure", str(config.parent), "qmodel=quest")
    groups = json.loads(config.read_text())["sparse_attention_config"]["config_groups"]
    assert groups["group_1"] == {
        "algorithm": "msattn",
        "targets": ["Attention"],
        "qmodel": "quest",
    }, "a name, not a path"


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_one_line_and_change_nothing(
    name: str, config: Path, refused: Refused
) -> None:
    settings, message = REFUSED[name]
    if name == "another model":
        tiny_config("llama").save_pretrained(config.parent)
    before = config.read_bytes()
    refused(message, "configure", str(config.parent), *settings)
    assert config.read_bytes() == before


def test_only_a_folder_with_a_model_is_configured(tmp_path: Path, refused: Refused) -> None:
    refused("no such folder", "configure", "owner/name", "select=quest")
    refused("the folder has no config.json", "configure", str(tmp_path), "select=quest")
