"""The job of msattn train-gate on a small random model: artifact, metrics, several ranks,
resumption, failures.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import msattn
from msattn.trainer import artifacts, data, models, progress
from msattn.trainer.config import (
    BlockSizes,
    GateConfig,
    ModelConfig,
    SelectConfig,
    TrainConfig,
    TrainGateConfig,
)
from msattn.trainer.errors import UserError
from msattn.trainer.methods.gate.attn_gate import MEAN_WEIGHT, Gate
from msattn.trainer.methods.gate.decode_gate import DecodeGate
from msattn.trainer.methods.gate.distillation import gate_recall
from msattn.trainer.methods.gate.train import HELDOUT_CHUNKS, train_gate
from msattn.trainer.methods.selection import Selection
from msattn.trainer.training.distributed import rank_shard
from tests.factory import inputs_of_layers, random_tokens, tiny_architecture
from tests.jobs import Job
from tests.methods.layers import blocks_read
from tests.running import metrics_lines
from tests.training.small import small_run, write_words

SHARED = """
import os, sys
from pathlib import Path
import torch
from tests.methods.gate.test_train import two_rank_config
from msattn.trainer.methods.gate import distillation, train

class Recording(distillation.GateDistiller):
    seen = []
    def forward(self, input_ids):
        if torch.is_grad_enabled():  # not while the speed is measured
            self.seen.append(input_ids)
        return super().forward(input_ids)

