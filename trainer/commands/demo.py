"""``msattn demo``: all steps from text to report on the embedded model, in a few minutes on two CPU
cores.
"""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from msattn.trainer.commands.compose import compose
from msattn.trainer.commands.launch import launch
from msattn.trainer.config.values import one_of, require
from msattn.trainer.errors import UserError, write_error
from msattn.trainer.progress import duration
from msattn.trainer.storage.documents import checked, read_json
from msattn.trainer.storage.replace import replace_file

MAX_BYTES = 100_000  # of the file with the finished steps
BASELINES = ("quest", "vertical_slash", "mean_pool")

STEPS = {  # commands and what they do
    "train-gate": "Trains SeerAttention gates, which predict the key blocks that each query block "
    "needs.",
    "fit-kmeans": "Clusters the keys before RoPE into buckets with k-means.",
    "train-qmodel": "Trains query classifiers, which predict the buckets that each query needs.",
    "eval": "Compares them with the shipped gate, which was trained longer, and with methods that "
    "need no training.",
}
# Duration of each step on a CPU, in dense passes of the model over a chunk. Both slow down on a
# busy machine.
PASSES = {"train-gate": 220, "fit-kmeans": 10, "train-qmodel": 60, "eval": 170}
# overrides that leave the durations as they are
WITHOUT_EFFECT = ("outputs", "name", "device", "resume", "seed", "tracker")


@dataclass(frozen=True)
class Finished:
    """The steps of a demo that are finished, with the folders of their results, and its
    overrides.
    """

    overrides: list[str]
    folders: dict[str, str]


def demo(overrides: Sequence[str] = ()) -> Path:
    """Runs :data:`STEPS` with ``experiment=demo``, prints the answers to a needle prompt and
    returns the HTML report.

    The results replace those of an earlier demo. ``overrides`` must be valid for every command,
    e.g. ``outputs=/tmp/demo``; ``steps=[train-gate,eval]`` leaves steps out, and ``resume=true``
    goes on where an interrupted demo stopped. Without the step ``eval`` there is no report, and the
    folder of the last step is returned.
    """
    chosen = _chosen_steps(overrides)
    given = [override for override in overrides if not override.startswith(("steps=", "resume="))]
    arguments = {command: ["experiment=demo", *given] for command in chosen}
    if "eval" in chosen:
        arguments["eval"].insert(1, "eval=demo")
    # Reports a wrong override of any command before the first one runs.
    resume = [override for override in overrides if override.startswith("resume=")]
    configs = {command: compose(command, [*words, *resume]) for command, words in arguments.items()}
    cfg = configs[chosen[0]]
    if (
        "train-qmodel" in chosen
        and "fit-kmeans" not in chosen
        and not (cfg.folder / "kmeans").exists()
    ):
        raise UserError(
            f"steps={','.join(chosen)}: train-qmodel needs fit-kmeans, as {cfg.folder} has no "
            f"k-means"
        )
    if cfg.model.is_embedded and "eval" in chosen:
        arguments["eval"].append("artifacts.gate=embedded")
    console, begin, path = Console(), time.perf_counter(), cfg.folder / "runs" / "demo.json"
    done = _read_finished(path, given) if cfg.resume else Finished(given, {})
    _write_finished(path, done)
    _print_plan(cfg, chosen, done, console)
    for number, command in enumerate(chosen, start=1):
        console.rule(f"[bold]{number}/{len(chosen)} msattn {command}[/bold]", align="left")
        if command in done.folders:
            console.print(f"{done.folders[command]} was finished before")
            continue
        console.print(STEPS[command])
        start = time.perf_counter()
        try:
            (folder,) = launch(command, [*arguments[command], *resume])
        except KeyboardInterrupt as stop:
            step = str(stop).partition("; resume=true")[0] or "stopped"
            raise type(stop)(
                f"{step}; the same command with resume=true continues the demo"
            ) from stop
        resume = []  # one step was interrupted, the others begin
        done.folders[command] = str(folder)
        _write_finished(path, done)
        console.print(f"{folder} after {time.perf_counter() - start:.0f} s")
    folder = Path(done.folders[chosen[-1]])
    if "eval" not in chosen:
        return folder
    rows = json.loads((folder / "results.json").read_text(encoding="utf-8"))["rows"]
    _print_answers(rows, configs["eval"].select.scores, console)
    report = folder / "report.html"
    console.print(
        f"Done in {time.perf_counter() - begin:.0f} s. Report: [bold]{report}[/bold]",
        soft_wrap=True,
    )
    return report


