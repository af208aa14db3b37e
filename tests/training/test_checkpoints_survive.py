"""Tests of resuming after SIGKILL, signals, lost ranks and full disks: bit-identical results, with
one rank or several.
"""

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from msattn.trainer.errors import Fault, Terminated, UserError, exit_process, print_once
from msattn.trainer.training import checkpoints as checkpoint_files
from msattn.trainer.training.checkpoints import (
    MARKER,
    MAX_CHECKPOINTS,
    mark_complete,
    newest_checkpoint,
    read_marker,
)
from msattn.trainer.training.distributed import LOST_RANK_MESSAGE, fail_together
from tests.jobs import GPUS, Job, LaunchedGpuJob, LaunchedJob
from tests.running import metrics_lines
from tests.training.line import BATCH_OF_THREE, ITEMS, TRAIN, Line, run, same_weights, seen

Kind = TypeVar("Kind", bound=Job)


def job(folder: Path, resume: bool, device: str, pause: float) -> None:
    """Body of a process of :func:`started`; it exits as the command line does."""
    rank = os.environ.get("RANK", "0")
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        train = (
            replace(TRAIN, batch_size=BATCH_OF_THREE)
            if os.environ.get("WORLD_SIZE") == "3"
            else TRAIN
        )
        with fail_together():
            run(Line(folder / f"seen-{rank}", pause), folder, train, resume=resume, device=device)
    except KeyboardInterrupt as stop:
        print_once(f"interrupted: {stop}")
        exit_process(143 if isinstance(stop, Terminated) else 130)
    except (UserError, Fault) as error:
        print_once(str(error))
        exit_process(1 if isinstance(error, Fault) else 2)
    exit_process(0)


JOB = """
import sys
from pathlib import Path
from tests.training.test_checkpoints_survive import job
folder, resume, device, pause = sys.argv[1:]
job(Path(folder), resume == "resume", device, float(pause))
"""


def started(
    kind: type[Kind],
    folder: Path,
    processes: int,
    *,
    resume: bool,
    device: str = "cpu",
    pause: float = 0.01,
) -> Kind:
    """Starts the same run in one process or in several."""
    folder.mkdir(exist_ok=True)
    for pid in folder.glob("pid-*"):
        pid.unlink()
    return kind(
        JOB, folder, folder, "resume" if resume else "new", device, pause, processes=processes
    )


def ended(running: Job) -> tuple[int, list[str]]:
    """Returns the exit code and the lines that msattn printed."""
    code = running.wait()
    return code, [
        line for line in running.err.read_text().splitlines() if line.startswith("msattn: ")
    ]


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("pid-*"))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an uninterrupted run of one process."""
    folder = tmp_path_factory.mktemp("whole")
    run(Line(folder / "seen-0"), folder)
    return folder


@pytest.fixture(scope="module")
def whole_of_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an uninterrupted run of three processes."""
    folder = tmp_path_factory.mktemp("whole_of_three")
    assert ended(started(Job, folder, 3, resume=False, pause=0.0)) == (0, [])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "error", "workers"),
    [(signal.SIGTERM, Terminated, 0), (signal.SIGINT, KeyboardInterrupt, 2)],
)
def test_signals_stop_after_a_saved_step(
    whole: Path, tmp_path: Path, number: signal.Signals, error: type[BaseException], workers: int
) -> None:
    train = replace(TRAIN, num_workers=workers)
    usual = signal.getsignal(number)
    # micro-batches of each attempt: in the first step, the last of a step, within a step
    stops = [3, 8 * 5 + 8, 8 * 9 + 1]
    for attempt, calls in enumerate(stops):
        module = Line(tmp_path / "seen-0")
        module.stop = (calls, number)
        with pytest.raises(
            error, match=r"after step \d+ of 24, saved in .*; resume=true continues"
        ) as stopped:
            run(module, tmp_path, train, resume=attempt > 0)
        assert type(stopped.value) is error
        assert signal.getsignal(number) is usual
    run(Line(tmp_path / "seen-0"), tmp_path, train, resume=True)
    assert same_weights(tmp_path, whole)
    assert seen(tmp_path) == seen(whole)
    assert [line["step"] for line in metrics_lines(tmp_path)] == list(range(2, 25, 2)), (
        "no step stands twice"
    )
    passes = [seen(whole)[i : i + ITEMS] for i in range(0, 8 * 24 - ITEMS, ITEMS)]
    assert all(sorted(each) == list(range(ITEMS)) for each in passes)
    assert all(a != b for a, b in pairwise(passes))


