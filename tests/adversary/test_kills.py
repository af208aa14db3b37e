"""SIGKILL at each file operation, and at random moments, while results or an artifact are replaced."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, product
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

from msattn.trainer import artifacts
from msattn.trainer.errors import UserError
from msattn.trainer.storage import replace
from msattn.trainer.storage.replace import clean_up, current_folder, read_folder, replace_folder
from tests.adversary.steps import count_changes, ended, exit_code, in_child, killed_at
from tests.adversary.tries import Tries
from tests.jobs import Job, prepare
from tests.test_artifacts import MODEL

pytestmark = pytest.mark.area("kills")

FILES = ("a.json", "b.json", "c.json")  # of each generation of results; every file holds the generation's number


@pytest.fixture(params=[True, False], ids=["exchange", "no_exchange"])
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True on a file system that exchanges two folders at once."""
    if not request.param:
        monkeypatch.setattr(replace, "_rename_exchange", lambda a, b: False)
    return request.param


def kept(old: Path) -> Path:
    """The name under which results of an earlier generation are kept."""
    return old.with_name(f"eval-{generation(old)}")


def write(folder: Path, number: int, *, keeps: bool) -> None:
    with replace_folder(folder, keep=kept if keeps else None) as new:
        for name in FILES:
            (new / name).write_text(json.dumps(number))


def generation(folder: Path) -> int:
    """The number of a complete generation; fails if files are missing or differ."""
    numbers = {json.loads((folder / name).read_text()) for name in FILES}
    assert len(numbers) == 1
    assert {path.name for path in folder.iterdir()} == set(FILES)
    return numbers.pop()


def fault(folder: Path, before: int, attempted: int, *, keeps: bool, exchange: bool) -> str | None:
    """Says what is wrong after kills of the writers of the generations ``before + 1`` to ``attempted``, and after the next run."""
    if exchange and before and not folder.exists():
        return "no results in place"
    seen = current_folder(folder)
    if (seen.exists() or before) and generation(seen) not in range(before, attempted + 1):
        return f"generation {generation(seen)} in place"
    write(folder, attempted + 1, keeps=keeps)
    if generation(folder) != attempted + 1:
        return "the results of the next run are not in place"
    beside = {path.name for path in folder.parent.iterdir()} - {"eval"}
    names = [f"eval-{number}" for number in range(1, attempted + 1)]
    if not (set(names[:before]) <= beside <= set(names) if keeps else beside == set()):
        return f"beside the results: {sorted(beside)}"
    wrong = [name for name in beside if kept(folder.with_name(name)).name != name]
    return f"{wrong[0]} holds another generation" if wrong else None


def checked(check: Callable[[], str | None]) -> str | None:
    """Returns the fault that ``check`` finds; an error is one."""
    try:
        return check()
    except (AssertionError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("keeps", [True, False], ids=["keep", "delete"])
@pytest.mark.parametrize("before", [0, 2])
def test_killed_at_each_step(tries: Tries, tmp_path: Path, exchange: bool, keeps: bool, before: int) -> None:
    """One kill, or two runs that are killed one after the other; ``before`` generations were written before."""

    def prepared(name: str) -> Path:
        folder = tmp_path / name / "eval"
        for number in range(1, before + 1):
            write(folder, number, keeps=keeps)
        return folder

    probe = prepared("probe")
    steps = range(count_changes(lambda: write(probe, before + 1, keeps=keeps), tmp_path / "count"))
    twice = [(a, b) for a, b in product(steps, steps) if (a + b) % 8 == 0]
    for kills in tries.chosen([*((step,) for step in steps), *twice]):
        folder = prepared("tried")
        for number, step in enumerate(kills, before + 1):
            exit_code(in_child(killed_at(step, partial(write, folder, number, keeps=keeps))))
        check = partial(fault, folder, before, before + len(kills), keeps=keeps, exchange=exchange)
        tries.record(f"killed at step {kills} of {len(steps)}", checked(check))
        shutil.rmtree(folder.parent)


@pytest.mark.parametrize("keeps", [True, False], ids=["keep", "delete"])
def test_killed_at_random_moments(tries: Tries, tmp_path: Path, exchange: bool, keeps: bool) -> None:
    folder, draw = tmp_path / "eval", random.Random(1)
    write(folder, 1, keeps=keeps)

    def write_for_ever(first: int) -> None:
        for number in count(first):
            write(folder, number, keeps=keeps)

    for attempt in tries.chosen(range(40)):
        before = generation(current_folder(folder))
        pid = in_child(partial(write_for_ever, before + 10**3))
        time.sleep(draw.uniform(0.01, 0.05))
        os.kill(pid, signal.SIGKILL)
        exit_code(pid)
        tries.record(f"kill {attempt}", checked(partial(fault_of_loop, folder, before, keeps=keeps, exchange=exchange)))


def fault_of_loop(folder: Path, before: int, *, keeps: bool, exchange: bool) -> str | None:
    if exchange and not folder.exists():
        return "no results in place"
    now = generation(current_folder(folder))
    clean_up(folder, keep=kept if keeps else None)
    if generation(folder) != now:
        return "the clean-up changed the results"
    beside = {path.name for path in folder.parent.iterdir()} - {"eval"}
    written = {f"eval-{number}" for number in (before, *range(before + 10**3, now))} if now != before else set()
    if not (written <= beside if keeps else not beside):
        return f"beside the results: {sorted(beside)}"
    return None


def save(folder: Path, value: float) -> None:
    artifacts.write(
        folder,
        kind="gate",
        tensors={"a": torch.full((64, 64), value), "b": torch.full((3,), value).bfloat16()},
        config={"seed": 3},
        model=MODEL,
        details={},
        data="text",
        seed=3,
        metrics={"value": value},
        overwrite=True,
    )


def value(folder: Path) -> float:
    """The value of an artifact, which all of its files hold."""
    found = read_folder(folder, artifacts.read)
    (value,) = {*found.tensors["a"].unique().tolist(), *found.tensors["b"].unique().tolist(), found.manifest["metrics"]["value"]}
    return value


def test_an_artifact_is_replaced_and_killed(tries: Tries, tmp_path: Path, exchange: bool) -> None:
    """Beside the writer a reader sees the old artifact or the new one at every moment."""
    folder = tmp_path / "base" / "gate"
    save(folder, 0.0)
    steps = count_changes(partial(save, folder, 0.0), tmp_path / "count")
    cases = list(product(range(steps + 1), range(2)))
    for step, kind in tries.chosen(cases):
        def fault() -> str | None:
            before = value(folder)
            new = before + 1
            pid = in_child(killed_at(step, partial(save, folder, new), between=partial(time.sleep, 0.002)))
            seen = [before]
            while (code := ended(pid)) is None:
                seen.append(value(folder))
            if set(seen) - {before, new} or seen != sorted(seen):
                return f"a reader saw {seen}"
            if code != (0 if step >= steps else -signal.SIGKILL):
                return f"exit code {code}"
            if exchange and not folder.exists():
                return "no artifact in place"
            if value(folder) not in (before, new):
                return f"{value(folder)} in place"
            save(folder, new + 1)
            names = [path.name for path in folder.parent.iterdir()]
            return None if value(folder) == new + 1 and names == ["gate"] else f"after the next run: {names}"

        tries.record(f"killed at step {step} of {steps}", checked(fault))
