"""The paper's recipes for Llama-3.1-8B: model and lengths, and runs of them on a random toy of the
same architecture.
"""

import csv
from pathlib import Path

import pytest

from msattn.trainer import artifacts
from msattn.trainer.commands.compose import compose, with_search_path
from tests.house.modules import EXPERIMENTS
from tests.running import SHAPE, TEXTS, succeed, write_texts

RECIPES = {"saap_llama31": 131_072, "saap_llama31_500k": 500_000}
TOY = [
    "model.init=random",
    "model.architecture.vocab_size=4096",
    *SHAPE,
    "model.presets.num_buckets=4",
    "model.presets.points_per_bucket=30",
    "model.presets.kmeans_prompts=3",
    "model.presets.qmodel_prompts=3",
    "model.presets.qmodel_steps=3",
    "model.presets.qmodel_hidden=8",
    "model.presets.long_range=16",
    *TEXTS,
    "data.heldout_split=null",
    "data.seq_len=128",
    "device=cpu",
    "dtype=float32",
    "tracker=none",
]


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enters ``folder`` and writes texts for training and evaluation."""
    monkeypatch.chdir(folder)
    write_texts(300)


@pytest.mark.parametrize(("recipe", "length"), RECIPES.items())
def test_a_recipe_trains_classifiers_of_its_partition(recipe: str, length: int) -> None:
    chosen = with_search_path([f"experiment={recipe}"], EXPERIMENTS)
    partition, classifier = (compose(command, chosen) for command in ("fit-kmeans", "train-qmodel"))
    assert partition.folder == classifier.folder, "train-qmodel must find the k-means"
    for cfg in (partition, classifier):
        assert (cfg.model.path, cfg.data.seq_len) == ("meta-llama/Llama-3.1-8B", length)


PARTITIONS = [f"rope-{rope}_balance-{balance}" for rope in (False, True) for balance in (None, 1.5)]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_start")
def test_classifiers_over_keys_after_rope_and_over_balanced_buckets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partitions, classifiers and their evaluation: each classifier reads as its partition was
    made. Half of them, for time.
    """
    prepare(tmp_path, monkeypatch)
    papers = "-m", "--config-dir", str(EXPERIMENTS)
    sizes = [*TOY, "data.seq_len=256", "model.presets.recent=32", "data.needles=false"]
    measured = [
        "eval.needle.samples=1",
        "eval.needle.depths=[0.5]",
        "eval.recall.num_chunks=1",
        "eval.recall.num_queries=8",
    ]
    balanced = [name for name in PARTITIONS if "1.5" in name]
    swept = f"name={','.join(balanced)}"
    succeed("fit-kmeans", *papers, "experiment=partitions", *sizes, "kmeans.balance=1.5")
    succeed("train-qmodel", *papers, "experiment=partitions_classifiers", *sizes, swept)
    succeed(
        "eval",
        *papers,
        "experiment=partitions_eval",
        *sizes,
        *measured,
        "eval.key_shares=[0.5]",
        swept,
    )
    for name in balanced:
        partition, classifier = (
            artifacts.read(f"outputs/tiny/{name}/{kind}").manifest for kind in ("kmeans", "qmodel")
        )
        details, rope = partition["details"], "True" in name
        assert (details["rope"], details["balance"]) == (rope, 1.5)
        assert (classifier["details"]["rope"], classifier["details"]["kmeans_hash"]) == (
            rope,
            partition["content_hash"],
        )
        assert classifier["details"]["thresholds"]["shares"]
        with (Path("outputs/tiny") / name / "eval/results.csv").open() as file:
            lines = list(csv.DictReader(file))
        suffix = ", RoPE" * rope
        methods = {line["method"] for line in lines if line["setting"] == "about 50 % of keys"}
        assert methods >= {f"classifier{suffix}", f"k-means{suffix}", "Quest pages"}
        calibrated = [
            float(line["selectivity"])
            for line in lines
            if line["method"] == f"classifier{suffix}, calibrated"
        ]
        assert len(calibrated) == 4, "two shares of the keys in each task"
        assert all(0 < share < 1 for share in calibrated)
