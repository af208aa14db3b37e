"""``msattn doctor``: what of a machine can fail it."""

from pathlib import Path
from typing import Any

import pytest

from msattn.trainer.commands import doctor


@pytest.mark.parametrize("method", ["is_file", "read_text"])
def test_a_netrc_that_cannot_be_read_has_no_key(here: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
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
