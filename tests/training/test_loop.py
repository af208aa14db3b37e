"""Tests of the training loop: bit-identical resuming, divergence, gradient accumulation, refused
settings.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from msattn.trainer.config import TrainConfig
from msattn.trainer.errors import TrainingDiverged, UserError
from msattn.trainer.training.checkpoints import (
    TrainingResult,
    check_start,
    newest_checkpoint,
)
from msattn.trainer.training.distributed import rank_shard
from tests.running import metrics_lines
from tests.training import small

TRAIN = TrainConfig(
    lr=1e-2, steps=12, batch_size=4, micro_batch_size=2, log_every=3, save_every=4, weight_decay=0.1
)


class Points(Dataset[dict[str, Tensor]]):
    """Inputs and targets of a linear map; item ``i`` is drawn from a generator seeded with
    ``i``.
    """

    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.from_numpy(np.random.default_rng(index).normal(size=4)).float()
        return {"x": x, "y": x.sum(0, keepdim=True)}


class Regression(nn.Module):
    """A linear map with dropout (so that results depend on the random state) and a tied weight."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.out = nn.Linear(4, 1)
        self.dropout = nn.Dropout(dropout)
        self.calls = 0
        self.poison: tuple[int, str] | None = None

    def forward(self, x: Tensor, y: Tensor, **unused: Any) -> dict[str, Any]:
        self.calls += 1
        loss = (self.out(self.dropout(self.second(self.first(x)))) - y).square().mean()
        parts = {"layer 2": loss.detach(), "layer 3": loss.detach().clone()}
        if self.poison is not None and self.calls >= self.poison[0]:
            parts[self.poison[1]] = parts[self.poison[1]] * torch.nan
            loss = loss * torch.nan
        return {"loss": loss, "parts": parts}


def run(
    module: nn.Module, folder: Path, train: TrainConfig = TRAIN, **options: Any
) -> TrainingResult:
    return small.run(module, options.pop("dataset", Points()), folder, train, **options)


def weights(module: nn.Module) -> list[Tensor]:
    return [weight.detach().clone() for weight in module.parameters()]


def test_resuming_a_finished_run_takes_no_step(tmp_path: Path) -> None:
    first, again = Regression(), Regression()
    summary = run(first, tmp_path)
    read = run(again, tmp_path, resume=True)
    assert replace(read, seconds=summary.seconds) == summary
    assert 0 < read.seconds <= summary.seconds
    assert again.calls == 0
    assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(again), strict=True))


@pytest.mark.slow
def test_nan_stops_the_run_and_the_message_names_the_part(tmp_path: Path) -> None:
    module = Regression()
    module.poison = (2 * 6 + 1, "layer 3")
    with pytest.raises(
        TrainingDiverged, match=r"the loss of layer 3 is not finite, seen at step 8.*checkpoint-4"
    ):
        run(module, tmp_path, replace(TRAIN, log_every=100))
    assert newest_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "checkpoint-4"


def test_an_infinite_gradient_never_reaches_a_checkpoint(tmp_path: Path) -> None:
    module = Regression()
    module.out.weight.register_hook(
        lambda gradient: gradient * (torch.inf if module.calls > 9 else 1.0)
    )
    with pytest.raises(TrainingDiverged, match=r"gradient|weight out\.weight|loss"):
        run(module, tmp_path)
    state = torch.load(
        tmp_path / "checkpoints" / "checkpoint-4" / "optimizer.pt", weights_only=True
    )
    assert all(value["exp_avg"].isfinite().all() for value in state["state"].values())
    assert newest_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "checkpoint-4"


