"""A text, a small model and artifacts for it."""

from pathlib import Path

import pytest

from msattn.trainer import models
from msattn.trainer.config import GateConfig, ModelConfig
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.models.loading import Loaded
from tests.evaluate.runs import BUCKETS, config
from tests.factory import random_partition, tiny_architecture, tiny_model
from tests.sparse import save


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a text of plain words, the haystack."""
    folder = tmp_path_factory.mktemp("text")
    words = [
        "the",
        "river",
        "ran",
        "past",
        "an",
        "old",
        "mill",
        "and",
        "nobody",
        "knew",
        "where",
        "it",
        "came",
        "from",
    ]
    (folder / "essay.txt").write_text(
        " ".join(words[i * i % len(words)] for i in range(4000)), encoding="utf-8"
    )
    return str(folder)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """A random Llama of two layers with the embedded model's tokenizer."""
    cfg = ModelConfig(
        name="rand", path="embedded", init="random", architecture=tiny_architecture(vocab_size=4096)
    )
    return Loaded(
        tiny_model(vocab_size=4096),
        (found := models.load(cfg, device="cpu")).tokenizer,
        found.fingerprint,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder with an untrained gate and random centroids for the model of
    :func:`config`.
    """
    outputs = tmp_path_factory.mktemp("outputs")
    model = models.load(config(outputs, "unused").model, device="cpu")
    gate = Gate.build(model.model.config, GateConfig(block_size=16))
    for module in (gate, random_partition(BUCKETS)):
        save(outputs / "rand" / "base", model, module)
    return outputs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for tasks of lm_eval."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tasks").mkdir()
    return tmp_path / "tasks"
