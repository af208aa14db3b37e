"""``msattn demo``: the whole line on the embedded model, from text to report, in a few minutes on two CPU cores."""

import time
from collections.abc import Sequence
from pathlib import Path

from msattn.trainer.commands.compose import compose, launch

LINE = {
    "train-gate": "SeerAttention gates: which key blocks does each query block need?",
    "fit-kmeans": "k-means on the keys before RoPE: which keys belong together?",
    "train-qmodel": "Query classifiers: which buckets of keys does each query need?",
    "eval": "What do the artifacts read, and does the model still answer?",
}


def demo(overrides: Sequence[str] = ()) -> Path:
    """Run each command of the line under ``experiment=demo``; a rerun replaces what an earlier one wrote.

    Parameters
    ----------
    overrides : Hydra overrides that every command takes, e.g. ``outputs=/tmp/demo``.

    Returns
    -------
    The self-contained HTML report.
    """
    from rich.console import Console

    for command in LINE:  # an override that a later command refuses stops the line before its first
        compose(command, ["experiment=demo", *overrides])
    console = Console()
    begin = time.perf_counter()
    folder = Path()
    for number, (command, question) in enumerate(LINE.items(), start=1):
        console.rule(f"[bold]{number}/{len(LINE)} msattn {command}[/bold]", align="left")
        console.print(question)
        start = time.perf_counter()
        (folder,) = launch(command, ["experiment=demo", *overrides])
        console.print(f"{folder} after {time.perf_counter() - start:.0f} s")
    report = folder / "report.html"
    console.rule(align="left")
    console.print(
        f"Done in {time.perf_counter() - begin:.0f} s. The report, with its figures: [bold]{report}[/bold]", soft_wrap=True
    )
    return report
