"""Tests of the tracker: metrics.jsonl, and wandb online, offline, unreachable or not installed."""

import builtins
import getpass
import resource
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import wandb

from msattn.trainer.artifacts import Artifact
from msattn.trainer.config import JobConfig, TrackerConfig
from msattn.trainer.errors import UserError
from msattn.trainer.training.tracker import Tracker
from tests.running import metrics_lines

NONE, WANDB = TrackerConfig("none"), TrackerConfig("wandb", project="tests")


def start(cfg: TrackerConfig, folder: Path, **options: Any) -> Tracker:
    settings: dict[str, Any] = {
        "config": {"lr": 0.1},
        "job": "train-gate",
        "tags": ["tiny", "base"],
    }
    return Tracker(cfg, folder=folder, run_name="name", **settings, **options)


def fake_artifact(folder: Path) -> Path:
    """Creates a folder with the manifest of an artifact."""
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(
        '{"content_hash": "c0ffee", "metrics": {"recall": 0.5}, "tensors": {"long": 1}}'
    )
    return folder


def read_artifact(folder: Path, **tracker: Any) -> Artifact:
    """Returns an artifact that a command with this ``tracker`` wrote."""
    config = {
        "tracker": {"kind": "wandb", "project": "other", **tracker},
        "model": {"name": "my model"},
        "name": "base",
    }
    return Artifact("kmeans", {}, config, {"content_hash": "ab" * 32}, folder)


def test_artifacts_are_recorded_with_their_content_hash(tmp_path: Path) -> None:
    gate = fake_artifact(tmp_path / "gate")
    model = tmp_path / "model"
    model.mkdir()
    with start(NONE, tmp_path) as tracker:
        tracker.log_artifact(gate)
        hashes = []
        for weights in (b"1", b"2"):
            (model / "model.safetensors").write_bytes(weights)
            tracker.log_artifact(model)
            hashes.append(metrics_lines(tmp_path)[-1]["artifact"]["content_hash"])
    assert metrics_lines(tmp_path)[0] == {
        "artifact": {"kind": "gate", "folder": str(gate), "content_hash": "c0ffee"}
    }
    assert hashes[0] != hashes[1]


def test_a_full_disk_drops_whole_lines_with_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    with start(NONE, tmp_path) as tracker:
        tracker.log({"loss": 1.0}, 1)
        size = (tmp_path / "metrics.jsonl").stat().st_size
        # space for a part of a line
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 9, usual[1]))
        try:
            tracker.log({"loss": 2.0}, 2)
            tracker.log({"loss": 3.0}, 3)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        tracker.log({"loss": 4.0}, 4)
    assert [line["step"] for line in metrics_lines(tmp_path)] == [1, 4]
    message = capsys.readouterr().err
    assert message.count("metrics.jsonl: ") == 1
    assert message.endswith("metrics are dropped\n")


@pytest.fixture
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without a wandb key, in which prompting for one fails."""

    def refuse(*_: Any, **__: Any) -> str:
        raise AssertionError("asked for a key")

    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(builtins, "input", refuse)
    monkeypatch.setattr(getpass, "getpass", refuse)


def test_metrics_are_written_at_once_to_a_file_in_a_new_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with start(NONE, folder) as tracker:
        tracker.log({"loss": 2.5, "recall": float("nan")}, 10)
        assert metrics_lines(folder)[0]["step"] == 10  # unbuffered: a killed run keeps its metrics
    with start(NONE, folder) as tracker:  # resumed
        tracker.log({"loss": float("inf")}, 20)
        tracker.offset = 100
        tracker.log({"loss": 1}, 5)
        tracker.image("grid", tmp_path / "none.png")  # ignored without wandb
        tracker.summary({"best": 0.5, "by_task": {"needle": float("nan")}})
    found = metrics_lines(folder)
    assert [line.get("step") for line in found] == [10, 20, 105, None]
    assert (found[0]["loss"], found[0]["recall"], found[1]["loss"], found[2]["loss"]) == (
        2.5,
        None,
        None,
        1.0,
    )
    assert 0 <= found[0]["seconds"] <= found[2]["seconds"]
    assert found[3] == {"summary": {"best": 0.5, "by_task": {"needle": None}}}


@pytest.mark.parametrize(
    ("offset", "steps", "kept"), [(0, 0, []), (0, 3, [1, 3]), (2, 0, [1]), (0, 9, [1, 3, 4])]
)
def test_lines_after_a_checkpoint_are_cut(
    tmp_path: Path, offset: int, steps: int, kept: list[int]
) -> None:
    with start(NONE, tmp_path) as tracker:
        for step in (1, 3, 4):
            tracker.log({"loss": 2.5}, step)
        tracker.summary({"best": 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    with start(NONE, tmp_path) as tracker:
        tracker.offset = offset
        tracker.cut(steps)
        tracker.log({"loss": 0.0}, 7)
    assert [line["step"] for line in metrics_lines(tmp_path)] == [*kept, 7 + offset]


def test_only_rank_0_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setitem(sys.modules, "wandb", None)  # must not be imported
    with start(WANDB, tmp_path / "run") as tracker:
        tracker.log({"loss": 1.0}, 1)
        tracker.summary({"best": 1.0})
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("no_account")
def test_wandb_without_a_key_is_offline_and_prints_how_to_upload(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with start(WANDB, tmp_path) as tracker:
        tracker.log({"loss": 2.5}, 1)
        tracker.summary({"best": 0.5})
        tracker.log_artifact(fake_artifact(tmp_path / "gate"))
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.strip()]
    assert line.startswith("wandb sync ")
    folder = Path(line.removeprefix("wandb sync "))
    assert folder.parent == tmp_path / "wandb"
    assert list(folder.glob("run-*.wandb"))
    assert [line["step"] for line in metrics_lines(tmp_path)[:1]] == [1]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The runs started with a fake wandb that is logged in; their ``options`` are those of
    ``wandb.init``.
    """
    started: list[Any] = []

    def init(**options: Any) -> Any:
        folder = f"{options['dir']}/wandb/run/files"
        started.append(
            MagicMock(
                offline=options["mode"] == "offline", dir=folder, id="abc123", options=options
            )
        )
        return started[-1]

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "login", lambda prompt: True)
    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "Image", lambda path: f"picture {path}")
    return started


