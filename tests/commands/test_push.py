"""Pushes to a stand-in of the Hub and back: same content, one commit, refusals of one line, and no
token anywhere.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml

from msattn.trainer import artifacts
from msattn.trainer.artifacts import SHIPPED, read
from msattn.trainer.errors import UserError
from msattn.trainer.methods.classifier.kmeans import KMeans
from msattn.trainer.methods.classifier.qmodel import QModel
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.serving.attach import load
from tests.factory import tiny_model
from tests.hub_server import CUT, READER, TOKEN, Hub
from tests.running import exit_code

NAME = "someone/small"
KINDS: dict[str, Any] = {"gate": Gate, "kmeans": KMeans, "qmodel": QModel}


@pytest.fixture
def push(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs ``msattn push``; returns its exit code and what it printed, in which there never is a
    token.
    """

    def run(*arguments: object) -> tuple[int, str]:
        capfd.readouterr()
        code = exit_code("push", *map(str, arguments))
        out, err = capfd.readouterr()
        assert "hf_" not in out + err
        assert not err or (err.count("\n") == 1 and not out), err
        return code, out or err

    return run


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The folder of a run with the shipped artifacts."""
    folder = tmp_path / "outputs" / "tiny" / "base"
    shutil.copytree(SHIPPED, folder)
    return folder


def written(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_trip_keeps_the_content(hub: Hub, kind: str) -> None:
    module = KINDS[kind].from_pretrained(SHIPPED / kind)
    url = module.push_to_hub(NAME, private=True)
    found = KINDS[kind].from_pretrained(NAME)
    assert url.endswith(hub.repositories[NAME].commits[-1][0])
    assert hub.repositories[NAME].private
    assert found.artifact.manifest == read(SHIPPED / kind).manifest
    assert all(
        torch.equal(a, b)
        for a, b in zip(module.state_dict().values(), found.state_dict().values(), strict=True)
    )
    assert [call for call in hub.calls if call.startswith("PUT")], (
        "weights are uploaded as LFS files"
    )


@pytest.mark.slow
def test_a_run_is_one_commit_that_loads_by_kind(hub: Hub, push, run_folder: Path) -> None:
    code, out = push(run_folder, NAME)
    commits = hub.repositories[NAME].commits
    assert (code, out) == (0, f"{hub.url}/{NAME}/commit/{commits[-1][0]}\n")
    assert len(commits) == 2, "the creation of the repository, and the push"
    for kind, cls in KINDS.items():
        hash_of = read(SHIPPED / kind).manifest["content_hash"]
        assert cls.from_pretrained(NAME).artifact.manifest["content_hash"] == hash_of
    with pytest.raises(UserError, match="holds gate, kmeans, qmodel; name one"):
        load(NAME)


@pytest.mark.slow
def test_an_earlier_revision_is_loaded(hub: Hub, run_folder: Path, push) -> None:
    first = Gate.load(run_folder / "gate").push_to_hub(NAME).rsplit("/", 1)[1]
    assert push(run_folder / "qmodel", NAME)[0] == 0
    assert not any(name.startswith("gate") for name in hub.files(NAME))
    assert isinstance(load(NAME), QModel)
    assert Gate.from_pretrained(NAME, revision=first).artifact is not None
    with pytest.raises(UserError, match="expected gate"):
        Gate.from_pretrained(NAME)
    with pytest.raises(UserError, match=r"artifact someone/small: .*at revision=nowhere .*failed"):
        Gate.from_pretrained(NAME, revision="nowhere")
    with pytest.raises(UserError, match="revision=main: only Hub ids have revisions"):
        Gate.from_pretrained(run_folder / "gate", revision="main")


@pytest.mark.slow
def test_a_commit_replaces_other_artifacts_and_keeps_other_files(
    hub: Hub, push, run_folder: Path
) -> None:
    hub.create(
        NAME,
        **{
            "notes.txt": b"mine",
            "README.md": b"old",
            "manifest.json": b"{}",
            "kmeans/manifest.json": b"{}",
        },
    )
    shutil.rmtree(run_folder / "kmeans")
    assert push(run_folder, NAME)[0] == 0
    files = hub.files(NAME)
    assert files["notes.txt"] == b"mine"
    assert "manifest.json" not in files, "it would hide the artifacts of the run"
    assert not any(name.startswith("kmeans/") for name in files)
    assert len(hub.repositories[NAME].commits) == 2
    assert push(run_folder, NAME)[0] == 0
    assert len(hub.repositories[NAME].commits) == 2, "nothing changed, so there is no commit"


@pytest.mark.parametrize("artifact", ["", "qmodel"])
def test_a_model_keeps_its_files_and_names_what_serves_it(
    hub: Hub, push, run_folder: Path, artifact: str
) -> None:
    config = {"model_type": "llama", "sparse_attention_config": {"producer": {"name": "other"}}}
    own = {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": b"weights",
        "README.md": b"mine",
    }
    hub.create(NAME, **own)
    assert push(run_folder / artifact, NAME)[0] == 0
    files = hub.files(NAME)
    assert {name: files[name] for name in own} == own | {"config.json": files["config.json"]}
    roles = {"gate": ".", "qmodel": "."} if artifact == "" else {"qmodel": "."}
    group = {"algorithm": "msattn", "targets": ["Attention"], **roles}
    section = {"producer": {"name": "other"}, "config_groups": {"group_0": group}}
    assert json.loads(files["config.json"]) == config | {"sparse_attention_config": section}
    assert isinstance(artifacts.find(NAME, "qmodel"), Path)
    assert ("gate/manifest.json" in files) == (artifact == "")


# Model cards


def results(run: Path, **hashes: str) -> None:
    """Writes the results of an evaluation of artifacts with these hashes."""
    row = {
        "task": "recall",
        "setting": "sparsity 0.9",
        "score_name": "mass | read",
        "extra": {"length": 4096},
    }
    rows = [
        row | {"method": method, "score": 0.75, "sparsity": 0.9}
        for method in ("dense", "gate", "quest", "classifier")
    ]
    artifacts = {kind: {"kind": kind, "content_hash": value} for kind, value in hashes.items()}
    (run / "eval").mkdir(exist_ok=True)
    (run / "eval" / "results.json").write_text(
        json.dumps({"title": "x", "artifacts": artifacts, "rows": rows})
    )


@pytest.mark.slow
def test_cards_have_front_matter_and_the_figures_of_exactly_these_artifacts(
    hub: Hub, push, run_folder: Path
) -> None:
    card = run_folder / "gate" / "README.md"
    card.write_text(
        card.read_text().replace("---\n", "---\nlicense: mit\nbase_model: someone/model\n", 1)
    )
    hash_of = {kind: read(run_folder / kind).manifest["content_hash"] for kind in KINDS}
    results(run_folder, gate=hash_of["gate"], qmodel=hash_of["qmodel"])
    assert push(run_folder, NAME)[0] == 0
    text = hub.files(NAME)["README.md"].decode()
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["license"] == "mit"
    assert front["base_model"] == "someone/model"
    assert front["library_name"] == "msattn"
    assert front["tags"] == ["sparse-attention", "long-context", "gate", "kmeans", "qmodel"]
    assert f'attach(model, gate="{NAME}", qmodel="{NAME}")' in text
    assert r"| recall | 4,096 | gate | sparsity 0.9 | mass \| read | 0.75 |  | 90.0% |" in text
    assert "quest" not in text
    of_gate = hub.files(NAME)["gate/README.md"].decode()
    assert "| gate |" in of_gate
    assert "| classifier |" not in of_gate
    assert "Evaluated" not in hub.files(NAME)["kmeans/README.md"].decode()

    results(run_folder, gate=hash_of["gate"], qmodel="0" * 64)
    assert push(run_folder, NAME)[0] == 0
    assert "Evaluated" not in hub.files(NAME)["README.md"].decode(), (
        "one of the classifiers is another"
    )
    assert "Evaluated" in hub.files(NAME)["gate/README.md"].decode()
    assert "Evaluated" not in hub.files(NAME)["qmodel/README.md"].decode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ('{"rows": []}', "has no key artifacts"),
        ('{"artifacts": {}, "rows": [{}]}', "no key rows.0"),
    ],
)
def test_damaged_results_are_named(
    hub: Hub, push, run_folder: Path, content: str, message: str
) -> None:
    results(run_folder)
    (run_folder / "eval" / "results.json").write_text(content)
    code, out = push(run_folder, NAME)
    assert code == 2
    assert message in out
    assert not hub.calls


# Refusals


@pytest.mark.slow
def test_names_folders_and_tokens_are_refused_before_any_request(
    hub: Hub, push, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("small", "a/b/c", "../x", "", "a/b\n"):
        code, out = push(run_folder, name)
        assert code == 2, name
        assert "expected owner/name" in out
    for folder, message in (
        (tmp_path / "nowhere", "no such folder"),
        (tmp_path, "manifest.json is missing"),
    ):
        code, out = push(folder, NAME)
        assert (code, message in out) == (2, True), out
    (run_folder / "gate" / "model.safetensors").write_bytes(b"damaged")
    assert "is damaged" in push(run_folder, NAME)[1]
    monkeypatch.setenv("HF_TOKEN", "hf_a\x01b")
    assert "has invalid characters" in push(run_folder / "qmodel", NAME)[1]
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    code, out = push(run_folder / "qmodel", NAME)
    assert code == 2
    assert "run `hf auth login` or set HF_TOKEN" in out
    assert not hub.calls


def test_a_card_that_links_elsewhere_is_not_published(
    hub: Hub, push, run_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret")
    (run_folder / "gate" / "README.md").unlink()
    (run_folder / "gate" / "README.md").symlink_to(tmp_path / "secret")
    code, out = push(run_folder, NAME)
    assert code == 2
    assert "README.md links to a file outside its folder" in out
    assert not hub.calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ("POST /", 401, "rejected the token"),
        ("POST /api/repos/create", CUT, "the Hugging Face Hub cannot be reached"),
        ("PUT /lfs", 503, "503"),
        ("/commit/", CUT, "cannot be reached"),
    ],
)
def test_an_interrupted_push_changes_nothing(
    hub: Hub, push, run_folder: Path, fault: str, status: int, message: str
) -> None:
    """The stand-in repeats the token in its answers, which no message does."""
    before = hub.create(NAME, **{"notes.txt": b"mine"}).commits.copy()
    hub.faults[fault] = status
    code, out = push(run_folder, NAME)
    assert code == 2
    assert out.startswith(f"msattn: push {NAME}: ")
    assert message in out
    assert hub.repositories[NAME].commits == before
    hub.faults.clear()
    assert push(run_folder, NAME)[0] == 0, "the next push is complete"
    assert Gate.from_pretrained(NAME).artifact is not None


@pytest.mark.slow
def test_no_permission_no_network_and_public_repositories(
    hub: Hub, push, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.create(NAME)
    assert "exists and is public; push without --private" in push(run_folder, NAME, "--private")[1]
    monkeypatch.setenv("HF_TOKEN", READER)
    for name in (NAME, "someone/new"):
        assert "no permission to write to it" in push(run_folder, name)[1]
    assert len(hub.repositories[NAME].commits) == 1
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the Hugging Face Hub cannot be reached" in push(run_folder, NAME)[1]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "offline mode is enabled" in push(run_folder, NAME)[1]


def test_modules_that_are_no_artifact_are_not_pushed(hub: Hub) -> None:
    from msattn.trainer.config import GateConfig

    with pytest.raises(UserError, match="this Gate is not an artifact yet"):
        Gate.build(tiny_model().config, GateConfig()).push_to_hub(NAME)
    changed = KMeans.load(SHIPPED / "kmeans")
    changed.centroids += 1
    with pytest.raises(UserError, match="weights of this KMeans differ from those of artifact"):
        changed.push_to_hub(NAME)
    assert not hub.calls


@pytest.mark.slow
def test_the_token_of_the_environment_is_in_no_output_process_or_file(
    hub: Hub, run_folder: Path, tmp_path: Path
) -> None:
    """In a process of its own, with the most talkative settings of huggingface_hub, for a push and
    for a failed one.
    """
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path),
    }
    environment |= {"HF_DEBUG": "1", "HF_HUB_VERBOSITY": "debug", "HF_HUB_OFFLINE": "0"}
    command = [
        sys.executable,
        "-c",
        "from msattn.cli import main; main()",
        "push",
        str(run_folder),
        NAME,
    ]
    for status, code in ((None, 0), (403, 2)):
        hub.faults = {} if status is None else {"/commit/": status}
        # something to commit
        (run_folder / "gate" / "README.md").write_text(f"---\ntags: [x]\n---\nfor {status}\n")
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == code, done.stderr
        assert TOKEN not in done.stdout + done.stderr
        assert TOKEN.encode() not in written(tmp_path)
    assert TOKEN.encode() not in b"".join(hub.files(NAME).values())
