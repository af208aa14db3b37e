"""The small evaluation job that the tests of evaluation change and run."""

from dataclasses import replace
from pathlib import Path

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
from msattn.trainer.evaluate.partial import PartialRows
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


def kept_rows(folder: Path) -> PartialRows:
    """A file for the rows of tasks that a test runs by themselves."""
    return PartialRows(folder / "rows.jsonl", {}, resume=False)
