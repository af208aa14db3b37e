"""``msattn doctor``: figures of a model from its configuration alone, artifacts of the same shape,
refusals; the W&B key.
"""

import importlib.metadata
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from msattn.trainer.artifacts import SHIPPED
from msattn.trainer.commands import doctor
from msattn.trainer.commands.doctor_model import doctor_model
from msattn.trainer.commands.jobs import COMMANDS, Command
from msattn.trainer.evaluate.report.context import context
from msattn.trainer.models import EMBEDDED
from msattn.trainer.version import __version__
from tests.commands.conftest import Run
from tests.factory import tiny_config
from tests.running import exit_code


def write_config(folder: Path, family: str = "llama", **changes: Any) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config(family).to_dict() | changes))


def test_a_folder_without_weights(here: Path) -> None:
    write_config(here / "mine")
    rows = dict(doctor_model("mine"))
    assert rows["model"] == "llama, 2 layers, 4 query heads, 2 key/value heads, head size 16"
    assert rows["context"] == "256 tokens"
    assert rows["KV cache"].startswith("0.25 KiB per token, 0.0625 MiB when full")
    assert rows["sparse"].startswith("all 2 layers")
    assert rows["artifacts"] == "none in outputs"
    assert rows["next"].splitlines()[:2] == [
        "msattn generate --model mine select=quest dense_below=0 --prompt-file FILE",
        "msattn train-gate --model mine --data FILE",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mine", "llama3"])
def test_the_next_commands_run_with_a_file(
    here: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """All but the jobs themselves, which would load the model."""
    ran = []
    monkeypatch.setattr(Command, "run", lambda command, cfg, arguments: ran.append(type(cfg)))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    write_config(here / "mine")
    (here / "text.txt").write_text("def main(): ...")
    for line in dict(doctor_model(model))["next"].replace("FILE", "text.txt").splitlines():
        assert exit_code(*shlex.split(line)[1:]) == 0, line
    assert ran == [
        COMMANDS[name].schema
        for name in ("generate", "train-gate", "fit-kmeans", "train-qmodel", "eval")
    ]


def test_mixed_models_list_their_layers(here: Path) -> None:
    kinds = [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ]
    write_config(here / "mine", "olmo3", num_hidden_layers=5, layer_types=kinds, sliding_window=24)
    rows = dict(doctor_model("mine"))
    assert rows["sparse"].startswith("layers 1, 4 of 5: prompts with gates")
    assert rows["dense"].splitlines() == [
        "layers 0, 2 to 3, each because it attends through a sliding window of 24 tokens",
        "all passes below the break-even lengths",
    ]
    assert (
        rows["KV cache"]
        == "0.25 KiB per token, 0.0625 MiB when full (16 bits), for the layers that can be sparse"
    )


def test_artifacts_are_found_by_the_configuration(here: Path) -> None:
    shutil.copytree(EMBEDDED, "copy")
    shutil.copytree(SHIPPED, "outputs/other/base")
    shutil.copytree(SHIPPED / "gate", "outputs/copy/base/gate")
    Path("outputs/other/base/qmodel/manifest.json").write_text("{")
    rows = dict(doctor_model("copy"))
    found = rows["artifacts"].splitlines()
    assert found[0] == "gate: outputs/copy/base/gate"
    assert found[1].startswith("gate: outputs/other/base/gate, made for ")
    assert "manifest.json is not valid JSON" in found[3]
    assert rows["next"] == "msattn eval --model copy --data FILE"
    shutil.rmtree("outputs/copy")
    rows = dict(doctor_model("copy"))
    assert rows["artifacts"].startswith("gate: outputs/other/base/gate, made for ")
    assert "msattn train-gate --model copy --data FILE" in rows["next"], (
        "no command finds those of another model"
    )
    assert "gate: shipped with msattn" in dict(doctor_model("tiny"))["artifacts"]
    write_config(here / "mine")
    assert dict(doctor_model("mine"))["artifacts"].count("gate:") == 0


def test_folders_without_a_model_are_refused(here: Path, msattn: Run) -> None:
    (here / "empty").mkdir()
    (here / "broken").mkdir()
    (here / "broken" / "config.json").write_text("{")
    write_config(here / "foreign", model_type="gpt2")
    for name, message in {
        "empty": "has no config.json",
        "broken": "not valid JSON",
        "foreign": "model_type=gpt2",
        "nowhere": "no such folder",
    }.items():
        code, out, err = msattn("doctor", name)
        assert (code, out, message in err) == (2, "", True)
        assert err.strip().splitlines()[-1].startswith("msattn: ")


def test_an_unpacked_tree_needs_no_installation(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither msattn nor W&B is installed as a package."""
    found = importlib.metadata.Distribution.from_name

    def from_name(name: str) -> importlib.metadata.Distribution:
        if name in ("msattn", "wandb"):
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", from_name)
    fixes = {check.name: check.fix for check in doctor.doctor()}
    assert fixes["wandb"] == "pip install 'wandb'"
    assert context("", {}, {}, [], torch.device("cpu")).versions["msattn"] == __version__


@pytest.mark.parametrize("method", ["is_file", "read_text"])
def test_a_netrc_that_cannot_be_read_has_no_key(
    here: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Its folder may be closed to the user, or the file itself."""
    (here / "netrc").write_text("machine api.wandb.ai password secret")
    monkeypatch.setenv("NETRC", str(here / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert "API key found" in doctor._wandb().found
    original = getattr(Path, method)

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "netrc":
            raise PermissionError(13, "Permission denied")
        return original(path, *arguments, **options)

    monkeypatch.setattr(Path, method, refuse)
    assert "no API key" in doctor._wandb().found
