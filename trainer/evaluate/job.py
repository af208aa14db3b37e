"""The job of an evaluation, with its rows on disk, from which ``resume=true`` continues."""

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from msattn.trainer import artifacts, data
from msattn.trainer.config import DataConfig, EvalRunConfig
from msattn.trainer.config.text_files import text_files
from msattn.trainer.data.overlap import check_apart, check_heldout
from msattn.trainer.data.sources import source_identity
from msattn.trainer.errors import print_once
from msattn.trainer.evaluate.compared import Compared
from msattn.trainer.evaluate.row import EvalRow, Setting
from msattn.trainer.evaluate.task import task_of
from msattn.trainer.methods.base import Method
from msattn.trainer.models.loading import Loaded
from msattn.trainer.progress import Progress
from msattn.trainer.storage.hashes import file_hash
from msattn.trainer.storage.parts import FinishedParts
from msattn.trainer.version import __version__

# Keys of the command that do not affect a row.
CHANGEABLE = ("outputs", "name", "overwrite", "resume", "compare", "tracker")


class PartialRows:
    """Measured rows on disk, by the key of their measurement, so that an interrupted evaluation can
    be resumed.

    Without ``resume``, rows of an earlier evaluation are deleted. Settings, damage and errors are
    handled as in :class:`~msattn.trainer.storage.parts.FinishedParts`. The caller holds the lock of
    the results folder.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        if not resume:
            if any(folder.glob("*.safetensors")):
                print_once(
                    f"{folder}, the rows of an interrupted evaluation, is removed; resume=true "
                    f"would have continued it"
                )
            shutil.rmtree(folder, ignore_errors=True)
        self._parts = FinishedParts(folder, settings, replace=False, start_again="resume=false")
        notes = (self._parts.load(name)[1] for name in self._parts)
        self._rows = {key: [_row(row) for row in rows] for key, rows in notes}

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def of_other_tasks(self, tasks: Collection[str]) -> list[EvalRow]:
        """Returns the rows of all tasks but ``tasks``, in the order in which they were measured."""
        return [row for rows in self._rows.values() for row in rows if row.task not in tasks]

    def get(self, *key: Any) -> list[EvalRow] | None:
        return self._rows.get(_name(key))

    def add(self, rows: list[EvalRow], *key: Any) -> list[EvalRow]:
        """Writes the rows of a measurement, and returns them."""
        name = _name(key)
        self._rows[name] = rows
        part = hashlib.sha256(name.encode()).hexdigest()[:32]
        self._parts.save(part, {}, [name, [asdict(row) for row in rows]])
        return rows

    def remove(self) -> None:
        self._parts.remove()


class Measurement(NamedTuple):
    """A part of a task, and the key under which its rows are kept (None: it is measured in every
    run).

    ``measure`` returns the rows; it gets a function to call after each of ``steps``, and the first
    row of the plan, that of dense attention (None: this is its part).
    """

    key: tuple[Any, ...] | None
    measure: Callable[[Callable[[], None], EvalRow | None], list[EvalRow]]
    steps: int


@dataclass(frozen=True)
class Job:
    """Model, configuration and compared methods of an evaluation; ``kept`` are the rows that were
    measured before an interruption.
    """

    loaded: Loaded
    cfg: EvalRunConfig
    compared: Compared
    progress: Progress
    kept: PartialRows
    # results of the tasks' ``prepare``, by task
    prepared: Mapping[str, Any] = field(default_factory=dict)

    def bar(self, title: str, total: int | None) -> Callable[[], None]:
        """Returns a function that advances a new bar by one step."""
        return partial(self.progress.advance, self.progress.add_task(title, total=total))

    def rows(self, title: str, plan: Sequence[Measurement]) -> list[EvalRow]:
        """Returns the rows of each measurement of ``plan``, in order; rows on disk are not measured
        again.
        """
        kept_rows = [
            None if measurement.key is None else self.kept.get(*measurement.key)
            for measurement in plan
        ]
        advance = self.bar(
            title,
            sum(
                measurement.steps
                for measurement, rows in zip(plan, kept_rows, strict=True)
                if rows is None
            ),
        )
        done: list[EvalRow] = []
        for measurement, rows in zip(plan, kept_rows, strict=True):
            if rows is None:
                rows = measurement.measure(advance, done[0] if done else None)
                if measurement.key is not None:
                    self.kept.add(rows, *measurement.key)
            done += rows
        return done


def settings_of(cfg: EvalRunConfig, loaded: Loaded, compared: Compared) -> dict[str, Any]:
    """Returns the settings that the rows of an evaluation depend on, with the names of the command
    line.
    """
    given = {key: value for key, value in asdict(cfg).items() if key not in CHANGEABLE}
    model = artifacts.identity(loaded.fingerprint) | given["model"]
    hashes = {label: manifest["content_hash"] for label, manifest in compared.manifests.items()}
    device = {"device": loaded.model.device.type, "dtype": str(loaded.model.dtype)}
    return (
        given
        | device
        | {"version": __version__, "texts": texts_hash(cfg), "model": model, "hash": hashes}
    )


def _name(key: tuple[Any, ...]) -> str:
    return json.dumps(key, default=str)  # methods by their names


def _row(fields: dict[str, Any]) -> EvalRow:
    interval = None if fields["interval"] is None else tuple(fields["interval"])
    method, setting = Method.from_fields(fields["method"]), Setting(**fields["setting"])
    return EvalRow(**fields | {"method": method, "setting": setting, "interval": interval})


def haystack(cfg: DataConfig, path: str | None) -> Iterator[data.Document]:
    """Yields the documents of ``path``, a text file or folder, or the held-out ones of ``cfg``."""
    return data.documents(_source(path) if path else cfg, heldout=True)


def check_texts(cfg: EvalRunConfig) -> None:
    """Raises UserError if text that the tasks evaluate on is also training text of ``cfg.data``.

    ``data.heldout_split`` is compared only if training text is also read, as in calibration,
    because a dataset of held-out text alone has no training split.
    """
    haystacks = _haystacks(cfg)
    if cfg.data.heldout_path is not None and reads_data(cfg):
        check_heldout(cfg.data)
    if cfg.data.source is not None:  # otherwise the training text of the artifacts is unknown
        for path, task in {
            path: task for task, path in haystacks.items() if path is not None
        }.items():
            check_apart(cfg.data, _source(path), f"eval.{task}.haystack={path}")


def reads_data(cfg: EvalRunConfig) -> bool:
    """Returns True if a task reads the held-out documents of ``cfg.data``."""
    return None in _haystacks(cfg).values() or any(
        task_of(task).text in ("heldout", cfg.model.init) for task in cfg.eval.tasks
    )


def texts_hash(cfg: EvalRunConfig) -> str:
    """Returns a hash that changes when the local text on which the tasks evaluate does."""
    haystacks = _haystacks(cfg)
    own = [cfg.data] if reads_data(cfg) and cfg.data.source != "hub" else []
    texts = [*own, *(_source(path) for path in haystacks.values() if path is not None)]
    identities = [source_identity(text, heldout=True) for text in texts]
    named = [
        (task, key, getattr(getattr(cfg.eval, task), key))
        for task in cfg.eval.tasks
        for key in task_of(task).files
    ]
    files = [
        file for task, key, path in named if path for file in text_files(f"eval.{task}.{key}", path)
    ]
    identities += [file_hash(file) for file in files]
    return hashlib.sha256(json.dumps(identities).encode()).hexdigest()[:16]


def _haystacks(cfg: EvalRunConfig) -> dict[str, str | None]:
    """Returns the haystack of each task that reads one; None for the held-out documents."""
    return {
        task: getattr(cfg.eval, task).haystack
        for task in cfg.eval.tasks
        if task_of(task).text == "haystack"
    }


def _source(path: str) -> DataConfig:
    return DataConfig(source="text", path=path, heldout_path=path)