train.PHASES["prefill"] = train.Gate, Recording, train.gate_recall
root, name = Path(sys.argv[1]), sys.argv[2]
train.train_gate(two_rank_config(root, name))
torch.save(torch.cat(Recording.seen), root / f"{name}-{os.environ['RANK']}.pt")
"""


def run_config(root: Path, name: str = "base", steps: int = 4, **changes) -> TrainGateConfig:
    """Settings for two layers and chunks of 96 tokens; text and outputs are in ``root``."""
    settings = small_run(root, name) | {
        "model": ModelConfig(
            name="small",
            path="none",
            init="random",
            architecture=tiny_architecture(vocab_size=4096),
        ),
        "gate": GateConfig(block_size=16),
        "train": TrainConfig(
            lr=1e-3, steps=steps, batch_size=2, micro_batch_size=1, log_every=1, save_every=2
        ),
    }
    return TrainGateConfig(**{**settings, **changes})


def two_rank_config(root: Path, name: str) -> TrainGateConfig:
    """Settings for two passes over eight chunks, four per step, with an evaluation every two
    steps.
    """
    train = TrainConfig(
        lr=1e-3, steps=4, batch_size=4, micro_batch_size=1, log_every=1, eval_every=2
    )
    cfg = run_config(root, name, train=train)
    return replace(cfg, data=replace(cfg.data, num_chunks=8))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("train_gate")
    write_words(folder)
    return folder


def work_folder(cfg: TrainGateConfig) -> Path:
    return Path(cfg.outputs, "small", cfg.name, "runs", "gate")


@pytest.mark.slow
def test_recalls_are_those_of_the_weight_that_was_chosen(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(gate: Gate, teacher: Any, chunks: Any) -> None:
        gate.cfg = replace(gate.cfg, mean_weight=50.0)

    monkeypatch.setattr("msattn.trainer.methods.gate.train.choose_mean_weight", choose)
    cfg = run_config(root, "chosen")
    cfg = replace(cfg, data=replace(cfg.data, seq_len=224))
    folder = train_gate(cfg)
    loaded = models.load(cfg.model, device="cpu", dtype="auto", seed=cfg.seed)
    gate = Gate.load(folder)
    _, heldout = data.training_chunks(
        cfg.data, loaded.tokenizer, seed=cfg.seed, num_heldout=HELDOUT_CHUNKS
    )
    found = gate_recall(gate, loaded.model, [*rank_shard(heldout, HELDOUT_CHUNKS)])
    metrics = artifacts.read(folder, "gate").manifest["metrics"]
    assert metrics["recall/gate@0.5"] == pytest.approx(found["recall/gate@0.5"], rel=1e-6)
    gate.cfg = replace(gate.cfg, mean_weight=MEAN_WEIGHT)
    found = gate_recall(gate, loaded.model, [*rank_shard(heldout, HELDOUT_CHUNKS)])
    assert metrics["recall/gate@0.5"] != pytest.approx(found["recall/gate@0.5"], rel=1e-4)


def test_gates_for_blocks_of_fewer_keys_than_queries(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    cfg = run_config(
        root, "granules", gate=GateConfig(block_size=32, key_block_size=16, mean_weight=0.5)
    )
    gate = Gate.load(train_gate(replace(cfg, data=replace(cfg.data, seq_len=224))))
    duration = r"\d:\d\d"
    parts = f"4 steps {duration}, calibration {duration}, "
    assert re.search(f"train-gate takes about {duration} in all: {parts}", capsys.readouterr().err)
    assert gate.cfg.sizes == BlockSizes(32, 16)
    assert gate.thresholds is not None
    selection = Selection.from_config(SelectConfig("calibrated", scores="gate", sparsity=0.3), gate)
    model = models.load(cfg.model, device="cpu", dtype="auto", seed=cfg.seed).model
    for x in inputs_of_layers(model, random_tokens(1, 224)):
        chosen = blocks_read(selection, x)
        assert chosen.shape == (1, 4, 7, 14)
        assert 0.5 < chosen.sum() / (4 * selection.candidates(x).visible.sum()) < 1
    metrics = artifacts.read(work_folder(cfg).parents[1] / "gate", "gate").manifest["metrics"]
    assert 0 < metrics["recall/gate@0.8"] <= metrics["recall/oracle@0.8"] <= 1


def test_the_artifact_holds_trained_calibrated_gates_and_metrics(root):
    cfg = run_config(root)
    folder = train_gate(cfg)
    assert folder == root / "outputs" / "small" / "base" / "gate"
    gate = Gate.load(folder)
    manifest = artifacts.read(folder, "gate").manifest
    loaded = models.load(cfg.model, device="cpu", dtype="auto", seed=cfg.seed)
    artifacts.check_model(manifest, loaded.fingerprint)
    # 96 tokens are read whole in any case
    assert gate.cfg == replace(cfg.gate, target="mass", mean_weight=0.5)
    assert gate.thresholds is not None
    assert [len(table.layers) for table in gate.thresholds.values()] == [2, 2]
    untrained = Gate.build(loaded.model.config, cfg.gate)
    for name, weight in untrained.named_parameters():
        assert not torch.equal(weight, gate.get_parameter(name))
    for sparsity in (0.5, 0.8, 0.9):
        assert 0 < manifest["metrics"][f"recall/gate@{sparsity}"] <= 1
        assert 0 < manifest["metrics"][f"recall/oracle@{sparsity}"] <= 1
    lines = metrics_lines(work_folder(cfg))
    steps = [line for line in lines if "lr" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert steps[0]["loss"] == pytest.approx(steps[0]["layer 0"] + steps[0]["layer 1"], rel=1e-5)
    recalls = [line for line in lines if "recall/gate@0.9/layer 1" in line]
    assert [line["step"] for line in recalls] == [4]  # train.eval_every=0 evaluates at the end
    assert [path.name for path in (work_folder(cfg) / "maps").iterdir()] == ["step-000004.png"]

    with pytest.raises(UserError, match="overwrite=true"):
        train_gate(cfg)
    again = train_gate(replace(cfg, overwrite=True))
    assert artifacts.read(again).manifest["content_hash"] == manifest["content_hash"]


@pytest.mark.slow
def test_a_decode_gate_lies_beside_a_prefill_gate(root):
    """Both are trained under one name, and a second run gives the same bits, as its queries depend
    on the chunks alone.
    """
    cfg = run_config(root, "both")
    train_gate(cfg)
    decode = replace(
        cfg, gate=GateConfig(phase="decode", block_size=16, loss="kl", queries=32, recent=8)
    )
    folder = train_gate(decode)
    assert folder == root / "outputs" / "small" / "both" / "decode_gate"
    assert isinstance(msattn.load(folder.with_name("gate")), Gate)
    gate, manifest = DecodeGate.load(folder), artifacts.read(folder).manifest
    assert (manifest["kind"], manifest["details"]["gate"]["phase"]) == ("decode_gate", "decode")
    assert gate.cfg == decode.gate
    assert manifest["details"]["serving"] == {
        "probes": 16,
        "recent": 2047,
        "sink": 1,
        "dense_layers": [0],
    }
    assert gate.thresholds is not None
    assert gate.thresholds.densities == sorted(gate.thresholds.densities, reverse=True)
    for name, weight in DecodeGate.build(
        models.load(cfg.model, device="cpu").model.config, decode.gate
    ).named_parameters():
        assert not torch.equal(weight, gate.get_parameter(name))
    for sparsity in (0.5, 0.8, 0.9):
        assert (
            0
            < manifest["metrics"][f"recall/gate@{sparsity}"]
            <= manifest["metrics"][f"recall/oracle@{sparsity}"] + 0.02
        )
    assert [path.name for path in (folder.parent / "runs" / "decode_gate" / "maps").iterdir()] == [
        "step-000004.png"
    ]
    again = train_gate(replace(decode, overwrite=True))
    assert artifacts.read(again).manifest["content_hash"] == manifest["content_hash"]


def test_a_picture_that_cannot_be_written_is_left_out(root, capsys):
    cfg = run_config(root, "unseen", train=TrainConfig(lr=1e-3, steps=1))
    work_folder(cfg).mkdir(parents=True)
    (work_folder(cfg) / "maps").write_text("in the way")
    assert (train_gate(cfg) / "manifest.json").exists()
    assert "step-000001.png: File exists; the picture is left out" in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_train_the_same_gates_as_one(root):
    alone, shared = two_rank_config(root, "alone"), two_rank_config(root, "shared")
    train_gate(alone)
    lines = Job(SHARED, root, root, "shared", processes=2).output().splitlines()
    assert sum(line.startswith("step 3/4  loss") for line in lines) == 1
    assert sum("outputs/small/shared/gate" in line for line in lines) == 1

    for expected, line in zip(
        *(metrics_lines(work_folder(cfg)) for cfg in (alone, shared)), strict=True
    ):
        for key in expected.keys() & {
            "step",
            "loss",
            "layer 0",
            "layer 1",
            "grad_norm",
            "lr",
            "recall/gate@0.8/layer 1",
        }:
            assert line[key] == pytest.approx(expected[key], rel=1e-4)
    (folder, other) = (root / "outputs" / "small" / name / "gate" for name in ("alone", "shared"))
    trained, again = Gate.load(folder), Gate.load(other)
    for name, weight in trained.named_parameters():
        torch.testing.assert_close(again.get_parameter(name), weight, rtol=1e-4, atol=1e-6)
    assert trained.thresholds is not None
    assert again.thresholds is not None
    found, expected = (
        torch.tensor(
            [
                [fit or [torch.nan] * 3 for fit in layer]
                for table in tables.values()
                for layer in table.layers
            ]
        )
        for tables in (again.thresholds, trained.thresholds)
    )
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02, equal_nan=True)

    tokenizer = models.load(shared.model, device="cpu", dtype="auto", seed=shared.seed).tokenizer
    chunks = data.chunks(shared.data, tokenizer, seed=shared.seed)
    ranks = [torch.load(root / f"shared-{rank}.pt") for rank in range(2)]
    for number in range(2):  # pass over the data
        seen = torch.cat([of_rank[4 * number : 4 * number + 4] for of_rank in ranks]).tolist()
        assert sorted(seen) == sorted(chunks[i]["input_ids"].tolist() for i in range(8))


@pytest.mark.slow
def test_a_resumed_run_keeps_the_target_that_was_chosen(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = run_config(root, "target", gate=GateConfig(block_size=16, mean_weight=0.5))
    chosen = ["mean_mass"]

    def choose(gate: Gate, teacher: Any, chunks: Any) -> None:
        gate.cfg = replace(gate.cfg, target=chosen.pop())  # once

    monkeypatch.setattr("msattn.trainer.methods.gate.train.can_choose", lambda *_: True)
    monkeypatch.setattr("msattn.trainer.methods.gate.train.choose_target", choose)
    folder = train_gate(cfg)
    assert (
        Gate.load(folder).cfg.target
        == artifacts.read(folder).config["gate"]["target"]
        == "mean_mass"
    )
    cfg = replace(cfg, resume=True, overwrite=True)
    assert Gate.load(train_gate(cfg)).cfg.target == "mean_mass"
    with pytest.raises(UserError, match=r"has gate\.target=mean_mass, not mass"):
        train_gate(replace(cfg, gate=replace(cfg.gate, target="mass")))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"gate": GateConfig(phase="decode", block_size=16, recent=95)},
            r"gate\.recent=95: expected gate\.sink \+ gate\.recent below data\.seq_len=96",
        ),
        ({"gate": GateConfig(block_size=16, skip_rows=6)}, r"gate\.skip_rows=6"),
        ({"train": TrainConfig(lr=1e-3, steps=1, compile=True)}, r"train\.compile"),
    ],
)
def test_settings_that_cannot_train_are_refused(root, changes, says):
    with pytest.raises(UserError, match=says):
        run_config(root, **changes)
    # a window that leaves one key
    run_config(root, gate=GateConfig(phase="decode", block_size=16, recent=94))
