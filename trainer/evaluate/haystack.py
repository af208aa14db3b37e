"""The text that tasks evaluate on: held-out documents, and the haystacks in which needles are hidden."""

import hashlib
import json
from collections.abc import Iterator

from msattn.trainer import data
from msattn.trainer.config import DataConfig, EvalRunConfig
from msattn.trainer.data.overlap import check_apart, check_heldout
from msattn.trainer.data.sources import source_identity

HELD_OUT_TASKS = ("perplexity", "recall", "documents", "analysis")  # always read the held-out documents
HAYSTACK_TASKS = ("needle", "ruler")  # read a haystack, or else the held-out documents


def documents(cfg: DataConfig, path: str | None) -> Iterator[data.Document]:
    """Yields the documents of ``path``, a text file or folder, or the held-out ones of ``cfg``."""
    return data.documents(_source(path) if path else cfg, heldout=True)


def check_texts(cfg: EvalRunConfig) -> None:
    """Raises UserError if text on which the tasks evaluate is also training text of ``cfg.data``.

    ``data.heldout_split`` is compared where training text is read too, as for calibration: a dataset of held-out text alone has
    no training split.
    """
    haystacks = _haystacks(cfg)
    if cfg.data.heldout_path is not None and reads_data(cfg):
        check_heldout(cfg.data)
    if cfg.data.source is not None:  # else nobody has named the text that artifacts were trained on
        for path, task in {path: task for task, path in haystacks.items() if path is not None}.items():
            check_apart(cfg.data, _source(path), f"eval.{task}.haystack={path}")


def reads_data(cfg: EvalRunConfig) -> bool:
    """Returns True if a task reads the held-out documents of ``cfg.data``."""
    return None in _haystacks(cfg).values() or bool({*HELD_OUT_TASKS} & {*cfg.eval.tasks})


def texts_hash(cfg: EvalRunConfig) -> str:
    """Returns a hash that changes when the local text on which the tasks evaluate does."""
    haystacks = _haystacks(cfg)
    own = [cfg.data] if reads_data(cfg) and cfg.data.source != "hub" else []
    texts = [*own, *(_source(path) for path in haystacks.values() if path is not None)]
    found = [source_identity(each, heldout=True) for each in texts]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def _haystacks(cfg: EvalRunConfig) -> dict[str, str | None]:
    """Returns the haystack of each task that reads one; None for the held-out documents."""
    return {task: getattr(cfg.eval, task).haystack for task in HAYSTACK_TASKS if task in cfg.eval.tasks}


def _source(path: str) -> DataConfig:
    return DataConfig(source="text", path=path, heldout_path=path)
