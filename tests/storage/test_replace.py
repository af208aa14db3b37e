"""Replacement of folders that are links, and of files, whose names are synced."""

import os
from pathlib import Path

import pytest
import torch

from msattn.trainer.artifacts import check_writable
from msattn.trainer.errors import UserError
from msattn.trainer.storage import replace
from msattn.trainer.storage.parts import FinishedParts
from msattn.trainer.storage.replace import clean_up, replace_file, replace_folder


def test_a_linked_folder_is_refused_each_time_and_stays(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "gate"
    target.mkdir()
    (target / "manifest.json").write_text("{}")
    link.symlink_to(target)
    for _ in range(3):
        with (
            pytest.raises(UserError, match="gate: a symbolic link, which is not overwritten"),
            replace_folder(link),
        ):
            pytest.fail("the block must not run")
        with pytest.raises(UserError, match="a symbolic link"):
            check_writable(link, overwrite=True)
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["gate", "target"]
    assert os.listdir(target) == ["manifest.json"]


@pytest.mark.parametrize(
    ("suffix", "leftover"),
    [
        ("new", "file"),
        ("new", "link to a folder"),
        ("old", "link to a folder"),
        ("old", "dangling link"),
    ],
)
def test_leftovers_that_are_no_folders_are_removed(
    tmp_path: Path, suffix: str, leftover: str
) -> None:
    folder, target, path = tmp_path / "gate", tmp_path / "target", tmp_path / f".gate.{suffix}"
    for each in (folder, target):
        each.mkdir()
    (target / "precious").touch()
    if leftover == "file":
        path.touch()
    else:
        path.symlink_to(target if leftover == "link to a folder" else tmp_path / "nothing")
    clean_up(folder)
    assert sorted(os.listdir(tmp_path)) == ["gate", "target"]
    assert os.listdir(target) == ["precious"]
    with replace_folder(folder) as new:
        (new / "a").touch()
    assert os.listdir(folder) == ["a"]


def test_the_folder_is_synced_after_a_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[Path, list[str]]] = []
    monkeypatch.setattr(
        replace, "sync_folder", lambda folder: synced.append((folder, sorted(os.listdir(folder))))
    )
    with replace_file(tmp_path / "table.csv") as new:
        new.write_text("1")
    assert synced.pop() == (tmp_path, ["table.csv"])
    finished = FinishedParts(tmp_path / "layers", {}, replace=False)
    assert synced.pop() == (tmp_path / "layers", ["settings.json"])
    finished.save("layer_000", {"a": torch.zeros(1)})
    assert synced.pop() == (tmp_path / "layers", ["layer_000.safetensors", "settings.json"])
