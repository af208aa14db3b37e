"""Tasks of lm_eval, and what a model answers to them."""

import json
import re
from pathlib import Path
from typing import Any

import torch
import yaml

from msattn.trainer.models.loading import Loaded

GENERATED = {
    "output_type": "generate_until",
    "generation_kwargs": {"until": [], "max_gen_toks": 4, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


def write_task(
    folder: Path, name: str, rows: list[dict[str, Any]] | None = None, **keys: Any
) -> None:
    """Writes a task, over a file of ``rows`` if they are given."""
    task: dict[str, Any] = {
        "task": name,
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{target}}",
    }
    if rows is not None:
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task |= {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}}
    (folder / f"{name}.yaml").write_text(
        re.sub("'(!function [^']*)'", r"\1", yaml.safe_dump(task | keys))
    )


def log_likelihood(loaded: Loaded, tokens: list[int], first: int) -> float:
    """Returns the log-likelihood of ``tokens[first:]`` by a plain pass of the model."""
    model: Any = loaded.model
    with torch.inference_mode():
        found = model(torch.tensor([tokens[:-1]])).logits.log_softmax(-1)[0, first - 1 :]
    return float(found.gather(1, torch.tensor(tokens[first:])[:, None]).sum())
