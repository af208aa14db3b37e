"""``msattn demo``: all steps from text to report on the embedded model, in a few minutes on two CPU cores."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from msattn.trainer.commands.compose import compose
from msattn.trainer.commands.launch import launch

BASELINES = ("quest", "vertical_slash", "mean_pool")

STEPS = {  # commands and what they do
    "train-gate": "Trains SeerAttention gates, which predict the key blocks that each query block needs.",
    "fit-kmeans": "Clusters the keys before RoPE into buckets with k-means.",
    "train-qmodel": "Trains query classifiers, which predict the buckets that each query needs.",
    "eval": "Compares them with the shipped gate, which was trained longer, and with methods that need no training.",
}


def demo(overrides: Sequence[str] = ()) -> Path:
    """Runs :data:`STEPS` with ``experiment=demo``, prints the answers to a needle prompt and returns the HTML report.

    The results replace those of an earlier demo. ``overrides`` must be valid for every command, e.g. ``outputs=/tmp/demo``.
    """
    arguments = {command: ["experiment=demo", *overrides] for command in STEPS}
    arguments["eval"].insert(1, "eval=demo")
    # Reports a wrong override of any command before the first one runs.
    configs = {command: compose(command, given) for command, given in arguments.items()}
    if configs["eval"].model.is_embedded:
        arguments["eval"].append("artifacts.gate=embedded")
    console = Console()
    begin = time.perf_counter()
    folder = Path()
    for number, (command, purpose) in enumerate(STEPS.items(), start=1):
        console.rule(f"[bold]{number}/{len(STEPS)} msattn {command}[/bold]", align="left")
        console.print(purpose)
        start = time.perf_counter()
        (folder,) = launch(command, arguments[command])
        console.print(f"{folder} after {time.perf_counter() - start:.0f} s")
    rows = json.loads((folder / "results.json").read_text(encoding="utf-8"))["rows"]
    _print_answers(rows, configs["eval"].select.scores, console)
    report = folder / "report.html"
    console.print(f"Done in {time.perf_counter() - begin:.0f} s. Report: [bold]{report}[/bold]", soft_wrap=True)
    return report


def _print_answers(rows: list[dict[str, Any]], scores: str, console: Console) -> None:
    """Prints one of the needle prompts, the one that dense attention and a gate answer but most baselines do not.

    ``scores`` are those of the gates that are served.
    """
    gate_names = (scores, f"{scores} (embedded)")
    shown = ("dense", *gate_names, *BASELINES)
    answers = {row["method"]: row["extra"]["examples"] for row in rows if row["task"] == "needle" and row["method"] in shown}
    gates = [answers[gate] for gate in gate_names if gate in answers]

    def wrong_baselines(number: int) -> int:
        right = answers["dense"][number]["correct"] and any(examples[number]["correct"] for examples in gates)
        return sum(not answers[method][number]["correct"] for method in BASELINES) if right else -1

    number = max(range(len(answers["dense"])), key=wrong_baselines)
    console.rule("[bold]One of the needle prompts[/bold]", align="left")
    console.print(answers["dense"][number]["prompt"], markup=False, highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("attention")
    table.add_column("answer")
    for method in filter(answers.get, shown):
        example = answers[method][number]
        table.add_row(method, f"{example['answer']} {'(right)' if example['correct'] else '(wrong)'}")
    console.print(table)
