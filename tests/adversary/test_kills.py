"""SIGKILL at each file operation, and at random moments, while results or an artifact are replaced."""

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import count, product
from pathlib import Path

import pytest
import torch

from msattn.trainer import artifacts
from msattn.trainer.storage import replace
from msattn.trainer.storage.replace import clean_up, current_folder, replace_folder
from tests.adversary.steps import Child, count_changes, killed_at
from tests.adversary.tries import Tries
from tests.running import succeed
from tests.test_artifacts import MODEL
from tests.test_bad_input import SMALL_EVAL, text

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
    """Says what is wrong after kills of the writers of generations ``before + 1`` to ``attempted``, and after the next run."""
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
            Child(killed_at(step, partial(write, folder, number, keeps=keeps))).wait()
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
        writer = Child(partial(write_for_ever, before + 10**3))
        time.sleep(draw.uniform(0.01, 0.05))
        writer.send(signal.SIGKILL)
        writer.wait()
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
        tensors={"a": torch.full((64,), value), "b": torch.full((3,), value).bfloat16()},
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
    found = artifacts.read(folder)
    (value,) = {
        *found.tensors["a"].unique().tolist(),
        *found.tensors["b"].unique().tolist(),
        found.manifest["metrics"]["value"],
    }
    return value


def test_an_artifact_is_replaced_and_killed(tries: Tries, tmp_path: Path, exchange: bool) -> None:
    """A reader beside the writer sees the old artifact or the new one at every moment."""
    folder = tmp_path / "base" / "gate"
    save(folder, 0.0)
    steps = count_changes(partial(save, folder, 0.0), tmp_path / "count")

    def fault(step: int) -> str | None:
        before = value(folder)
        new = before + 1
        writer = Child(killed_at(step, partial(save, folder, new), between=partial(time.sleep, 0.002)))
        seen = [before]
        while (code := writer.poll()) is None:
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

    for step in tries.chosen([*range(steps + 1), *range(steps + 1)]):
        tries.record(f"killed at step {step} of {steps}", checked(partial(fault, step)))


def evaluate(seed: int) -> None:
    """Runs ``msattn eval`` in the working directory; its results hold the seed."""
    succeed("eval", *SMALL_EVAL, "data.heldout_path=heldout.txt", f"seed={seed}")


def seed(folder: Path) -> int:
    """The seed of complete results."""
    names = {"results.json", "results.csv", "report.html", "recall.png", "recall_heads.svg"}
    assert names <= {path.name for path in folder.iterdir()}
    assert (folder / "report.html").read_text().rstrip().endswith("</html>")
    return json.loads((folder / "results.json").read_text())["config"]["seed"]


@pytest.mark.slow
def test_eval_killed(tries: Tries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills of ``msattn eval``, most of them while it writes; every result that was ever in place remains."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(text(4000))
    Path("heldout.txt").write_text(text(4000, "term"))
    folder = Path("outputs/tiny/base/eval")
    evaluate(0)
    steps = count_changes(partial(evaluate, 100), tmp_path / "count")
    placed = {0, 100}
    for number, step in enumerate(tries.chosen(range(steps - 1, 0, -max(1, steps // 10))), 1):
        Child(killed_at(step, partial(evaluate, number))).wait()
        tries.record(f"eval killed at step {step} of {steps}", checked(lambda: placed.add(seed(folder))))
    evaluate(101)
    beside = sorted({path.name for path in folder.parent.iterdir()} - {"eval", "runs"})
    found = sorted(seed(folder.with_name(name)) for name in beside)
    well = all(name.startswith("eval-") for name in beside) and len(set(found)) == len(found) and placed <= set(found)
    tries.record("after the kills", None if well else f"{beside} of seeds {found}, in place were {placed}")
