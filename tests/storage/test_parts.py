"""Finished parts of a job: atomic files that depend on the job's settings."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from msattn.trainer.errors import UserError
from msattn.trainer.storage.parts import FinishedParts, check_parts


def test_parts_are_written_atomically(tmp_path: Path) -> None:
    parts = FinishedParts(tmp_path / "parts", {"seed": 0}, replace=False)
    parts.save("one", {"x": torch.arange(3)}, {"note": 1})
    again = FinishedParts(tmp_path / "parts", {"seed": 0}, replace=True)
    assert "one" in again
    tensors, note = again.load("one")
    assert torch.equal(tensors["x"], torch.arange(3))
    assert note == {"note": 1}
    (parts.folder / ".two.safetensors.new").write_text("of a killed process")
    FinishedParts(tmp_path / "parts", {"seed": 0}, replace=False)
    assert sorted(path.name for path in parts.folder.iterdir()) == [
        "one.safetensors",
        "settings.json",
    ]


def test_parts_with_other_settings_are_kept_unless_they_are_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "parts"
    FinishedParts(folder, {"seed": 0, "lr": 1}, replace=False)
    # nothing is lost: no part was finished
    parts = FinishedParts(folder, {"seed": 0, "lr": 2}, replace=False)
    parts.save("one", {"x": torch.arange(3)})
    check_parts(folder, {"seed": 0, "model": None})  # the learning rate is not known yet
    advice = "use the same settings, or overwrite=true without resume=true to start again"
    for check in (check_parts, partial(FinishedParts, replace=False)):
        with pytest.raises(UserError, match=f"parts has lr=2, not 3; {advice}"):
            check(folder, {"seed": 0, "lr": 3})
    assert "one" in parts
    assert capsys.readouterr().err == ""
    assert "one" not in FinishedParts(folder, {"seed": 0, "lr": 3}, replace=True)
    assert capsys.readouterr().err == (f"msattn: {folder}, made with other settings, is removed\n")


def test_a_full_disk_is_reported_when_parts_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: Any) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(
        UserError, match=r"settings.json cannot be written \(No space left on device\)"
    ):
        FinishedParts(tmp_path / "parts", {"seed": 0}, replace=False)
    assert not list((tmp_path / "parts").iterdir())
