"""Writers that are killed or fail at each file operation.

What was complete before stays, the next run works, and readers find a whole artifact at every
moment.
"""

import json
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from msattn.trainer.artifacts import read
from msattn.trainer.storage.replace import current_folder, replace_folder
from tests.adversary.steps import Child, count_changes, killed_at
from tests.adversary.tries import Tries
from tests.artifacts import save

# of each generation of results; every file holds the generation's number
FILES = ("a.json", "b.json", "c.json")


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


def fault(folder: Path, before: int, attempted: int, *, keeps: bool) -> str | None:
    """Says what is wrong after kills of the writers of generations ``before + 1`` to ``attempted``,
    and after the next run.
    """
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


@pytest.mark.slow
@pytest.mark.parametrize(("keeps", "before"), [(True, 2), (False, 2), (False, 0)])
def test_killed_at_each_step(tries: Tries, tmp_path: Path, keeps: bool, before: int) -> None:
    """One kill, or two runs that are killed one after the other; ``before`` generations were
    written before.
    """

    def prepared(name: str) -> Path:
        folder = tmp_path / name / "eval"
        for number in range(1, before + 1):
            write(folder, number, keeps=keeps)
        return folder

    probe = prepared("probe")
    steps = count_changes(lambda: write(probe, before + 1, keeps=keeps), tmp_path / "count")
    twice = [(first, steps - 1 - first) for first in range(0, steps, 3)]
    for kills in [*((step,) for step in range(steps)), *twice]:
        folder = prepared("tried")
        for number, step in enumerate(kills, before + 1):
            Child(killed_at(step, partial(write, folder, number, keeps=keeps))).wait()
        check = partial(fault, folder, before, before + len(kills), keeps=keeps)
        tries.record(f"killed at step {kills} of {steps}", checked(check))
        shutil.rmtree(folder.parent)


def write_artifact(folder: Path, value: float) -> None:
    save(folder, value=value, overwrite=True)


def value(folder: Path) -> float:
    """The value of an artifact, which all of its weights have."""
    (value,) = read(folder).tensors["a"].unique().tolist()
    return value


@pytest.mark.slow
def test_an_artifact_is_replaced_and_killed(tries: Tries, tmp_path: Path) -> None:
    """A reader beside the writer sees the old artifact or the new one at every moment."""
    folder = tmp_path / "base" / "gate"
    write_artifact(folder, 0.0)
    steps = count_changes(partial(write_artifact, folder, 0.0), tmp_path / "count")

    def fault(step: int) -> str | None:
        before = value(folder)
        new = before + 1
        writer = Child(
            killed_at(
                step, partial(write_artifact, folder, new), between=partial(time.sleep, 0.002)
            )
        )
        seen = [before]
        while (code := writer.poll()) is None:
            seen.append(value(folder))
        if set(seen) - {before, new} or seen != sorted(seen):
            return f"a reader saw {seen}"
        if code != (0 if step >= steps else -signal.SIGKILL):
            return f"exit code {code}"
        if value(folder) not in (before, new):
            return f"{value(folder)} in place"
        write_artifact(folder, new + 1)
        names = [path.name for path in folder.parent.iterdir()]
        return (
            None
            if value(folder) == new + 1 and names == ["gate"]
            else f"after the next run: {names}"
        )

    for step in range(steps + 1):
        tries.record(f"killed at step {step} of {steps}", checked(partial(fault, step)))
