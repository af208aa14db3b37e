"""The paper's recipes for Llama-3.1-8B: their settings, and runs of them on a random toy of the same architecture."""

from pathlib import Path

import pytest

from msattn import cli
from msattn.trainer import artifacts
from msattn.trainer.commands.compose import compose

RECIPES = {"saap_llama31": 131_072, "saap_llama31_500k": 500_000}
TOY = [
    "model.init=random",
    "model.architecture.hidden_size=32",
    "model.architecture.intermediate_size=32",
    "model.architecture.num_hidden_layers=2",
    "model.architecture.num_attention_heads=4",
    "model.architecture.num_key_value_heads=2",
    "model.architecture.head_dim=8",
    "model.presets.num_buckets=4",
    "model.presets.points_per_bucket=30",
    "model.presets.kmeans_prompts=3",
    "model.presets.qmodel_prompts=3",
    "model.presets.qmodel_steps=3",
    "model.presets.qmodel_hidden=8",
    "model.presets.long_range=16",
    "data=text",
    "data.path=text.txt",
    "data.heldout_path=heldout.txt",
    "data.heldout_split=null",
    "data.seq_len=128",
    "device=cpu",
    "dtype=float32",
    "tracker=none",
]


@pytest.mark.parametrize(("recipe", "length"), RECIPES.items())
def test_a_recipe_has_the_settings_of_the_paper(recipe: str, length: int) -> None:
    partition, classifier = (compose(command, [f"experiment={recipe}"]) for command in ("fit-kmeans", "train-qmodel"))
    assert partition.folder == classifier.folder, "train-qmodel must find the k-means"
    for cfg in (partition, classifier):
        assert (cfg.model.path, cfg.data.seq_len, cfg.data.num_chunks) == ("meta-llama/Llama-3.1-8B", length, 40)
    kmeans, qmodel, train = partition.kmeans, classifier.qmodel, classifier.train
    assert (kmeans.num_buckets, kmeans.iterations, kmeans.num_prompts, kmeans.points_per_bucket) == (1024, 10, 40, 256)
    assert (qmodel.source, qmodel.num_prompts, qmodel.batch_queries, qmodel.hidden) == ("online", 40, 1000, 1024)
    assert (qmodel.heads, qmodel.long_range, qmodel.causal, qmodel.min_distance) == ("kv", 1024, False, None)
    assert (train.lr, train.steps, train.schedule, train.batch_size) == (1e-5, 40_000, "constant", 1)
    presets = compose("eval", [f"experiment={recipe}"]).model.presets
    assert (presets.probes, presets.recent) == (32, 2047)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["saap_llama31", "saap_llama31_500k"])
def test_a_recipe_runs_on_a_toy_model(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("\n".join(f"def function_{i}(x):\n    return x + {i}" for i in range(300)))
    Path("heldout.txt").write_text("\n".join(f"def method_{i}(y):\n    return y - {i}" for i in range(300)))
    for command in ("fit-kmeans", "train-qmodel"):
        with pytest.raises(SystemExit) as caught:
            cli.main([command, f"experiment={recipe}", *TOY])
        assert not caught.value.code
    (name,) = Path("outputs/llama3").iterdir()
    partition, classifier = (artifacts.read(name / kind).manifest for kind in ("kmeans", "qmodel"))
    assert partition["details"]["stats"][0][0]["points"] == 4 * 30
    assert classifier["details"]["source"] == "online"
    assert classifier["details"]["kmeans_hash"] == partition["content_hash"]
