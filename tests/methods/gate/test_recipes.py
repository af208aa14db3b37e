"""SeerAttention's recipes and that of multi-scale attention: their settings, and runs of them on toy models."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from msattn import cli
from msattn.trainer.commands.compose import compose
from msattn.trainer.commands.jobs import Command
from msattn.trainer.config import FinetuneConfig
from msattn.trainer.models.families import max_length
from msattn.trainer.models.loading import config_and_tokenizer
from tests.running import SHAPE, TEXTS, succeed, write_texts

CONF = Path(cli.__file__).parent / "conf"
TEXT = [*TEXTS, "device=cpu", "tracker=none"]
TOY = [*TEXT, *SHAPE, "data.seq_len=256", "dtype=float32"]
RANDOM = [*TOY, "model.init=random"]
GATES = ["train.steps=2", "train.batch_size=1"]
TUNING = [f"train.{key}" for key in ("steps=2", "batch_size=2", "micro_batch_size=1", "num_workers=0")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_texts(400)
    return tmp_path / "outputs"


def rows(folder: Path, task: str) -> dict[tuple[str, str], dict[str, Any]]:
    found = json.loads((folder / "eval/results.json").read_text())["rows"]
    return {(row["method"], row["setting"]): row for row in found if row["task"] == task}


@pytest.mark.parametrize(
    ("recipe", "path", "length"),
    [
        ("seer_llama31", "meta-llama/Llama-3.1-8B", 65536),
        ("seer_mistral7b", "mistralai/Mistral-7B-v0.3", 32768),
        ("seer_llama3_yarn_gates", "meta-llama/Meta-Llama-3-8B", 32768),
    ],
)
def test_gates_have_the_settings_of_the_paper(recipe: str, path: str, length: int) -> None:
    cfg = compose("train-gate", [f"experiment={recipe}"])
    train, gate = cfg.train, cfg.gate
    assert (cfg.model.path, cfg.data.source, cfg.data.seq_len, cfg.dtype) == (path, "hub", length, "bfloat16")
    assert (train.lr, train.schedule, train.steps, train.batch_size, train.weight_decay) == (1e-3, "cosine", 500, 16, 0.0)
    assert (gate.loss, gate.q_pool, gate.k_pool, gate.block_size) == ("mse", ["avg"], ["max", "min"], 64)
    assert cfg.data.num_chunks == train.steps * train.batch_size
    config, _ = config_and_tokenizer(compose("train-gate", [f"experiment={recipe}", "model.init=random"]).model)
    assert max_length(config) >= length


@pytest.mark.parametrize("sparsity", [0.0, 0.9])
def test_yarn_has_the_settings_of_the_paper(sparsity: float) -> None:
    cfg = compose("finetune", ["experiment=seer_llama3_yarn", f"select.sparsity={sparsity}"])
    assert isinstance(cfg, FinetuneConfig)
    gates = compose("train-gate", ["experiment=seer_llama3_yarn_gates"])
    assert (cfg.name, cfg.sparse, cfg.data.seq_len) == (f"yarn-{sparsity}", sparsity > 0, 32768)
    assert cfg.artifacts.gate == str(gates.folder / "gate")
    assert (cfg.model, cfg.data.path) == (gates.model, gates.data.path)
    assert (cfg.train.lr, cfg.train.schedule, cfg.train.batch_size, cfg.train.fsdp) == (1e-5, "linear", 8, True)
    assert cfg.data.num_chunks == cfg.train.steps * cfg.train.batch_size
    evaluated = compose("eval", ["experiment=seer_llama3_yarn_eval", f"name={cfg.name}"])
    assert (evaluated.model.path, evaluated.folder) == (str(cfg.folder / "model"), cfg.folder)
    assert (evaluated.eval.documents.lengths, evaluated.model.rope_scaling) == ([32768], None)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["seer_llama31", "seer_mistral7b"])
@pytest.mark.usefixtures("quick_start")
def test_gate_recipes_run_on_a_toy_model(recipe: str, folder: Path) -> None:
    succeed("train-gate", f"experiment={recipe}", *RANDOM, *GATES)
    (model,) = folder.glob("*/seer/gate/model.safetensors")
    assert model.is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_start")
def test_yarn_runs_on_a_toy_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gates, sparse and dense extension, gates after it, evaluation."""
    short = ["model.architecture.max_position_embeddings=64"]
    succeed("train-gate", "experiment=seer_llama3_yarn_gates", *RANDOM, *GATES, *short)
    for sparsity in (0.5, 0.0):
        given = [f"select.sparsity={sparsity}", "train.fsdp=false"]
        succeed("finetune", "experiment=seer_llama3_yarn", *RANDOM, *TUNING, *short, *given)
    dense = ["name=yarn-0.0", "model.path=outputs/llama3_8b/yarn-0.0/model", "model.rope_scaling=null"]
    succeed("train-gate", "experiment=seer_llama3_yarn_gates", *TOY, *GATES, *dense)
    measured = ["data.heldout_split=null", "eval.documents.num_documents=1", "name=yarn-0.0,yarn-0.5"]
    succeed("eval", "-m", "experiment=seer_llama3_yarn_eval", *TOY, *measured)
    printed = capsys.readouterr().out
    assert "All evaluations" in printed
    assert "All rows: outputs/llama3_8b/sweep.csv" in printed
    with (folder / "llama3_8b/sweep.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {line["name"] for line in lines} == {"yarn-0.0", "yarn-0.5"}
    assert len(lines) == 2 * (1 + 5 + 5)  # dense, gate and oracle at five sparsities
    for name in ("yarn-0.0", "yarn-0.5"):
        found = rows(folder / "llama3_8b" / name, "documents")
        assert {("dense", ""), ("gate", "sparsity 0.9"), ("oracle", "sparsity 0.5")} <= found.keys()
        assert found["dense", ""]["extra"]["length"] == 256


@pytest.fixture
def seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects the configurations of jobs instead of running them."""
    found: list[Any] = []
    monkeypatch.setattr(Command, "run", lambda self, cfg, arguments: found.append(cfg))
    return found


def swept(experiment: str) -> dict[str, str]:
    """Returns the values of each key that an experiment sweeps over."""
    document = yaml.safe_load((CONF / "experiment" / f"{experiment}.yaml").read_text())
    return document["hydra"]["sweeper"]["params"]


@pytest.mark.slow
def test_pooling_has_49_combinations_each_with_an_evaluation(seen: list[Any]) -> None:
    queries, keys = ([*yaml.safe_load(f"[{pools}]")] for pools in swept("seer_pooling").values())
    expected = [f"pool-{'-'.join(q)}_{'-'.join(k)}" for q in queries for k in keys]
    assert len({(frozenset(q), frozenset(k)) for q in queries for k in keys}) == 49
    assert swept("seer_pooling_eval")["name"].replace(" ", "").split(",") == expected

    succeed("train-gate", "-m", "experiment=seer_pooling", "gate.q_pool=[avg,max,min]", "gate.k_pool=[max],[max,min]")
    succeed("eval", "-m", "experiment=seer_pooling_eval", "name=pool-avg-max-min_max,pool-avg-max-min_max-min")
    trained, evaluated = seen[:2], seen[2:]
    assert [cfg.folder for cfg in evaluated] == [cfg.folder for cfg in trained]
    assert {(cfg.train.steps, cfg.data.seq_len) for cfg in trained} == {(500, 32768)}
    assert {(cfg.model.path, *cfg.eval.documents.lengths) for cfg in evaluated} == {("meta-llama/Llama-3.1-8B", 131072)}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_start")
def test_pooling_runs_on_a_toy_model(folder: Path) -> None:
    pools = ["gate.q_pool=[avg,min]", "gate.k_pool=[max],[min]"]
    succeed("train-gate", "-m", "experiment=seer_pooling", *RANDOM, *GATES, *pools)
    measured = ["data.heldout_split=null", "eval.documents.num_documents=1", "name=pool-avg-min_max,pool-avg-min_min"]
    succeed("eval", "-m", "experiment=seer_pooling_eval", *RANDOM, *measured)
    with (folder / "llama3/sweep.csv").open() as file:
        gates = [line for line in csv.DictReader(file) if line["method"] == "gate"]
    assert [(line["name"], line["setting"]) for line in gates] == [
        (f"pool-avg-min_{k}", f"sparsity {sparsity}") for k in ("max", "min") for sparsity in (0.5, 0.7, 0.9)
    ]


@pytest.mark.slow
def test_multiscale_trains_means_topk_and_dense_attention_at_equal_cost(seen: list[Any]) -> None:
    succeed("finetune", "-m", "experiment=multiscale")
    succeed("eval", "-m", "experiment=multiscale_eval")
    trained, evaluated = seen[:3], seen[3:]
    assert [cfg.select.shares for cfg in trained] == [[0.1, 0.1, 0.2, 0.4], [0.25, 0, 0, 0], [1, 0, 0, 0]]
    assert [cfg.model.path for cfg in evaluated] == [str(cfg.folder / "model") for cfg in trained]
    assert {cfg.select.policy for cfg in seen} == {"multiscale"}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_start")
def test_multiscale_runs_at_a_short_length(folder: Path) -> None:
    short = [*TEXT, "data.seq_len=512"]
    succeed("finetune", "experiment=multiscale", *short, *TUNING, "train.warmup_steps=1")
    measured = ["name=read-0.1-0.1-0.2-0.4", "model.presets.eval_chunks=1", "model.presets.needle_samples=1"]
    succeed("eval", "-m", "experiment=multiscale_eval", *short, *measured, "eval.needle.depths=[0.5]")
    name = folder / "tiny/read-0.1-0.1-0.2-0.4"
    for task in ("perplexity", "needle"):
        found = rows(name, task)
        assert {("dense", ""), ("gate", "shares 0.1 0.1 0.2 0.4"), ("gate", "sparsity 0.75")} <= found.keys()
