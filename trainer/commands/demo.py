"""``msattn demo``: all steps from text to report on the embedded model, in a few minutes on two CPU cores."""

import time
from collections.abc import Sequence
from pathlib import Path

from msattn.trainer.commands.compose import compose, launch

STEPS = {
    "train-gate": "Trains SeerAttention gates, which predict the key blocks that each query block needs.",
    "fit-kmeans": "Clusters the keys before RoPE into buckets by k-means.",
    "train-qmodel": "Trains query classifiers, which predict the buckets that each query needs.",
    "eval": "Measures sparsity and quality of the model with these artifacts.",
}


def demo(overrides: Sequence[str] = ()) -> Path:
    """Runs the commands of :data:`STEPS` with ``experiment=demo``.

    The results replace those of an earlier demo.

    Parameters
    ----------
    overrides : Hydra overrides that every command takes, e.g. ``outputs=/tmp/demo``.

    Returns
    -------
    Path
        The self-contained HTML report.
    """
    from rich.console import Console

    for command in STEPS:  # reports a wrong override of any command before the first one runs
        compose(command, ["experiment=demo", *overrides])
    console = Console()
    begin = time.perf_counter()
    folder = Path()
    for number, (command, purpose) in enumerate(STEPS.items(), start=1):
        console.rule(f"[bold]{number}/{len(STEPS)} msattn {command}[/bold]", align="left")
        console.print(purpose)
        start = time.perf_counter()
        (folder,) = launch(command, ["experiment=demo", *overrides])
        console.print(f"{folder} after {time.perf_counter() - start:.0f} s")
    report = folder / "report.html"
    console.rule(align="left")
    console.print(f"Done in {time.perf_counter() - begin:.0f} s. Report: [bold]{report}[/bold]", soft_wrap=True)
    return report
