"""Finished parts of a job: atomic files that depend on the job's settings."""

from pathlib import Path
from typing import Any

import pytest
import torch

from msattn.trainer.errors import UserError
from msattn.trainer.storage.parts import FinishedParts


def test_parts_are_written_atomically(tmp_path: Path) -> None:
    parts = FinishedParts(tmp_path / "parts", {"seed": 0}, resume=False)
    parts.save("one", {"x": torch.arange(3)}, {"note": 1})
    again = FinishedParts(tmp_path / "parts", {"seed": 0}, resume=True)
    assert "one" in again
    tensors, note = again.load("one")
    assert torch.equal(tensors["x"], torch.arange(3))
    assert note == {"note": 1}
    (parts.folder / ".two.safetensors.new").write_text("of a killed process")
    FinishedParts(tmp_path / "parts", {"seed": 0}, resume=True)
    assert sorted(path.name for path in parts.folder.iterdir()) == [
        "one.safetensors",
        "settings.json",
    ]
    with pytest.raises(UserError, match="resume=true"):
        FinishedParts(tmp_path / "parts", {"seed": 1}, resume=True)
    assert "one" not in FinishedParts(tmp_path / "parts", {"seed": 1}, resume=False)


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
        FinishedParts(tmp_path / "parts", {"seed": 0}, resume=False)
    assert not list((tmp_path / "parts").iterdir())