def test_a_resumed_run_is_the_same_wandb_run(tmp_path: Path, runs: list[Any]) -> None:
    for resume in (False, True, False):
        with start(WANDB, tmp_path, resume=resume):
            pass
    assert [(run.options["id"], run.options["resume"]) for run in runs] == [
        (None, None),
        ("abc123", "allow"),
        (None, None),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("upload", [True, False])
def test_wandb_with_a_key_is_online_and_artifacts_are_uploaded_on_request(
    tmp_path: Path, runs: list[Any], capfd: pytest.CaptureFixture[str], upload: bool
) -> None:
    """But models are not."""
    model, gate = tmp_path / "model", fake_artifact(tmp_path / "gate")
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"1")
    with start(replace(WANDB, upload=upload), tmp_path) as tracker:
        tracker.log({"loss": 2.5}, 1)
        tracker.image("grid", tmp_path / "grid.png")
        tracker.log_artifact(model)
        tracker.log_artifact(gate)
    (run,) = runs
    assert [run.options[key] for key in ("mode", "project", "name")] == ["online", "tests", "name"]
    assert run.log.mock_calls == [
        call({"loss": 2.5}, step=1),
        call({"grid": f"picture {tmp_path / 'grid.png'}"}, step=None),
    ]
    logged = [each.args[0] for each in run.log_artifact.call_args_list]
    references = [entry.ref for each in logged for entry in each.manifest.entries.values()]
    assert references == [
        model.joinpath("model.safetensors").as_uri(),
        None if upload else (gate / "manifest.json").as_uri(),
    ]
    assert run.log_artifact.call_args.kwargs == (
        {"aliases": ["latest", "c0ffee"]} if upload else {}
    )
    assert run.log_artifact.return_value.wait.called == upload
    assert "tensors" not in logged[1].metadata
    run.finish.assert_called_once_with()
    assert capfd.readouterr() == ("", "")


def test_a_failing_wandb_is_one_line_without_keys_and_the_run_goes_on(
    tmp_path: Path, runs: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    key = "0123456789abcdef" * 2 + "01234567"
    with start(replace(WANDB, upload=True), tmp_path) as tracker:
        for name in ("log", "log_artifact", "use_artifact", "finish"):
            getattr(runs[0], name).side_effect = ConnectionError(f"401 for {key}\nsecond line")
        for step in (1, 2):
            tracker.log({"loss": 2.5}, step)
        tracker.use_artifact(read_artifact(tmp_path, upload=True))
        tracker.log_artifact(fake_artifact(tmp_path / "gate"))
    assert [next(iter(line)) for line in metrics_lines(tmp_path)] == [
        "step",
        "step",
        "read",
        "artifact",
    ]
    printed = capsys.readouterr().err
    assert key not in printed
    metrics, use, artifact, end = printed.splitlines()
    assert metrics == (
        "msattn: warning: tracker=wandb: sending metrics failed (401 for ***); the files here are "
        "complete"
    )
    assert "the use of other/my-model-base-kmeans" in use
    assert f"artifact {tmp_path / 'gate'}" in artifact
    assert "the end of the run" in end


@dataclass(frozen=True, kw_only=True)
class Job(JobConfig):
    """A command whose results are in ``outputs/a/b``."""

    @property
    def folder(self) -> Path:
        return Path(self.outputs) / "a" / "b"


def test_an_unreachable_wandb_server_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(prompt: bool) -> bool:
        raise wandb.errors.CommError("no answer")

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "login", unreachable)
    with pytest.raises(
        UserError, match=r"tracker=wandb: no answer; WANDB_MODE=offline keeps the run here"
    ):
        start(WANDB, tmp_path)


def test_a_tracker_that_cannot_start_after_the_work_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    job = Job(tracker=WANDB, outputs=str(tmp_path))
    assert job.tags == ["a", "b"]
    with Tracker.of_job(job, "eval", folder=tmp_path, run_name="name", after_work=True) as tracker:
        tracker.summary({"best": 0.5})
    assert metrics_lines(tmp_path) == [{"summary": {"best": 0.5}}]
    warning = capsys.readouterr().err
    assert warning.startswith(
        "msattn: warning: tracker=wandb: wandb is not installed; run pip install wandb"
    )
    assert warning.count("\n") == 1
    with pytest.raises(UserError, match="wandb is not installed"):
        Tracker.of_job(job, "train-gate", folder=tmp_path, run_name="name")