@pytest.mark.slow
def test_a_checkpoint_is_removed_only_when_two_newer_ones_are_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[list[int]] = []
    remove = checkpoint_files.remove_older

    def complete() -> list[int]:
        return sorted(
            int(path.parent.name.split("-")[1])
            for path in (tmp_path / "checkpoints").glob(f"*/{MARKER}")
        )

    def recorded(checkpoints: Path) -> None:
        states.append(complete())
        remove(checkpoints)
        states.append(complete())

    monkeypatch.setattr("msattn.trainer.training.callbacks.remove_older", recorded)
    run(Line(tmp_path / "seen-0"), tmp_path)
    assert states[:6] == [[3], [3], [3, 6], [3, 6], [3, 6, 9], [6, 9]]
    assert all(len(after) <= MAX_CHECKPOINTS for after in states[1::2])


@pytest.mark.slow
def test_a_new_run_removes_earlier_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    run(Line(tmp_path / "seen-0"), tmp_path)
    (checkpoints / "checkpoint-2.tar.gz").write_text("mine")
    (checkpoints / "checkpoint-best").mkdir()
    run(Line(tmp_path / "seen-0"), tmp_path, replace(TRAIN, steps=2, schedule="constant"))
    assert sorted(os.listdir(checkpoints)) == [
        "checkpoint-2",
        "checkpoint-2.tar.gz",
        "checkpoint-best",
    ]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limits the size of files, which makes writes fail as a quota or a full disk does."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


class Wide(Line):
    """Has further weights of 64 KiB, and twice as much Adam state."""

    def __init__(self, seen: Path) -> None:
        super().__init__(seen)
        self.more = nn.Parameter(torch.zeros(2**14))

    def forward(self, number: Tensor) -> dict[str, Any]:
        outputs = super().forward(number)
        return {"loss": outputs["loss"] + self.more.square().sum()}


