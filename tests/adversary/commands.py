"""Small commands on a random model, and the folder that they run in."""

import shutil
from pathlib import Path

import pytest

from tests.hub_server import Hub
from tests.methods.gate.released import released
from tests.running import SMALL, SMALL_EVAL, succeed, write_texts

TRAINING = [*SMALL, "data.heldout_path=heldout.txt", "overwrite=true"]
GATE = ["gate.target=mass", "gate.mean_weight=0"]  # choosing them prints a line each
QMODEL = [
    "qmodel.num_prompts=2",
    "qmodel.long_range=8",
    "qmodel.hidden=16",
    "qmodel.batch_queries=8",
]
MTA = [
    "mta.blocks=2",
    "mta.letters=2",
    "mta.hidden_size=16",
    "mta.num_layers=1",
    "mta.test_problems=4",
    "overwrite=true",
]
MTA += ["device=cpu", "tracker=none", "train.warmup_steps=0", "train.num_workers=0"]
SIZES = [
    "bench.lengths=[96]",
    "bench.heads=[2,1]",
    "bench.head_size=16",
    "bench.sparsities=[0.5]",
    "bench.peers=[]",
]
COMMANDS = {
    "train-gate": [
        "train-gate",
        *TRAINING,
        *GATE,
        "train.steps=4",
        "train.batch_size=1",
        "train.save_every=2",
    ],
    "fit-kmeans": ["fit-kmeans", *TRAINING, "kmeans.num_buckets=4", "kmeans.num_prompts=2"],
    "train-qmodel": ["train-qmodel", *TRAINING, *QMODEL, "train.steps=4", "train.save_every=2"],
    "finetune": [
        "finetune",
        *TRAINING,
        "select.sparsity=0",
        "train.steps=2",
        "train.batch_size=1",
        "train.save_every=1",
    ],
    "train-mta": ["train-mta", *MTA, "train.steps=4", "train.batch_size=2", "train.save_every=2"],
    "eval": ["eval", *SMALL_EVAL, "data.heldout_path=heldout.txt"],
    "generate": ["generate", *SMALL, "select=quest", "max_new_tokens=4", "--prompt", "a word"],
    "import-gate": ["import-gate", "theirs", "--out", "outputs/theirs/base/gate", "--overwrite"],
    "push": ["push", "outputs/tiny/base/kmeans", "someone/small"],
    "doctor": ["doctor", "tiny"],
    "bench": ["bench", "op=merge_states", *SIZES, "device=cpu", "tracker=none"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and the three artifacts of a random model."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_texts()
        for command in ("train-gate", "fit-kmeans", "train-qmodel"):
            succeed(*COMMANDS[command])
    return folder


@pytest.fixture(scope="module")
def prepared(trained: Path) -> Path:
    """The folder with released gates and the results of commands, which this process has then
    imported.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(trained)
        released(Path("theirs"))
        for command in ("eval", "bench", "import-gate", "doctor"):
            succeed(*COMMANDS[command])
    return trained


@pytest.fixture
def work(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub) -> Path:
    """A copy of the prepared folder, which is also the working directory; pushes go to a stand-in
    of the Hub.
    """
    shutil.copytree(prepared, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"