def _chosen_steps(overrides: Sequence[str]) -> list[str]:
    """Returns the steps to run, in the order of :data:`STEPS`: those of ``steps=``, or all."""
    given = "".join(
        override.removeprefix("steps=") for override in overrides if override.startswith("steps=")
    )
    names = re.findall(r"[^\s,\[\]]+", given)
    for name in names:
        one_of("steps", name, STEPS)
    asked = any(override.startswith("steps=") for override in overrides)
    require(bool(names) or not asked, "steps", given, f"expected one or more of {', '.join(STEPS)}")
    return [name for name in STEPS if name in names or not asked]


def _read_finished(path: Path, given: list[str]) -> Finished:
    """Returns the finished steps of an earlier demo; UserError if it had other overrides."""
    if not path.exists():
        return Finished(given, {})
    before = checked(read_json(path, str(path), MAX_BYTES), Finished, str(path))
    if before.overrides != given:
        raise UserError(
            f"resume=true: the demo in {path.parents[1]} has the overrides {before.overrides}, "
            f"not {given}"
        )
    return before


def _write_finished(path: Path, done: Finished) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as new:
            new.write_text(json.dumps(asdict(done)))
    except OSError as error:
        raise write_error(path, error) from error


def _print_plan(cfg: Any, chosen: list[str], done: Finished, console: Console) -> None:
    """Prints what the demo will do and, on a CPU with the demo's own sizes, about how long that
    takes on this machine.
    """
    left = [command for command in chosen if command not in done.folders]
    known = left and all(override.startswith(WITHOUT_EFFECT) for override in done.overrides)
    seconds = _speed(cfg) if known else None
    times = {
        command: "" if seconds is None else f"about {duration(seconds * PASSES[command])}"
        for command in left
    }
    total = (
        ""
        if seconds is None
        else f", about {duration(seconds * sum(map(PASSES.__getitem__, left)))} on this machine"
    )
    console.print(
        f"[bold]msattn demo: {len(left)} steps on {cfg.model.name}{total}[/bold]", highlight=False
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    for command in chosen:
        table.add_row(command, times.get(command, "finished"), STEPS[command])
    console.print(table)
    hint = (
        "steps=[train-gate,eval] leaves the others out; Ctrl-C stops the demo, and resume=true "
        "continues it"
    )
    console.print(hint, markup=False, highlight=False)


def _speed(cfg: Any) -> float | None:
    """Returns how long the model takes for a chunk on the CPU; None on a GPU."""
    from msattn.trainer import models
    from msattn.trainer.models.timing import seconds_of_pass

    if models.resolve_device(cfg.device).type != "cpu":
        return None
    model = models.load(cfg.model, device="cpu", dtype=cfg.dtype).model
    return seconds_of_pass(model, cfg.data.seq_len)


def _print_answers(rows: list[dict[str, Any]], scores: str, console: Console) -> None:
    """Prints one of the needle prompts, the one that dense attention and a gate answer but most
    baselines do not.

    ``scores`` are those of the gates that are served.
    """
    gate_names = (scores, f"{scores} (embedded)")
    shown = ("dense", *gate_names, *BASELINES)
    answers = {
        row["method"]: row["extra"]["examples"]
        for row in rows
        if row["task"] == "needle" and row["method"] in shown
    }
    gates = [answers[gate] for gate in gate_names if gate in answers]

    def wrong_baselines(number: int) -> int:
        right = answers["dense"][number]["correct"] and any(
            examples[number]["correct"] for examples in gates
        )
        return sum(not answers[method][number]["correct"] for method in BASELINES) if right else -1

    number = max(range(len(answers["dense"])), key=wrong_baselines)
    console.rule("[bold]One of the needle prompts[/bold]", align="left")
    console.print(answers["dense"][number]["prompt"], markup=False, highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("attention")
    table.add_column("answer")
    for method in filter(answers.get, shown):
        example = answers[method][number]
        table.add_row(
            method, f"{example['answer']} {'(right)' if example['correct'] else '(wrong)'}"
        )
    console.print(table)