@pytest.mark.slow
def test_a_failed_checkpoint_write_keeps_the_last_complete_one(tmp_path: Path) -> None:
    limit = 2**16 + 2**14  # above the weights, below the optimizer's state
    run(
        Wide(tmp_path / "seen-0"),
        tmp_path,
        replace(TRAIN, steps=4, save_every=4, schedule="constant"),
    )
    good = newest_checkpoint(tmp_path / "checkpoints")
    assert good is not None
    marker = read_marker(good)
    # as if a longer run had written it and then met the limit
    settings = marker.settings | {"train.steps": 8}
    (good / MARKER).unlink()
    mark_complete(good, settings, marker.result)
    longer = replace(TRAIN, steps=8, save_every=4, schedule="constant")
    with (
        files_of_at_most(limit),
        pytest.raises(UserError, match=r"checkpoint-8 cannot be written .* are free in") as stopped,
    ):
        run(Wide(tmp_path / "seen-0"), tmp_path, longer, resume=True)
    assert (
        f"the last complete checkpoint is {good}. Free some disk space, then resume=true continues"
        in str(stopped.value)
    )
    assert "\n" not in str(stopped.value)
    remaining = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert remaining == ["checkpoint-4"], "the incomplete checkpoint must be removed"
    run(Wide(tmp_path / "seen-0"), tmp_path, longer, resume=True)
    straight = tmp_path / "straight"
    run(Wide(tmp_path / "seen-1"), straight, longer)
    assert same_weights(tmp_path, straight, longer.steps)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_failed_sharded_write_gives_a_one_line_error(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-3"
    weights = {"weight": torch.zeros(2**14)}
    with (
        files_of_at_most(2**15),
        pytest.raises(UserError, match="checkpoint-3 cannot be written") as stopped,
        checkpoint_files.handle_write_errors(checkpoint),
    ):
        save_shards({"model": weights}, checkpoint_id=checkpoint, no_dist=True)
    assert "\n" not in str(stopped.value)
    assert not checkpoint.exists(), "the incomplete checkpoint must be removed"


@pytest.mark.slow
def test_if_a_rank_is_killed_the_others_exit_with_one_line(tmp_path: Path) -> None:
    running = started(LaunchedJob, tmp_path, 2, resume=False, pause=0.03)
    running.wait_for(lambda: newest_checkpoint(tmp_path / "checkpoints"))
    since = time.monotonic()
    os.kill(pids(tmp_path)[1], signal.SIGKILL)
    code, lines = ended(running)
    assert time.monotonic() - since < 45
    assert (code, lines) == (1, [f"msattn: {LOST_RANK_MESSAGE}"])


@pytest.mark.slow
def test_resume_after_sigkill_while_saving_gives_the_same_bits(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for attempt, moment in enumerate(("checkpoint-6/model.safetensors", f"checkpoint-12/{MARKER}")):
        running = started(Job, folder, 1, resume=attempt > 0)
        path = folder / "checkpoints" / moment  # a save that is half done, has just ended
        running.wait_for(path.exists)
        running.kill()
        assert ended(running)[0] == -signal.SIGKILL
    assert ended(started(Job, folder, 1, resume=True)) == (0, [])
    assert same_weights(folder, whole)


@pytest.mark.slow
def test_signals_stop_three_ranks_after_the_same_step(whole_of_three: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed = started(Job, folder, 3, resume=False)
    killed.wait_for((folder / "checkpoints/checkpoint-6").exists)
    killed.kill()
    assert ended(killed)[0] == -signal.SIGKILL
    for rank in range(3):
        (folder / f"seen-{rank}").unlink()
    # A cluster signals the launcher, whose ranks print one message; Ctrl-C in a terminal reaches
    # every process.
    stops = (
        (LaunchedJob, signal.SIGTERM, "checkpoint-9", 1),
        (Job, signal.SIGINT, "checkpoint-15", 3),
    )
    for kind, number, moment, messages in stops:
        running = started(kind, folder, 3, resume=True)
        running.wait_for((folder / "checkpoints" / moment / MARKER).exists)
        running.send_signal(number)
        _, lines = ended(running)
        last = newest_checkpoint(folder / "checkpoints")
        assert last is not None
        line = (
            f"msattn: interrupted: stopped after step {last.name.split('-')[1]} of 24, "
            f"saved in {folder / 'checkpoints'}; resume=true continues from there"
        )
        assert lines == [line] * messages
    assert ended(started(Job, folder, 3, resume=True)) == (0, [])
    assert same_weights(folder, whole_of_three)
    for rank in range(3):  # resumed from checkpoint 3, the last one before the kill
        assert seen(folder, rank) == seen(whole_of_three, rank)[BATCH_OF_THREE // 3 * 3 :]
    taken = [
        number
        for step in zip(*(seen(whole_of_three, rank) for rank in range(3)), strict=True)
        for number in step
    ]
    assert all(
        sorted(taken[i : i + ITEMS]) == list(range(ITEMS))
        for i in range(0, BATCH_OF_THREE * 24 - ITEMS, ITEMS)
    )


@pytest.fixture(scope="module")
def whole_on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an uninterrupted run of several processes, each with a GPU."""
    folder = tmp_path_factory.mktemp("whole_on_gpus")
    assert ended(started(LaunchedGpuJob, folder, GPUS, resume=False, device="cuda", pause=0.0)) == (
        0,
        [],
    )
    return folder


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_and_lost_ranks_on_several_gpus(
    whole_on_gpus: Path, tmp_path: Path, number: signal.Signals
) -> None:
    running = started(LaunchedGpuJob, tmp_path, GPUS, resume=False, device="cuda", pause=0.03)
    running.wait_for(lambda: newest_checkpoint(tmp_path / "checkpoints"))
    since = time.monotonic()
    if number == signal.SIGKILL:
        os.kill(pids(tmp_path)[1], number)
    else:
        running.send_signal(number)
    code, lines = ended(running)
    assert time.monotonic() - since < 45
    assert code == 1  # of torchrun
    assert len(lines) == 1
    assert (
        "another rank of this run ended"
        if number == signal.SIGKILL
        else "interrupted: stopped after step"
    ) in lines[0]
    assert ended(
        started(LaunchedGpuJob, tmp_path, GPUS, resume=True, device="cuda", pause=0.0)
    ) == (0, [])
    assert same_weights(tmp_path, whole_on_gpus)
