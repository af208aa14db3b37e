"""The job of msattn finetune on a small random model: the folders written, resumption, refusals,
several ranks.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from msattn.trainer import artifacts, models
from msattn.trainer.config import (
    ArtifactsConfig,
    FinetuneConfig,
    FinetuneTrainConfig,
    GateConfig,
    ModelConfig,
    SelectConfig,
)
from msattn.trainer.errors import UserError
from msattn.trainer.finetune import run as job
from msattn.trainer.finetune.run import finetune
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.training.checkpoints import newest_checkpoint
from tests.factory import tiny_architecture
from tests.jobs import GPUS, Job, LaunchedGpuJob, prepare
from tests.running import metrics_lines, succeed
from tests.training.small import small_run, write_words

YARN = {"rope_type": "yarn", "factor": 4.0}


def run_config(root: Path, name: str = "finetuned", **changes) -> FinetuneConfig:
    """Settings for two layers and chunks of 96 tokens, 32 more than the model has positions without
    YaRN.
    """
    architecture = tiny_architecture(vocab_size=4096, max_position_embeddings=64)
    settings = small_run(root, name) | {
        "model": ModelConfig(
            name="small", path="none", init="random", architecture=architecture, rope_scaling=YARN
        ),
        "select": SelectConfig(scores="gate", sparsity=0.5),
        "artifacts": ArtifactsConfig(gate=str(root / "outputs/small/base/gate")),
        "train": FinetuneTrainConfig(
            lr=1e-3,
            steps=4,
            batch_size=2,
            micro_batch_size=1,
            schedule="linear",
            log_every=1,
            save_every=2,
        ),
    }
    return FinetuneConfig(**{**settings, **changes})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with texts, and with gates of the model that training starts from."""
    folder = tmp_path_factory.mktemp("finetune")
    write_words(folder)
    new_gates(folder, "cpu", "float32", "base")
    return folder


@pytest.fixture(scope="module")
def trained(root: Path) -> Path:
    """Model folder of an uninterrupted run."""
    return finetune(run_config(root))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def served_model(cfg: FinetuneConfig, folder: Path) -> ModelConfig:
    """Settings of the same model, read from the folder of the result."""
    return replace(cfg.model, path=str(folder), init="pretrained", rope_scaling=None)


