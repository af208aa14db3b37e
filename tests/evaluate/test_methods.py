"""The artifacts that an evaluation compares: of the name, of the configuration, and those that ship with the package."""

import shutil
from pathlib import Path

import pytest

from msattn.trainer.artifacts import SHIPPED
from msattn.trainer.commands.compose import compose
from msattn.trainer.evaluate.methods import _artifact_paths, _block_selections, _bucket_routings
from msattn.trainer.serving.loading import LOADERS


def test_shipped_artifacts_replace_missing_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths, notes = _artifact_paths(compose("eval"))
    shipped = ["gate", "kmeans", "qmodel"]  # no decode gates
    assert paths == {kind: (kind, SHIPPED / kind) for kind in shipped}
    assert [note.split(":")[0] for note in notes] == [f"There is no {kind} at outputs/tiny/base/{kind}" for kind in shipped]
    for overrides in (["name=mine"], ["model.init=random"], ["model=llama3"]):
        paths, notes = _artifact_paths(compose("eval", overrides))
        assert paths == {}
        assert len(notes) == 3
    own = Path("outputs/tiny/base/gate")
    shutil.copytree(SHIPPED / "gate", own)
    paths, notes = _artifact_paths(compose("eval"))
    assert paths["gate"] == ("gate", own)
    assert paths["qmodel"] == ("qmodel", SHIPPED / "qmodel")
    assert len(notes) == 2


def test_given_artifacts_are_compared_with_those_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in ("gate", "qmodel"):
        shutil.copytree(SHIPPED / kind, f"outputs/tiny/base/{kind}")
    cfg = compose("eval", ["artifacts.gate=embedded", "artifacts.qmodel=outputs/tiny/base", "eval.baselines=[quest]"])
    paths, _ = _artifact_paths(cfg)
    assert list(paths) == ["gate", "gate (embedded)", "kmeans", "qmodel"], "the same folder is measured once"
    found = {label: LOADERS[kind](path) for label, (kind, path) in paths.items()}
    names = [method.name for method in _block_selections(cfg, found)]
    assert names == ["gate", "gate, top-k", "gate (embedded)", "quest"]
    assert [method.name for method in _bucket_routings(cfg, found)] == ["classifier", "k-means"]
