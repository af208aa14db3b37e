"""User errors through the command line: exit code 2, one line that names the error, and no file is
changed.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from msattn.trainer import progress
from msattn.trainer.storage.hashes import folder_hashes
from tests.adversary.commands import COMMANDS
from tests.running import SMALL, SMALL_EVAL, exit_code, succeed, write_texts


def kept(folder: Path) -> dict[str, str]:
    """Returns the hashes of artifacts and texts below a folder."""
    return {name: digest for name, digest in folder_hashes(folder).items() if "/runs/" not in name}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and the three artifacts of a random model, written by the commands."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_texts()
        for command in ("train-gate", "fit-kmeans", "train-qmodel"):
            succeed(*COMMANDS[command])
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the trained folder, which is also the working directory."""
    shutil.copytree(trained, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def rejected(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Runs a command that must exit with code 2 and leave artifacts and texts unchanged; returns
    its message.
    """
    # A busy machine may take longer; a line of progress is no second message.
    monkeypatch.setattr(progress, "INTERVAL", 600.0)

    def check(*arguments: str) -> str:
        before = kept(here)
        capsys.readouterr()
        code = exit_code(*arguments)
        error = capsys.readouterr().err
        lines = [line for line in error.splitlines() if line.startswith("msattn: ")]
        assert (code, len(lines)) == (2, 1), error
        assert "Traceback" not in error
        assert kept(here) == before
        return lines[0]

    return check


TRAINED = [*SMALL, "data.heldout_path=heldout.txt"]
NEW = [*TRAINED, "name=new"]
BY_KMEANS = [*NEW, "qmodel.long_range=8", "artifacts.kmeans=outputs/tiny/base/kmeans"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train-gate", *NEW, "model.architecture.model_type=gpt2"],
            "model_type=gpt2: expected llama, mistral",
        ),
        (
            ["train-gate", *NEW, "model.architecture.num_attention_heads=3"],
            "not a multiple of the number of attention heads (3)",
        ),
        (
            ["train-gate", *NEW, "data.seq_len=8192"],
            "seq_len=8192: the model has positions for 4096 tokens",
        ),
        (["train-gate", *NEW, "data.path=latin1.txt"], "latin1.txt: not UTF-8 at byte 3"),
        (["train-gate", *TRAINED], "outputs/tiny/base/gate: an artifact already exists"),
        (["fit-kmeans", *NEW, "kmeans.num_buckets=100000"], "kmeans.num_buckets=100000"),
        (
            ["train-qmodel", *BY_KMEANS, "artifacts.kmeans=outputs/tiny/base/gate"],
            "kind=gate: expected kmeans",
        ),
        (["train-qmodel", *BY_KMEANS, "qmodel.long_range=500"], "qmodel.long_range=500"),
        (
            ["train-qmodel", *BY_KMEANS, "train.max_grad_norm=1"],
            "train.max_grad_norm=1.0: expected 0",
        ),
        (
            [
                "train-qmodel",
                *TRAINED,
                "qmodel.long_range=8",
                "overwrite=true",
                "resume=true",
                "qmodel.causal=true",
            ],
            "cache has data=[",
        ),
        (["eval", *SMALL_EVAL, "eval.recall.probes=[64]"], "probes=64: classifier has 4 buckets"),
        (
            ["eval", *SMALL_EVAL, "eval.tasks=[perplexity]", "select.block_size=32"],
            "select.block_size=32: the gate's blocks have 64",
        ),
        (
            ["eval", *SMALL_EVAL, "artifacts.gate=outputs/tiny/base/kmeans"],
            "kind=kmeans: expected gate",
        ),
        (["generate", *SMALL, "name=none", "--prompt", "a"], "no gate, k-means or classifier here"),
        (["generate", *SMALL, "--prompt", "word " * 4096], "positions for 4096 tokens"),
        (["generate", "--prompt", " "], "--prompt: empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_commands_refuse(
    here: Path, rejected: Callable[..., str], arguments: list[str], message: str
) -> None:
    (here / "latin1.txt").write_bytes(b"caf\xe9 au lait " * 500)
    assert message in rejected(*arguments)
    assert not list((here / "outputs/tiny").glob("new/*/manifest.json"))


def test_a_weight_that_is_not_finite_is_reported(here: Path, rejected: Callable[..., str]) -> None:
    """A NaN weight of the frozen model: the message names it, and no artifact is written."""
    from msattn.trainer import models
    from msattn.trainer.commands.compose import compose

    loaded = models.load(compose("train-gate", SMALL).model, device="cpu", dtype="float32")
    with torch.no_grad():
        loaded.model.get_parameter("model.layers.1.self_attn.k_proj.weight")[0, 0] = float("nan")
    loaded.model.save_pretrained("nan_weight")
    loaded.tokenizer.save_pretrained("nan_weight")
    small = [override for override in SMALL if not override.startswith("model.")]
    line = rejected(
        "train-gate",
        *small,
        "data.heldout_path=heldout.txt",
        "model.path=./nan_weight",
        "name=new",
        "train.steps=2",
        "train.batch_size=1",
    )
    assert "model.layers.1.self_attn.k_proj.weight" in line
    assert "not finite" in line
    assert not (here / "outputs/tiny/new/gate").exists()