@pytest.mark.slow
def test_the_result_loads_in_transformers(root: Path, trained: Path) -> None:
    cfg = run_config(root)
    assert trained == root / "outputs/small/finetuned/model"
    model = AutoModelForCausalLM.from_pretrained(trained)
    assert model.config.rope_parameters == {
        **YARN,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
    }
    assert model.config.max_position_embeddings == 256
    start = models.load(cfg.model, device="cpu", dtype="float32", seed=cfg.seed).model
    for name, weight in start.named_parameters():
        assert not torch.equal(weight, model.get_parameter(name)), name

    facts = json.loads((trained / "training.json").read_text())
    assert facts["from"]["id"] == "small (random weights, seed 3)"
    assert facts["config"]["select"]["sparsity"] == 0.5
    assert facts["metrics"]["steps"] == 4
    steps = [line for line in metrics_lines(trained.parent / "runs/finetune") if "lr" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    gates = steps[0]["layer 0"] + steps[0]["layer 1"]
    assert steps[0]["loss"] == pytest.approx(steps[0]["language"] + gates, rel=1e-5)
    assert steps[-1]["language"] < steps[0]["language"]


@pytest.mark.slow
def test_the_gates_written_are_those_of_the_trained_model(root: Path, trained: Path) -> None:
    cfg = run_config(root)
    gate, before = Gate.load(trained.with_name("gate")), Gate.load(str(cfg.artifacts.gate))
    assert gate.artifact is not None
    artifacts.check_model(
        gate.artifact.manifest, models.load(served_model(cfg, trained), device="cpu").fingerprint
    )
    assert gate.thresholds is not None
    assert not torch.equal(
        gate.state_dict()["layers.0.key_weight"], before.state_dict()["layers.0.key_weight"]
    )
    assert 0 < gate.artifact.manifest["metrics"]["recall/gate@0.5"] <= 1
    for name, weight in before.named_parameters():
        assert not torch.equal(weight, gate.get_parameter(name)), name
    first = models.load(cfg.model, device="cpu", dtype="float32", seed=cfg.seed)
    with pytest.raises(UserError, match="weights_hash"):
        artifacts.check_model(gate.artifact.manifest, first.fingerprint)


@pytest.mark.slow
def test_eval_reads_the_model_and_its_gates(
    root: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    common = [
        "tracker=none",
        "device=cpu",
        "data=text",
        "data.path=train.txt",
        "data.heldout_path=heldout.txt",
    ]
    sizes = ["data.seq_len=96", "eval=perplexity", "eval.baselines=[]", "eval.perplexity.length=96"]
    sizes += ["eval.perplexity.num_chunks=2", "eval.perplexity.sparsities=[0.5]"]
    succeed("eval", "model.name=small", f"model.path={trained}", "name=finetuned", *common, *sizes)
    results = (root / "outputs/small/finetuned/eval").iterdir()
    (rows,) = (json.loads(path.read_text()) for path in results if path.name == "results.json")
    assert {"dense", "gate"} <= {row["method"] for row in rows["rows"]}


@pytest.mark.slow
def test_training_from_random_weights_needs_no_gates(root: Path) -> None:
    cfg = run_config(
        root,
        "scratch",
        select=SelectConfig(sparsity=0.0),
        tasks=0.5,
        data=replace(run_config(root).data, seq_len=256),
        train=FinetuneTrainConfig(
            lr=1e-2,
            steps=6,
            batch_size=2,
            micro_batch_size=2,
            save_every=6,
            activation_checkpointing=False,
        ),
    )
    # model.path may name the folder of the result if model.init=random.
    folder = finetune(
        replace(cfg, model=replace(cfg.model, path=str(root / "outputs/small/scratch/model")))
    )
    assert not folder.with_name("gate").exists()
    facts = json.loads((folder / "training.json").read_text())
    assert facts["metrics"]["loss"] == facts["metrics"]["language"]
    loaded = models.load(served_model(cfg, folder), device="cpu")
    chunks = job.data.chunks(
        cfg.data, loaded.tokenizer, seed=cfg.seed, heldout=True, num_chunks=job.HELDOUT_CHUNKS
    )
    ids = torch.stack([chunks[i]["input_ids"] for i in range(len(chunks))])
    loss = loaded.model(input_ids=ids, labels=ids).loss
    assert facts["metrics"]["heldout/loss"] == pytest.approx(loss.item(), rel=1e-5)


def new_gates(root: Path, device: str, dtype: str, name: str = "other") -> Path:
    """Writes untrained gates of the random model; its weights depend on device and dtype."""
    cfg = run_config(root)
    loaded = models.load(cfg.model, device=device, dtype=dtype, seed=cfg.seed)
    gate = Gate.build(loaded.model.config, GateConfig(block_size=16))
    shared: dict[str, Any] = {"config": {}, "data": "", "seed": 0, "metrics": {}, "overwrite": True}
    return artifacts.write(
        root / f"outputs/small/{name}/gate",
        kind="gate",
        tensors=gate.state_dict(),
        model=loaded.fingerprint,
        details=gate.details(),
        **shared,
    )


def test_an_existing_result_is_kept(root: Path) -> None:
    facts = root / "outputs/small/earlier/model" / job.FACTS
    facts.parent.mkdir(parents=True)
    facts.touch()
    with pytest.raises(
        UserError, match=r"earlier/model: an artifact already exists; overwrite=true"
    ):
        finetune(run_config(root, "earlier"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda cfg: replace(cfg, artifacts=ArtifactsConfig(gate="nowhere")),
            r"artifacts.gate: .*nowhere: no such folder; msattn train-gate --model none .*trains "
            r"gates",
        ),
        (
            lambda cfg: replace(cfg, seed=4),
            "gate artifact made for small .random weights, seed 3.: its weights_hash",
        ),
        (
            lambda cfg: replace(cfg, train=replace(cfg.train, fsdp=True)),
            "train.fsdp=true: accelerate shards weights on GPUs only",
        ),
        (
            lambda cfg: replace(cfg, name="base", overwrite=True),
            "artifacts.gate=.*base/gate: the result would overwrite it",
        ),
        (lambda cfg: replace(cfg, device="cuda"), "device=cuda: PyTorch sees no CUDA GPU"),
        (
            lambda cfg: replace(cfg, model=replace(cfg.model, rope_scaling=None)),
            "data.seq_len=96: the model has positions for 64 tokens; shorten it, or extend the "
            "context",
        ),
    ],
)
def test_jobs_are_refused_before_training(
    root: Path, change: Callable[[FinetuneConfig], FinetuneConfig], says: str
) -> None:
    cfg = change(run_config(root, "refused"))
    if cfg.device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UserError, match=says):
        finetune(cfg)
    assert not (root / "outputs/small" / cfg.name / "model").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "float16"}, "dtype=float16: expected auto, bfloat16 or float32"),
        ({"gate_weight": -1.0}, r"gate_weight=-1.0: expected a number in \[0, 1e6\]"),
        ({"tasks": 1.5}, r"tasks=1.5: expected a number in \[0, 1\]"),
        ({"tasks": 0.5}, "data.seq_len=96: expected 256 tokens or more with tasks=0.5"),
        ({"artifacts": ArtifactsConfig()}, "artifacts.gate=None: gates are needed"),
        ({"select": SelectConfig()}, "select.scores=gate_question: finetune trains with gate"),
        (
            {"select": SelectConfig(policy="nucleus", scores="gate")},
            "select.policy=nucleus: finetune trains with topk or multiscale",
        ),
        (
            {"train": FinetuneTrainConfig(lr=1.0, steps=1, compile=True)},
            "train.compile=True: only plain training",
        ),
    ],
)
def test_settings_are_refused_by_the_schema(root: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        run_config(root, **changes)


def test_fsdp_needs_several_ranks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = run_config(root, train=FinetuneTrainConfig(lr=1.0, steps=1, fsdp=True))
    with pytest.raises(
        UserError, match=r"train.fsdp=true: .* there is only one; torchrun --nproc-per-node"
    ):
        job._check_fsdp(cfg, torch.device("cuda"))
    monkeypatch.setenv("WORLD_SIZE", "4")
    job._check_fsdp(cfg, torch.device("cuda"))


JOB = """
import sys
from dataclasses import replace
from pathlib import Path
from tests.finetune.test_finetune import ArtifactsConfig, run_config
from msattn.trainer.finetune.run import finetune
root, name, device, gate, fsdp, resume = sys.argv[1:]
cfg = run_config(Path(root), name, device=device, dtype="float32", artifacts=ArtifactsConfig(gate))
cfg = replace(cfg, train=replace(cfg.train, batch_size=4, fsdp=fsdp == "fsdp"),
    resume=resume == "resume")
finetune(cfg)
"""


def assert_near(one: Path, other: Path) -> None:
    """Compares two runs that sum the same gradients in another order."""
    for kind in ("model", "gate"):
        for name, weight in weights(one / kind).items():
            torch.testing.assert_close(weights(other / kind)[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_two_ranks_train_the_same_model_as_one(root: Path, trained: Path, tmp_path: Path) -> None:
    prepare()
    gate, runs = str(run_config(root).artifacts.gate), root / "outputs/small"
    cfg = run_config(root, "one", dtype="float32")
    finetune(replace(cfg, train=replace(cfg.train, batch_size=4)))
    Job(JOB, tmp_path, root, "two", "cpu", gate, "whole", "new", processes=2).output()
    assert_near(runs / "one", runs / "two")
    assert not equal(weights(runs / "one/model"), weights(trained))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_fsdp_trains_the_same_model_as_one_gpu(root: Path, tmp_path: Path) -> None:
    gate, runs = str(new_gates(root, "cuda", "float32")), root / "outputs/small"
    LaunchedGpuJob(JOB, tmp_path, root, "gpu-one", "cuda", gate, "whole", "new").output()
    LaunchedGpuJob(
        JOB, tmp_path, root, "gpus", "cuda", gate, "fsdp", "new", processes=GPUS
    ).output()
    assert_near(runs / "gpu-one", runs / "gpus")
    killed = LaunchedGpuJob(
        JOB, tmp_path, root, "gpus-again", "cuda", gate, "fsdp", "new", processes=GPUS
    )
    checkpoints = runs / "gpus-again/runs/finetune/checkpoints"
    killed.wait_for(lambda: newest_checkpoint(checkpoints))
    killed.kill()
    if (last := checkpoints / "checkpoint-4").exists():  # the kill came late
        shutil.rmtree(last)
    LaunchedGpuJob(
        JOB, tmp_path, root, "gpus-again", "cuda", gate, "fsdp", "resume", processes=GPUS
    ).output()
    for kind in ("model", "gate"):
        assert equal(weights(runs / "gpus-again" / kind), weights(runs / "gpus" / kind))


@pytest.mark.gpu
@pytest.mark.parametrize("sparsity", [0.5, 0.0])
def test_the_loss_falls_on_a_gpu(root: Path, sparsity: float) -> None:
    train = FinetuneTrainConfig(lr=1e-3, steps=8, batch_size=2, log_every=1, compile=sparsity == 0)
    gates = ArtifactsConfig(str(new_gates(root, "cuda", "bfloat16")))
    cfg = run_config(
        root,
        f"gpu-{sparsity}",
        device="cuda",
        dtype="auto",
        select=SelectConfig(scores="gate", sparsity=sparsity),
        artifacts=gates,
        train=train,
    )
    folder = finetune(cfg)
    assert {weight.dtype for weight in weights(folder).values()} == {torch.bfloat16}
    losses = [
        line["language"] for line in metrics_lines(folder.parent / "runs/finetune") if "lr" in line
    ]
    assert losses[-1] < losses[0]
