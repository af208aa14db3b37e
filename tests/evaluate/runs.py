"""The small evaluation job that the tests of evaluation change and run."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msattn.trainer.config import (
    DataConfig,
    EvalConfig,
    EvalRunConfig,
    ModelConfig,
    NeedleConfig,
    PerplexityConfig,
    RecallConfig,
    SelectConfig,
    TrackerConfig,
)
from msattn.trainer.evaluate.job import Job, PartialRows
from msattn.trainer.evaluate.methods import ComparedMethods
from msattn.trainer.evaluate.row import EvalRow
from msattn.trainer.models.loading import Loaded
from msattn.trainer.progress import Progress
from tests.factory import tiny_architecture

BUCKETS = 4


def config(outputs: Path, text: str, **changes: object) -> EvalRunConfig:
    """A small configuration; ``changes`` replace fields of ``eval``."""
    tasks = EvalConfig(
        perplexity=PerplexityConfig(length=160, num_chunks=3, sparsities=[0.0, 0.6]),
        recall=RecallConfig(length=160, num_chunks=2, num_queries=8, sparsities=[0.0, 0.6], probes=[0, 1, BUCKETS]),
        needle=NeedleConfig(lengths=[192], depths=[0.0, 0.5], samples=2, sparsities=[0.0, 0.6], probes=[0, BUCKETS]),
    )
    return EvalRunConfig(
        model=ModelConfig(name="rand", path="embedded", init="random", architecture=tiny_architecture(vocab_size=4096)),
        data=DataConfig(source="text", path=text, seq_len=160),
        tracker=TrackerConfig(kind="none"),
        outputs=str(outputs),
        device="cpu",
        select=SelectConfig(block_size=16, dense_below=10**6),  # an evaluation ignores dense_below
        eval=replace(tasks, **changes),
        recent=16,
        sink=1,
    )


def rows_of(task: Any, loaded: Loaded, cfg: EvalRunConfig, methods: ComparedMethods) -> list[EvalRow]:
    """The rows of a task that a test runs by itself."""
    with TemporaryDirectory() as folder:
        kept = PartialRows(Path(folder) / "rows.jsonl", {}, resume=False)
        return task.run(Job(loaded, cfg, methods, Progress(), kept))
