"""The whole line on small random models of the families that differ most: train-gate, fit-kmeans,
train-qmodel, eval.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import msattn
from msattn.trainer.models import EMBEDDED
from msattn.trainer.models.families import served_layers
from tests.factory import random_tokens, tiny_model
from tests.running import succeed

WORDS = [
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
COMMON = ["--data", "text", "device=cpu", "tracker=none", "dtype=float32", "data.seq_len=192"]
SMALL = ["gate.block_size=16", "train.steps=2", "train.batch_size=1"]
EVAL = [
    "eval.tasks=[perplexity,recall]",
    "eval.perplexity={length: 160, num_chunks: 1, sparsities: [0.0, 0.5]}",
    "eval.recall={length: 160, num_chunks: 1, num_queries: 8, sparsities: [0.0, 0.5], probes: [2]}",
    "eval.baselines=[quest]",
    "select.block_size=16",
]


@pytest.fixture
def model(family: str, here: Path) -> Any:
    """A model in the folder ``mine``, beside a folder ``text``."""
    model = tiny_model(family, vocab_size=4096, eos_token_id=2)
    model.save_pretrained("mine")
    PreTrainedTokenizerFast.from_pretrained(EMBEDDED).save_pretrained("mine")
    Path("text").mkdir()
    Path("text/essay.txt").write_text(" ".join(WORDS[i * i % len(WORDS)] for i in range(6000)))
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["gemma3_text", "glm4", "gpt_oss", "gemma4_text", "hunyuan_v1_moe", "qwen3_next"]
)
@pytest.mark.usefixtures("quick_start")
def test_training_evaluation_and_attach(family: str, model: Any) -> None:
    served = served_layers(model.config)
    succeed("train-gate", "--model", "mine", *COMMON, *SMALL)
    succeed(
        "fit-kmeans", "--model", "mine", *COMMON, "kmeans.num_buckets=4", "kmeans.num_prompts=4"
    )
    sizes = [
        "qmodel.num_prompts=4",
        "qmodel.queries_per_prompt=16",
        "qmodel.batch_queries=8",
        "qmodel.hidden=8",
    ]
    succeed(
        "train-qmodel", "--model", "mine", *COMMON, *sizes, "train.steps=4", "qmodel.long_range=16"
    )
    succeed("eval", "--model", "mine", *COMMON, *EVAL)
    (results,) = Path("outputs").rglob("results.json")
    rows = json.loads(results.read_text())["rows"]
    dense, full = (
        next(row for row in rows if row["method"] == name) for name in ("dense", "gate_question")
    )
    assert full["score"] == pytest.approx(dense["score"], rel=1e-4)
    read = next(row for row in rows if row["task"] == "recall" and row["method"] == "gate_question")
    assert read["score"] == pytest.approx(1, abs=1e-5)
    assert read["extra"]["output_error"] < 1e-8
    assert all(
        row["extra"]["layers"] in (served, served[1:]) for row in rows if row["task"] == "recall"
    )
    gate, qmodel = msattn.load("outputs/mine/base/gate"), msattn.load("outputs/mine/base/qmodel")
    assert gate.layer_numbers == qmodel.layers == served
    ids = random_tokens(1, 120)
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    few = {"sink_blocks": 0, "local_blocks": 0}  # of 8 blocks
    with (
        msattn.attach(
            model, gate=gate, qmodel=qmodel, select=few, dense_below=0, recent=8
        ) as sparse,
        torch.no_grad(),
    ):
        model.generate(ids, **options)
        assert sparse.stats()["sparsity"] > 0.3


SPARSE = ("gpt_oss", "llama4_text", "gemma4_text", "qwen3_next")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sparse"), [*((family, True) for family in SPARSE), ("gemma3_text", False)]
)
@pytest.mark.usefixtures("quick_start")
def test_fine_tuning(family: str, sparse: bool, model: Any) -> None:
    if sparse:
        succeed("train-gate", "--model", "mine", *COMMON, *SMALL)
    tuning = [
        "train.steps=2",
        "train.batch_size=1",
        "train.micro_batch_size=1",
        "train.num_workers=0",
        "name=long",
    ]
    select = (
        ["artifacts.gate=outputs/mine/base/gate", "select.sparsity=0.5"]
        if sparse
        else ["select.sparsity=0"]
    )
    succeed("finetune", "--model", "mine", *COMMON, *tuning, *select)
    assert Path("outputs/mine/long/model/config.json").exists()
    assert Path("outputs/mine/long/gate").exists() == sparse
