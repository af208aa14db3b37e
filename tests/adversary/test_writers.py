"""Several processes at one folder: one writes, the others are refused; readers find a whole artifact at every moment."""

import json
import os
import re
import signal
import time
from itertools import product
from pathlib import Path

import pytest
import torch

from msattn.trainer.artifacts import read
from msattn.trainer.errors import UserError
from msattn.trainer.storage import lock
from msattn.trainer.storage.lock import locked
from tests.adversary.tries import Tries
from tests.jobs import Job
from tests.test_artifacts import save

COMMAND = "import sys; from msattn.cli import main; main(sys.argv[1:])"
SMALL = [
    "model.init=random",
    "model.architecture.num_hidden_layers=1",
    "tracker=none",
    "device=cpu",
    "data.path=json.*",
    "data.seq_len=64",
    "overwrite=true",
]
COMMANDS = {
    "train-gate": ["train.steps=2", "train.batch_size=1", "train.eval_every=0"],
    "fit-kmeans": ["kmeans.num_buckets=4", "kmeans.num_prompts=4", "kmeans.iterations=2"],
}
ARTIFACTS = {"train-gate": "gate", "fit-kmeans": "kmeans"}
WRITER = """
import sys
from pathlib import Path
from msattn.trainer.storage import replace
from tests.test_artifacts import save
folder, number, exchanges = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "True"
if not exchanges:  # as on a file system without renameat2
    replace._rename_exchange = lambda a, b: False
from msattn.trainer.errors import UserError
while True:
    try:
        save(folder, value=number, overwrite=True)
    except UserError as error:
        assert "another run writes there (process" in str(error), error
"""


@pytest.mark.slow
@pytest.mark.area("two writers in one folder")
def test_two_runs_of_a_command(tries: Tries, tmp_path: Path) -> None:
    """Each pair starts within a tenth of a second: at least one ends well, and no other end than a refusal is possible."""
    for number, (command, delay) in enumerate(tries.chosen(product(COMMANDS, [0.0, 0.1, 0.3, 0.5]))):
        folder = tmp_path / str(number)
        arguments = [command, *SMALL, *COMMANDS[command], f"outputs={folder}"]
        jobs = []
        for name in ("a", "b"):
            (tmp_path / f"{number}{name}").mkdir()
            jobs.append(Job(COMMAND, tmp_path / f"{number}{name}", *arguments))
            time.sleep(delay)
        codes = [job.wait() for job in jobs]
        refused = [job.err.read_text() for job, code in zip(jobs, codes, strict=True) if code]
        read(folder / "tiny/base" / ARTIFACTS[command])
        for code in codes:
            tries.record(f"{command} {delay}", None if code in (0, 2) else f"exit codes {codes}: {refused}")
        for text in refused:
            line = [line for line in text.splitlines() if line.startswith("msattn: ")]
            good = len(line) == 1 and re.search(r"another run writes there \(process \d+ on \S+, msattn", line[0])
            tries.record(f"{command} {delay} refusal", None if good else text)
        tries.record(f"{command} {delay} one wrote", None if 0 in codes else f"exit codes {codes}: {refused}")


@pytest.mark.slow
@pytest.mark.area("two writers in one folder")
@pytest.mark.parametrize("exchanges", [True, False])
def test_readers_beside_two_writers(tries: Tries, tmp_path: Path, exchanges: bool) -> None:
    folder = tmp_path / "outputs/tiny/base/gate"
    save(folder)
    writers = []
    for number in (2, 3):
        (tmp_path / str(number)).mkdir()
        writers.append(Job(WRITER, tmp_path / str(number), folder, number, exchanges))
    seen = set()
    try:
        writers[0].wait_for(lambda: read(folder).tensors["a"][0, 0] > 1)
        for number in range(round(600 * tries.share)):
            fault = None
            try:
                values = read(folder if number % 2 else folder.parent, "gate").tensors["a"].unique()
                seen.add(float(values[0]))
                fault = None if len(values) == 1 else f"mixed values {values}"
            except UserError as error:
                fault = str(error)
            tries.record(f"read {number}", fault)
    finally:
        for writer in writers:
            writer.kill()
    assert seen - {1.0}, "no writer wrote"
    assert not any(writer.err.read_text() for writer in writers), [writer.err.read_text() for writer in writers]


@pytest.mark.slow
def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    folder = tmp_path / "gate"
    (tmp_path / "job").mkdir()
    script = (
        "import sys, time; from pathlib import Path; from msattn.trainer.storage.lock import locked\n"
        "with locked(Path(sys.argv[1])): time.sleep(600)"
    )
    holder = Job(script, tmp_path / "job", folder)
    file = tmp_path / ".gate.lock"
    holder.wait_for(lambda: file.exists() and file.read_text())
    pid = json.loads(file.read_text())["pid"]
    with pytest.raises(UserError, match=rf"gate: another run writes there \(process {pid} on .*; wait for it"), locked(folder):
        pass
    os.kill(pid, signal.SIGKILL)
    holder.wait()
    with locked(folder), locked(folder):  # a thread may enter again
        assert json.loads(file.read_text())["pid"] == os.getpid()
    assert not file.exists()


def test_another_thread_is_refused(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def enter() -> None:
        with locked(tmp_path / "gate"):
            pass

    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path / "gate"), pytest.raises(UserError, match=f"process {os.getpid()} "):
            pool.submit(enter).result()
        pool.submit(enter).result()


def test_ranks_of_one_run_share_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locked(tmp_path / "gate"):
        monkeypatch.setenv("RANK", "1")
        with locked(tmp_path / "gate"):
            pass
    holder = lock._own() | {"run": "another"}
    (tmp_path / ".gate.lock").write_text(json.dumps(holder))
    with locked(tmp_path / "gate"):  # a file without a lock is of a process that ended
        pass
    monkeypatch.setattr(lock, "_is_locked", lambda path: True)
    with pytest.raises(UserError, match="another run writes there"), locked(tmp_path / "gate"):
        pass


def test_values_are_tensors(tmp_path: Path) -> None:
    """The writers' artifact has equal values, which a mixture of two would not have."""
    assert torch.equal(read(save(tmp_path / "gate", value=2.0)).tensors["a"], torch.full((2, 3), 2.0))
