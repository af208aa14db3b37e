"""The small evaluation job that the tests of evaluation change and run."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from msattn.trainer import data, models
from msattn.trainer.config import (
    DataConfig,
    DecodingConfig,
    EvalConfig,
    EvalRunConfig,
    LatencyConfig,
    ModelConfig,
    ModelPresets,
    NeedleConfig,
    PerplexityConfig,
    RecallConfig,
    SelectConfig,
    TrackerConfig,
)
from msattn.trainer.evaluate.compared import Compared, find_compared
from msattn.trainer.evaluate.job import Job, PartialRows
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.models.loading import Loaded
from msattn.trainer.models.tap import LayerInputs, visit_layers
from msattn.trainer.progress import Progress
from tests.factory import tiny_architecture

BUCKETS = 4


def config(outputs: Path, text: str, **changes: object) -> EvalRunConfig:
    """A small configuration; ``changes`` replace fields of ``eval``."""
    tasks = EvalConfig(
        perplexity=PerplexityConfig(length=160, num_chunks=3, sparsities=[0.0, 0.6]),
        recall=RecallConfig(
            length=160, num_chunks=2, num_queries=8, sparsities=[0.0, 0.6], probes=[0, 1, BUCKETS]
        ),
        needle=NeedleConfig(
            lengths=[192], depths=[0.0, 0.5], samples=2, sparsities=[0.0, 0.6], probes=[0, BUCKETS]
        ),
    )
    return EvalRunConfig(
        model=ModelConfig(
            name="rand",
            path="embedded",
            init="random",
            architecture=tiny_architecture(vocab_size=4096),
        ),
        data=DataConfig(source="text", path=text, seq_len=160),
        tracker=TrackerConfig(kind="none"),
        outputs=str(outputs),
        device="cpu",
        select=SelectConfig(block_size=16),
        dense_below=10**6,  # an evaluation ignores it
        eval=replace(tasks, **changes),
        recent=16,
        sink=1,
    )


def timed_config(outputs: Path, **changes: object) -> EvalRunConfig:
    """A small configuration of ``latency`` and ``decoding``; ``changes`` replace fields."""
    cfg = config(
        outputs,
        "unused",
        tasks=["latency", "decoding"],
        baselines=[],
        latency=LatencyConfig(
            lengths=[96, 240], sparsities=[0.5, 0.9], seconds=0.01, chunk=100, turn=64
        ),
        decoding=DecodingConfig(lengths=[128, 1000], batches=[1, 2], max_keys=1000, tokens=4),
    )
    model = replace(cfg.model, presets=ModelPresets(num_buckets=BUCKETS, qmodel_hidden=8))
    select = SelectConfig(policy="calibrated", block_size=16)
    return replace(
        cfg,
        **{"model": model, "data": DataConfig("stdlib"), "select": select, "probes": 2, **changes},
    )


def measured_on_a_chunk(
    cfg: EvalRunConfig, loaded: Loaded, measure: Callable[[LayerInputs], object]
) -> None:
    """Calls ``measure(x)`` with the inputs of each layer of a prefill of 160 held-out tokens."""
    chunks = data.chunks(
        cfg.data, loaded.tokenizer, seed=cfg.seed, heldout=True, seq_len=160, num_chunks=1
    )
    visit_layers(loaded.model, measure, [chunks[0]])


def loaded_and_found(cfg: EvalRunConfig) -> tuple[Loaded, Compared]:
    """The model of a configuration, and the methods that its evaluation compares."""
    loaded = models.load(cfg.model, device="cpu")
    return loaded, find_compared(cfg, loaded).on(loaded)


def terminal(show: Callable[[Console], None]) -> str:
    """Returns the text that ``show`` prints on a terminal of 80 columns."""
    with open("/dev/null", "w") as nowhere:
        console = Console(width=80, record=True, file=nowhere)
        show(console)
        return console.export_text()


def read_rows(folder: Path, *extra: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The rows of an evaluation by method, setting and these values of ``extra``, if they differ in
    them.
    """
    rows = json.loads((folder / "results.json").read_text())["rows"]
    found = {
        (row["method"], row["setting"], *(row["extra"][key] for key in extra)): row for row in rows
    }
    assert len(found) == len(rows)
    return found


def rows_of(task: Any, loaded: Loaded, cfg: EvalRunConfig, methods: Compared) -> list[EvalRow]:
    """The rows of a task that a test runs by itself."""
    prepared = (
        {task.__name__.rpartition(".")[2]: task.prepare(cfg, loaded)}
        if hasattr(task, "prepare")
        else {}
    )
    with TemporaryDirectory() as folder:
        kept = PartialRows(Path(folder) / "rows", {}, resume=False)
        return task.run(Job(loaded, cfg, methods, Progress(), kept, prepared))
