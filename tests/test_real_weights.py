"""Weights that others trained, SmolLM2-135M: what models trained here do not have, such as an
attention sink.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import msattn
from msattn.trainer.commands.compose import compose
from msattn.trainer.config import ModelConfig
from msattn.trainer.models import Loaded, load, random_config
from msattn.trainer.models.chat import encode_prompt
from msattn.trainer.models.identity import config_fingerprint
from tests.house.modules import ROOT
from tests.running import succeed

MODEL = ROOT / "outputs/smollm2/model"
TEXT = ROOT / "LICENSE"  # a long text that stays as it is
# see tests/conftest.py
pytestmark = pytest.mark.skipif(
    not MODEL.is_dir(), reason="needs SmolLM2, which make models brings"
)


@pytest.fixture(scope="module")
def smollm2() -> Loaded:
    return load(ModelConfig(name="smollm2", path=str(MODEL)), device="cpu", dtype="float32")


def tokens(smollm2: Loaded, length: int) -> torch.Tensor:
    """Returns int64 ``[1, length]`` tokens of a text."""
    return torch.tensor([smollm2.tokenizer(TEXT.read_text()).input_ids[:length]])


@torch.no_grad()
def test_reading_every_block_is_dense_attention(
    smollm2: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2.model.config, "num_hidden_layers", 10)  # the first ones, for speed
    ids = tokens(smollm2, 1024)
    dense = smollm2.model(ids).logits
    with msattn.attach(smollm2.model, select="quest", sparsity=0.0, dense_below=0) as sparse:
        logits = smollm2.model(ids).logits
        assert sparse.stats()["sparsity"] == 0
    assert torch.allclose(logits, dense, atol=2e-3)
    assert torch.equal(logits.argmax(-1), dense.argmax(-1))


@torch.no_grad()
def test_the_sink_is_read(smollm2: Loaded) -> None:
    """At the same sparsity, rows that always read the first block lose less: most heads put most of
    their attention there.
    """
    ids, losses = tokens(smollm2, 1024), []
    for sink_blocks in (0, 1):
        select = {"scores": "quest", "sparsity": 0.8, "sink_blocks": sink_blocks}
        with msattn.attach(smollm2.model, select=select, dense_below=0):
            logits = smollm2.model(ids).logits[0, 512:-1]
        losses.append(F.cross_entropy(logits, ids[0, 513:]).item())
    assert losses[1] < losses[0] - 0.1


def test_a_gate_has_the_format_that_it_had(here: Path, quick_start: None) -> None:
    (here / "text.txt").write_text(TEXT.read_text()[:3000])
    (here / "heldout.txt").write_text(TEXT.read_text()[5000:5800])
    own = [
        "model=smollm2",
        f"model.path={MODEL}",
        "--data",
        "text.txt",
        "data.heldout_path=heldout.txt",
        "data.seq_len=128",
    ]
    succeed(
        "train-gate",
        *own,
        "train.steps=1",
        "train.batch_size=1",
        "train.eval_every=0",
        "tracker=none",
        "device=cpu",
    )
    gate: Any = msattn.load(here / "outputs/smollm2/base/gate")
    names = [f"layers.{layer}.{side}_weight" for layer in range(30) for side in ("query", "key")]
    shapes = {name: tuple(tensor.shape) for name, tensor in gate.state_dict().items()}
    assert shapes == {"inv_freq": (32,)} | dict.fromkeys(names, (9, 64, 192)), (
        "three poolings of 64 channels"
    )
    found = gate.artifact.manifest["model"]
    hashes = {
        "config_hash": "1a2a706864ee37b1",
        "weights_hash": "8052db56c9250ebe",
        "tokenizer_hash": "33b7dd0ab4327c92",
    }
    assert found | hashes == found
    described = random_config(compose("train-gate", ["model=smollm2"]).model)
    assert config_fingerprint(described)["config_hash"] == found["config_hash"]


@torch.no_grad()
def test_a_question_has_the_answer_that_it_had(smollm2: Loaded) -> None:
    ids = encode_prompt(smollm2.tokenizer, "What is the capital of France?", chat=None)
    model: Any = smollm2.model
    answer = model.generate(ids, max_new_tokens=10, do_sample=False)[0, ids.shape[1] :]
    assert smollm2.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
