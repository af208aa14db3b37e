"""``train.micro_batch_size=auto``: the number of items of a pass, and resuming with it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from msattn.trainer.config import TrainConfig
from msattn.trainer.errors import UserError
from msattn.trainer.progress import Progress
from msattn.trainer.training import callbacks, micro_batch
from msattn.trainer.training.checkpoints import newest_checkpoint, read_marker
from tests.training import small

TRAIN = TrainConfig(lr=1e-2, steps=2, batch_size=12, save_every=1)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Sequences(Dataset[dict[str, Tensor]]):
    """Sequences of ``tokens`` numbers, which are the index."""

    def __init__(self, tokens: int = 512) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.full((self.tokens,), index)}


class Scale(nn.Module):
    """Learns a number, and counts the sequences of its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.passes: list[int] = []

    def forward(self, input_ids: Tensor) -> dict[str, Any]:
        self.passes.append(len(input_ids))
        return {"loss": (self.weight * input_ids.float().mean(1)).square().mean()}


def resolved(
    train: TrainConfig, dataset: "Dataset[Any]", device: torch.device = CPU, ranks: int = 1
) -> int | str:
    return micro_batch.resolve(
        train, Scale(), dataset, default_collate, device, ranks, sharded=False
    ).micro_batch_size


def test_passes_have_as_many_tokens_as_a_device_is_faster_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [resolved(TRAIN, Sequences(tokens)) for tokens in (100, 512, 600, 1025, 8192)] == [
        12,
        4,
        3,
        1,
        1,
    ]
    assert resolved(TRAIN, Sequences(100), ranks=4) == 3
    assert resolved(replace(TRAIN, micro_batch_size=2), Sequences(100)) == 2
    assert resolved(TRAIN, [{"batches": 1}]) == 1  # pyrefly: ignore[bad-argument-type]
    tried = []

    def fits(*given: Any) -> bool:
        tried.append(given[4])
        return given[4] <= 3

    monkeypatch.setattr(micro_batch, "_fits", fits)
    assert resolved(TRAIN, Sequences(8192), GPU) == 3
    assert tried == [6, 4, 3]
    assert resolved(TRAIN, Sequences(2**17), GPU) == 1


def run(folder: Path, module: Scale, *, resume: bool = False, **changes: Any) -> None:
    small.run(module, Sequences(), folder, replace(TRAIN, **changes), resume=resume)


def test_a_resumed_run_keeps_the_number_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stopped, again, alone = (Scale() for _ in range(4))
    run(tmp_path / "whole", whole, steps=2, schedule="constant")
    run(tmp_path / "one", alone, steps=2, schedule="constant", micro_batch_size=1)
    assert (whole.passes, alone.passes) == ([4] * 6, [1] * 24)
    torch.testing.assert_close(whole.weight, alone.weight)

    with monkeypatch.context() as patch:
        patch.setattr(Scale, "forward", small.interrupted_after(5, Scale.forward))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "stopped", stopped, schedule="constant")
    last = newest_checkpoint(tmp_path / "stopped" / "checkpoints")
    assert last is not None
    assert read_marker(last).settings["train.micro_batch_size"] == 4
    with pytest.raises(UserError, match=r"train\.micro_batch_size=4, not 6"):
        run(tmp_path / "stopped", Scale(), resume=True, schedule="constant", micro_batch_size=6)
    monkeypatch.setitem(micro_batch.TOKENS, "cpu", 1)  # as on another machine
    run(tmp_path / "stopped", again, resume=True, schedule="constant")
    assert again.passes == [4] * 3
    assert torch.equal(again.weight, whole.weight)


def test_the_size_and_the_time_of_a_step_are_told_during_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(callbacks, "SLOW_PASSES", 0.0)
    shown = []
    update = Progress.update

    def update_shown(self: Progress, *given: Any, **new: Any) -> None:
        shown.extend([new[key] for key in ("completed", "figures") if key in new])
        update(self, *given, **new)

    monkeypatch.setattr(Progress, "update", update_shown)
    run(tmp_path, Scale())
    out = capsys.readouterr().out.splitlines()
    assert "12 x 512 = 6,144 tokens, 4 in a pass" in out[0]
    assert "a step takes about 0:00" in out[1]
    assert [each for each in shown if isinstance(each, str)] == [
        "pass 1 of 3",
        "pass 2 of 3",
        "pass 3 of 3",
    ]
    assert [each for each in shown if not isinstance(each, str)] == pytest.approx(
        [1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2]
    )
