"""``msattn eval``: runs the evaluation tasks and writes tables, figures and a report."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from sys import version_info
from typing import TYPE_CHECKING, Any

from rich.console import Console

from msattn.trainer.config import EvalConfig, EvalRunConfig
from msattn.trainer.errors import UserError, print_once
from msattn.trainer.evaluate.report import compare, tables, verdict
from msattn.trainer.evaluate.report.context import CPU_NOTE, context
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.evaluate.task import lengths_of, prepare, task_module, task_of
from msattn.trainer.progress import Progress, estimate
from msattn.trainer.storage.lock import locked
from msattn.trainer.storage.replace import clean_up, replace_folder

LEAST_CALIBRATED = 1024  # tokens of a chunk, where the user's own prompts are shorter

if TYPE_CHECKING:
    from msattn.trainer.evaluate.compared import Compared
    from msattn.trainer.evaluate.job import Job
    from msattn.trainer.models.loading import Described, Loaded


def evaluate(cfg: EvalRunConfig) -> Path:
    """Runs the tasks of ``cfg.eval`` and writes ``outputs/<model>/<name>/eval``: tables, figures
    and ``report.html``.

    An earlier folder is renamed to ``eval-<time it was written>``, or deleted with
    ``overwrite=true``. Artifacts, text, lengths and settings that do not fit raise UserError before
    the weights are read.
    """
    folder = cfg.folder / "eval"
    _clear_leftovers(folder)
    # this run may rename or delete that folder
    other = compare.read_results(cfg.compare) if cfg.compare else None
    for task in cfg.eval.tasks:
        if check := getattr(task_module(task), "check_config", None):
            check(cfg)
    job = _load_job(cfg)
    rows = _run_tasks(job)
    figures = _write_report(job, rows, other)
    _track(job, rows, figures)
    return folder


def _load_job(cfg: EvalRunConfig) -> "Job":
    """Loads the model and calibrates the compared methods, after the checks that need no
    weights.
    """
    # Heavy libraries: mistakes in the configuration are refused without them.
    from msattn.trainer import models
    from msattn.trainer.evaluate import calibration
    from msattn.trainer.evaluate.compared import find_compared
    from msattn.trainer.evaluate.job import Job, PartialRows, check_texts, reads_data, settings_of

    if cfg.data.is_library and reads_data(cfg):
        _name_library(cfg, "eval")
    described = models.describe(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    check_texts(cfg)
    compared = find_compared(cfg, described)
    _check_sizes(cfg, described, compared)
    prepared = prepare(cfg, described)
    if cfg.eval.tasks == ["prompts"]:  # calibrated no longer than they are
        longest = max(LEAST_CALIBRATED, *(ids.shape[1] for ids in prepared["prompts"]))
        cfg = replace(cfg, data=replace(cfg.data, seq_len=min(cfg.data.seq_len, longest)))
    if calibration.is_needed(compared, cfg):
        if cfg.data.is_library and not reads_data(cfg):
            _name_library(cfg, "calibration")
        calibration.calibration_chunks(cfg, described, 1)
    loaded = described.load()
    compared = compared.on(loaded)
    # Refuses other settings than those of the run to resume before the calibrations, which take
    # minutes.
    settings = settings_of(cfg, loaded, compared)
    kept = PartialRows(cfg.folder / "eval.rows", settings, resume=cfg.resume)
    _print_estimate(cfg, loaded, compared)
    calibrated = calibration.calibrate(compared, cfg, loaded)
    return Job(loaded, cfg, calibrated, Progress(), kept, prepared)


def _name_library(cfg: EvalRunConfig, reader: str) -> None:
    """Prints that ``reader`` reads Python's standard library, which may not be the user's
    choice.
    """
    chosen = "" if cfg.data.source else "no text was chosen, so "
    print_once(
        f"{chosen}{reader} reads source files of Python {version_info.major}.{version_info.minor}'s"
        f" standard library; --data FILE_OR_FOLDER reads your own"
    )


def _run_tasks(job: "Job") -> list[EvalRow]:
    """Returns the rows of all tasks; an interruption prints those that were measured."""
    rows: list[EvalRow] = []
    try:
        for of_task in _rows_by_task(job):
            rows += of_task
    except KeyboardInterrupt as stop:
        kept = job.kept
        _print_tables([*rows, *kept.of_other_tasks({row.task for row in rows})], [])
        ways = f"{len(kept)} rows are kept: the same command with resume=true continues after them"
        raise type(stop)(*([ways] if len(kept) else [])) from stop
    return rows


def _write_report(job: "Job", rows: list[EvalRow], other: dict[str, Any] | None) -> dict[str, Path]:
    """Writes and prints the results, beside those of the ``other`` evaluation; returns the figures
    by name.
    """
    from msattn.trainer.evaluate.report import files

    cfg, folder = job.cfg, job.cfg.folder / "eval"
    title = f"{cfg.model.name}, {cfg.name}: evaluation of sparse attention"
    notes, device = job.compared.notes, job.loaded.model.device
    about = context(title, asdict(cfg), job.compared.manifests, notes, device)
    comparison = (
        compare.compare(cfg.compare, rows, asdict(about), other) if cfg.compare and other else None
    )
    keep = None if cfg.overwrite else partial(_kept_path, folder)
    with locked(folder), replace_folder(folder, keep=keep) as draft:
        figures = files.write(draft, rows, about, comparison)
    job.kept.remove()
    console = _print_tables(rows, notes)
    if comparison:
        compare.show(comparison, console)
    verdict.show(rows, console)
    console.print(f"Report: [bold]{folder / 'report.html'}[/bold]", soft_wrap=True)
    return figures


def _track(job: "Job", rows: list[EvalRow], figures: Mapping[str, Path]) -> None:
    """Gives the results to the tracker."""
    from msattn.trainer.evaluate.report import files
    from msattn.trainer.training.tracker import Tracker

    cfg, folder = job.cfg, job.cfg.folder / "eval"
    with Tracker.of_job(
        cfg, "eval", folder=folder, run_name=f"{cfg.model.name}-{cfg.name}-eval", after_work=True
    ) as tracker:
        for artifact in job.compared.read:
            tracker.use_artifact(artifact)
        for name, path in figures.items():
            tracker.image(name, folder / path.name)
        tracker.html("report", folder / "report.html")
        tracker.table("results", files.flat(rows))
        tracker.summary(summary(rows, cfg.eval))


def _print_estimate(cfg: EvalRunConfig, loaded: "Loaded", compared: "Compared") -> None:
    """Prints how long the calibration and the tasks take on a CPU, as far as that is known, from
    the time of a dense pass.
    """
    from msattn.trainer.evaluate import calibration
    from msattn.trainer.models.timing import seconds_of_pass, seconds_of_scores

    tokens = {"calibration": calibration.dense_passes(compared, cfg) * cfg.data.seq_len}
    lengths: list[int] = []
    scored: dict[str, int] = {}  # tokens whose predictions are compared
    for task in cfg.eval.tasks:
        section, samples = getattr(cfg.eval, task), task_of(task).samples
        if samples is not None:
            # routers decode after the dense pass
            cases = len(compared.prefill_cases(loaded.model, section.sparsities))
            number = samples(section) * sum(lengths_of(section))
            tokens[task] = number * cases
            if task_of(task).scored:
                tokens[task], scored[task] = number * (2 * cases - 1), number * cases
            lengths += lengths_of(section)
    tokens = {what: number for what, number in tokens.items() if number}
    longest = max(lengths, default=cfg.data.seq_len)
    if tokens and (seconds := seconds_of_pass(loaded.model, longest)) is not None:
        parts = {what: seconds * number / longest for what, number in tokens.items()}
        for task, number in scored.items():
            parts[task] += number * seconds_of_scores(loaded.model)
        others = [task for task in cfg.eval.tasks if task_of(task).samples is None]
        estimate("eval", parts, others)


def _rows_by_task(job: "Job") -> Iterator[list[EvalRow]]:
    device, tasks = job.loaded.model.device.type, job.cfg.eval.tasks
    with job.progress:
        for task in tasks:
            yield [
                replace(row, extra=row.extra | {"device": device})
                for row in task_module(task).run(job)
            ]
    if device == "cpu" and any(task_of(task).timed for task in tasks):
        job.compared.notes.append(CPU_NOTE)


def _print_tables(rows: list[EvalRow], notes: list[str]) -> Console:
    """Prints a table for each task, and the notes; returns the console."""
    console = Console()
    tables.show(rows, notes, console)
    return console


def summary(rows: Sequence[EvalRow], cfg: EvalConfig) -> dict[str, float]:
    """Returns ``{"task/method/setting": score}`` for a tracker; after tasks with several:
    benchmark, length and batch.
    """
    return {
        "/".join(
            filter(None, (row.task, *_sizes(row, cfg), str(row.method), str(row.setting)))
        ): row.score
        for row in rows
    }


def _sizes(row: EvalRow, cfg: EvalConfig) -> list[str]:
    if not hasattr(getattr(cfg, row.task), "lengths"):
        return []
    length, batch = row.extra.get("length", ""), row.extra.get("batch", 1)
    return [row.extra.get("benchmark", ""), f"{length}x{batch}" if batch > 1 else f"{length}"]


def _check_sizes(cfg: EvalRunConfig, model: "Described", compared: "Compared") -> None:
    """Raises UserError, before the weights are read, for lengths and probes that a later task would
    refuse.
    """
    from msattn.trainer.models.families import check_length

    for task in cfg.eval.tasks:
        if check := getattr(task_module(task), "check_sizes", None):
            check(cfg, model, compared)
    for task in cfg.eval.tasks:
        section = getattr(cfg.eval, task)
        if task_of(task).fits_positions:
            for length in lengths_of(section):
                answered = length + getattr(section, "tokens", 0)
                check_length(model.config, answered, f"length={answered} of eval.{task}")
        for routing in compared.bucket_routings:
            routing.settings(getattr(section, "probes", []))


def _clear_leftovers(folder: Path) -> None:
    """Removes leftovers of a killed run. Raises UserError, before the first task runs, if results
    could not be written.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError(f"outputs={folder}: this is a file; results need a folder of this name")
    with locked(folder):
        clean_up(folder, keep=partial(_kept_path, folder))


def _kept_path(folder: Path, old: Path) -> Path:
    """Returns an unused path ``<folder>-<time at which old was written>`` and prints it."""
    stamp = datetime.fromtimestamp(old.stat().st_mtime).strftime("%Y%m%d-%H%M%S")
    paths = (
        folder.with_name(f"{folder.name}-{stamp}{f'-{number}' if number else ''}")
        for number in count()
    )
    kept = next(path for path in paths if not path.exists())
    print_once(f"the earlier evaluation was moved to {kept}")
    return kept