@pytest.mark.slow
def test_accumulated_micro_batches_equal_one_batch(tmp_path: Path) -> None:
    # A forward with **kwargs must not disable the division by the number of micro-batches.
    train = replace(TRAIN, max_grad_norm=0.0, steps=6)
    split, whole = Regression(dropout=0.0), Regression(dropout=0.0)
    run(split, tmp_path / "split", replace(train, micro_batch_size=1))
    run(whole, tmp_path / "whole", replace(train, micro_batch_size=4))
    for a, b in zip(weights(split), weights(whole), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    losses = [
        [line["loss"] for line in metrics_lines(tmp_path / name)] for name in ("split", "whole")
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_evaluation_runs_in_eval_mode_and_is_logged(tmp_path: Path) -> None:
    module = Regression()
    modes: list[bool] = []

    def evaluate() -> dict[str, float]:
        modes.append(module.training)
        return {"recall": float(len(modes))}

    summary = run(module, tmp_path, replace(TRAIN, eval_every=5), evaluate=evaluate)
    assert modes == [False] * 3  # after 5, 10 and the last step
    assert summary.metrics == {"recall": 3.0}
    assert [line["step"] for line in metrics_lines(tmp_path) if "recall" in line] == [5, 10, 12]
    logged = [line for line in metrics_lines(tmp_path) if "loss" in line]
    assert [line["step"] for line in logged] == [3, 6, 9, 12]
    assert {"layer 2", "layer 3", "grad_norm", "lr"} <= set(logged[0])
    assert logged[-1]["loss"] == summary.losses["loss"]


def test_adam_adds_weight_decay_to_the_gradient(tmp_path: Path) -> None:
    results: dict[str, list[Tensor]] = {}
    for optimizer in ("adam", "adamw"):
        module = Regression()
        run(module, tmp_path / optimizer, replace(TRAIN, steps=1), optimizer=optimizer)
        results[optimizer] = weights(module)
    assert not torch.equal(results["adam"][0], results["adamw"][0])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"schedule": "reduce_lr_on_plateau"},
            "train.schedule=reduce_lr_on_plateau: expected linear, cosine",
        ),
        ({"warmup_steps": 13}, "train.warmup_steps=13"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        run(Regression(), tmp_path, replace(TRAIN, **change))


def test_resuming_with_other_settings_is_refused(tmp_path: Path) -> None:
    train, job = replace(TRAIN, steps=1), {"tasks": 0.5, "gate.q_pool": ["avg"]}
    run(Regression(), tmp_path, train, extra_settings=job)
    run(Regression(), tmp_path, replace(train, log_every=1), resume=True, extra_settings=job)
    with pytest.raises(UserError, match=r"train\.lr=0\.01, not 0\.02"):
        run(Regression(), tmp_path, replace(train, lr=0.02), resume=True, extra_settings=job)
    with pytest.raises(UserError, match=r"tasks=0\.5, not 0\.4"):
        run(Regression(), tmp_path, train, resume=True, extra_settings={**job, "tasks": 0.4})
    wider = nn.ModuleDict({"other": nn.Linear(2, 2)})
    with pytest.raises(UserError, match="does not fit the module"):
        run(wider, tmp_path, train, resume=True, extra_settings=job)


def test_damaged_markers_are_refused_before_the_work(tmp_path: Path) -> None:
    run(Regression(), tmp_path, replace(TRAIN, steps=2, save_every=1))
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "checkpoint-2" / "complete.json").write_text("{")
    found = check_start(checkpoints, {"train.lr": 0.01, "unknown": None}, resume=True)
    assert found["train.steps"] == 2
    (checkpoints / "checkpoint-1" / "complete.json").write_text("{")
    says = (
        r"no checkpoint is intact \(.*checkpoint-2.*\); overwrite=true without resume=true starts"
    )
    with pytest.raises(UserError, match=says):
        check_start(checkpoints, {}, resume=True)


def test_an_empty_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there are no training data"):
        run(Regression(), tmp_path, dataset=Points(0))


@pytest.mark.parametrize(
    ("chunks", "ranks", "expected"),
    [(9, 2, [[0, 2], [1, 3]]), (1, 2, [[0], [0]]), (9, 6, [[i] for i in range(6)])],
)
def test_each_rank_calibrates(
    chunks: int, ranks: int, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four chunks; ranks without one would miss the collective calls of the others."""
    for rank in range(ranks):
        state = SimpleNamespace(process_index=rank, num_processes=ranks)
        monkeypatch.setattr(
            "msattn.trainer.training.distributed.PartialState", lambda state=state: state
        )
        assert [*rank_shard(cast(Any, [*range(chunks)]), 4, each_rank=True)] == expected[rank]
