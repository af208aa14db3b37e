"""``msattn eval``: runs the evaluation tasks and writes tables, figures and a report."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from sys import version_info
from typing import TYPE_CHECKING, Any

from msattn.trainer.config import EvalRunConfig
from msattn.trainer.errors import UserError, print_once
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.storage.lock import locked
from msattn.trainer.storage.replace import clean_up, replace_folder

if TYPE_CHECKING:
    from rich.console import Console

    from msattn.trainer.evaluate.methods import ComparedMethods
    from msattn.trainer.evaluate.partial import PartialRows
    from msattn.trainer.evaluate.report.compare import Comparison
    from msattn.trainer.evaluate.tasks.harness_tasks import TaskSamples
    from msattn.trainer.models.loading import Loaded


def evaluate(cfg: EvalRunConfig) -> Path:
    """Runs the tasks of ``cfg.eval`` and writes the results.

    Returns
    -------
    Path
        ``outputs/<model>/<name>/eval`` with tables, figures and ``report.html``. An earlier folder is renamed to
        ``eval-<time it was written>``, or deleted with ``overwrite=true``.

    Raises
    ------
    UserError
        An artifact is damaged or belongs to another model, text of the evaluation is also training text, a length exceeds the
        model's positions, there are more probes than buckets, the folder is not writable, or ``cfg.compare`` is not the folder
        of an evaluation.
    """
    from msattn.trainer.data.prompts import read_prompts
    from msattn.trainer.evaluate.report import compare

    folder = cfg.folder / "eval"
    _prepare(folder)
    other = compare.read_results(cfg.compare) if cfg.compare else None  # this run may rename or delete that folder
    if "prompts" in cfg.eval.tasks:
        read_prompts(cfg.eval.prompts.path)  # refuses a wrong file before the imports
    if "harness" in cfg.eval.tasks:
        cfg.eval.harness.check_paths()

    from msattn.trainer import models
    from msattn.trainer.evaluate import calibration, haystack, key_shares, methods
    from msattn.trainer.evaluate.partial import PartialRows, settings_of
    from msattn.trainer.evaluate.report import files as report
    from msattn.trainer.evaluate.report.context import context
    from msattn.trainer.evaluate.tasks import harness_tasks
    from msattn.trainer.training.tracker import Tracker

    if cfg.data.source is None and haystack.reads_data(cfg):
        library = f"the source files of Python {version_info.major}.{version_info.minor}'s standard library"
        print_once(f"eval reads {library}, as no text was chosen; --data FILE_OR_FOLDER names one's own")
    loaded = models.load(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    haystack.check_texts(cfg)
    found = methods.find_methods(cfg, loaded, loaded.model.device)
    found = methods.add_routers(found, cfg, loaded.model)
    _check_sizes(cfg, loaded, found)
    samples = harness_tasks.load_samples(cfg, loaded) if "harness" in cfg.eval.tasks else []  # refuses a task before others run
    # Refuses other settings than those of the run to resume before the calibrations, which take minutes.
    kept = PartialRows(folder.with_name("eval.partial"), settings_of(cfg, loaded, found), resume=cfg.resume)
    found = calibration.calibrate_selections(found, cfg, loaded)
    calibration.calibrate_routers(found, cfg, loaded)
    found.notes.extend(calibration.unreachable_notes(found, cfg))
    found = key_shares.match_key_shares(found, cfg, loaded)
    rows: list[EvalRow] = []
    try:
        for of_task in _run_tasks(cfg, loaded, found, samples, kept):
            rows += of_task
    except KeyboardInterrupt as stop:
        _print_tables([*rows, *kept.of_other_tasks({row.task for row in rows})], [])
        ways = f"{len(kept)} rows are kept: the same command with resume=true continues after them"
        raise type(stop)(*([ways] if len(kept) else [])) from stop
    title = f"{cfg.model.name}, {cfg.name}: evaluation of sparse attention"
    about = context(title, asdict(cfg), found.manifests, found.notes, loaded.model.device)
    comparison = compare.compare(cfg.compare, rows, asdict(about), other) if cfg.compare and other else None
    keep = None if cfg.overwrite else partial(_kept_path, folder)
    with locked(folder), replace_folder(folder, keep=keep) as draft:
        figures = report.write(draft, rows, about, comparison)
    kept.remove()
    _print_results(rows, found.notes, comparison, folder / "report.html")
    with Tracker.of_job(cfg, "eval", folder=folder, run_name=f"{cfg.model.name}-{cfg.name}-eval", after_work=True) as tracker:
        for artifact in found.read:
            tracker.use_artifact(artifact)
        for name, path in figures.items():
            tracker.image(name, folder / path.name)
        tracker.html("report", folder / "report.html")
        tracker.table("results", report.flat(rows))
        tracker.summary(summary(rows))
    return folder


def _run_tasks(
    cfg: EvalRunConfig, loaded: "Loaded", found: "ComparedMethods", samples: "list[TaskSamples]", kept: "PartialRows"
) -> Iterator[list[EvalRow]]:
    """Yields the rows of each task, in the order of ``cfg.eval.tasks``; ``samples`` are those of lm_eval.

    Rows of the longer tasks are ``kept`` as they are measured. Times of one evaluation are measured in one run.
    """
    from msattn.trainer.evaluate.methods import without_routers
    from msattn.trainer.evaluate.report.context import CPU_NOTE
    from msattn.trainer.evaluate.tasks import (
        decoding,
        documents,
        harness,
        latency,
        needle,
        perplexity,
        prompts,
        recall,
        ruler,
        throughput,
    )
    from msattn.trainer.evaluate.tasks.analysis import task as analysis
    from msattn.trainer.progress import Progress

    device = loaded.model.device.type
    parts = (recall, prompts, latency, decoding, throughput)
    tasks: dict[str, Any] = {part.__name__.rsplit(".", 1)[-1]: part.run for part in parts}
    tasks |= {part.__name__.rsplit(".", 1)[-1]: partial(part.run, kept=kept) for part in (perplexity, needle, documents, ruler)}
    tasks |= {"analysis": analysis.run, "harness": partial(harness.run, kept=kept, samples=samples)}
    with Progress() as progress:
        for task in cfg.eval.tasks:
            compared = without_routers(found) if task == "analysis" else found  # its partitions are learned ones
            rows = tasks[task](loaded, cfg, compared, progress)
            yield [replace(row, extra=row.extra | {"device": device}) for row in rows]
    if device == "cpu" and {"latency", "decoding", "throughput"} & set(cfg.eval.tasks):
        found.notes.append(CPU_NOTE)


def _print_results(rows: list[EvalRow], notes: list[str], comparison: "Comparison | None", report: Path) -> None:
    """Prints the tables, the comparison with another evaluation, the verdict and the path of the report."""
    from msattn.trainer.evaluate.report import compare, verdict

    console = _print_tables(rows, notes)
    if comparison:
        compare.show(comparison, console)
    verdict.show(verdict.verdict(rows), console)
    console.print(f"Report: [bold]{report}[/bold]", soft_wrap=True)


def _print_tables(rows: list[EvalRow], notes: list[str]) -> "Console":
    """Prints a table for each task, and the notes; returns the console."""
    from rich.console import Console

    from msattn.trainer.evaluate.report import tables

    console = Console()
    tables.show(rows, notes, console)
    return console


def summary(rows: Sequence[EvalRow]) -> dict[str, float]:
    """Returns ``{"task/method/setting": score}`` for a tracker; after tasks with several: length, batch or benchmark."""
    return {"/".join(filter(None, (row.task, _length(row), str(row.method), row.setting))): row.score for row in rows}


def _length(row: EvalRow) -> str:
    if row.task == "harness":
        return "/".join(str(row.extra[key]) for key in ("benchmark", "length") if key in row.extra)
    if row.task not in ("needle", "documents", "ruler", "latency", "decoding", "throughput"):
        return ""
    batch = row.extra.get("batch", 1)
    return f"{row.extra['length']}" + f"x{batch}" * (batch > 1)


def _check_sizes(cfg: EvalRunConfig, loaded: "Loaded", found: "ComparedMethods") -> None:
    """Raises UserError, before the first task runs, for lengths and probes that a later task would refuse."""
    from msattn.trainer.evaluate.methods import without_routers
    from msattn.trainer.evaluate.tasks import documents, ruler
    from msattn.trainer.evaluate.tasks.analysis import task as analysis
    from msattn.trainer.evaluate.tasks.prompts import encoded_prompts
    from msattn.trainer.methods.pages import PageRouter
    from msattn.trainer.models.families import check_length

    sections = cfg.eval
    lengths = {
        "perplexity": [sections.perplexity.length],
        "recall": [sections.recall.length],
        "needle": sections.needle.lengths,
        "documents": sections.documents.lengths,
        "ruler": sections.ruler.lengths,
        "analysis": [sections.analysis.length],
        "latency": sections.latency.lengths,
        "throughput": [length + sections.throughput.tokens for length in sections.throughput.lengths],
    }
    probes = {
        "recall": sections.recall.probes,
        "needle": sections.needle.probes,
        "ruler": sections.ruler.probes,
        "decoding": [cfg.probes or 0],
    }
    buckets = cfg.model.presets.num_buckets
    if "decoding" in sections.tasks and not found.bucket_routings and (cfg.probes or 0) > buckets:
        raise UserError(f"probes={cfg.probes}: accepted are 0 to {buckets}, the number of buckets (model.presets.num_buckets)")
    if "prompts" in sections.tasks:
        encoded_prompts(loaded, cfg)
    if "documents" in sections.tasks:
        documents.check_sizes(cfg, loaded.tokenizer)
    if "ruler" in sections.tasks:
        ruler.check_sizes(cfg, loaded.tokenizer)
    if "analysis" in sections.tasks:
        analysis.check_sizes(cfg, loaded, without_routers(found))
    for task in sections.tasks:
        for length in lengths.get(task, []):  # decoding has no prompt
            check_length(loaded.model.config, length, f"length={length} of eval.{task}")
        for routing in found.bucket_routings:
            routing.settings(probes.get(task, []))
            exact = routing.recent + routing.sink
            if task == "recall" and sections.recall.length <= exact:
                raise UserError(
                    f"eval.recall.length={sections.recall.length}: accepted is more than recent + sink = {exact} tokens"
                )
            least = routing.router.page_size - 1 if isinstance(routing.router, PageRouter) else 0
            if task == "recall" and routing.recent < least:
                # The page of the first key before the window would have keys after the query in its summary.
                raise UserError(f"recent={routing.recent}: recall with {routing.method} accepts {least} or more tokens")


def _prepare(folder: Path) -> None:
    """Removes leftovers of a killed run. Raises UserError, before the first task runs, if results could not be written."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError(f"outputs={folder}: this is a file; results need a folder of this name")
    with locked(folder):
        clean_up(folder, keep=partial(_kept_path, folder))


def _kept_path(folder: Path, old: Path) -> Path:
    """Returns an unused path ``<folder>-<time at which old was written>`` and prints it."""
    stamp = datetime.fromtimestamp(old.stat().st_mtime).strftime("%Y%m%d-%H%M%S")
    paths = (folder.with_name(f"{folder.name}-{stamp}{f'-{number}' if number else ''}") for number in count())
    kept = next(path for path in paths if not path.exists())
    print_once(f"the earlier evaluation is now {kept}")
    return kept
