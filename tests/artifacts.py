"""Artifacts that any test may write."""

from pathlib import Path
from typing import Any

import torch

from msattn.trainer.artifacts import write

MODEL = {
    "id": "someone/some-model",
    "revision": None,
    "config_hash": "aa",
    "weights_hash": "bb",
    "rope": {"rope_type": "default", "rope_theta": 1e4},
    "tokenizer_hash": "cc",
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
}


def save(folder: Path, value: float = 1.0, **options: Any) -> Path:
    fields: dict[str, Any] = {
        "kind": "gate",
        "tensors": {
            "a": torch.full((2, 3), value),
            "b": torch.tensor(7, dtype=torch.int32),
            "c": torch.ones(4).bfloat16(),
        },
        "config": {"seed": 3, "gate": {"block_size": 64}},
        "model": MODEL,
        "details": {"gate": {"block_size": 64}},
        "data": "dd",
        "seed": 3,
        "metrics": {"recall": 0.5, "loss": float("nan")},
    }
    return write(folder, **fields | options)
