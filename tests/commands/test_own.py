"""--model and --data: one's own model and text in one command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msattn.trainer.commands.compose import compose
from msattn.trainer.commands.own import own_overrides, sizes_for
from msattn.trainer.config import ModelPresets
from msattn.trainer.errors import UserError
from msattn.trainer.models import EMBEDDED
from tests.commands.conftest import Run
from tests.factory import embedded_tokenizer, tiny_model
from tests.running import succeed

OWN = ModelPresets(
    gate_loss="kl", gate_q_pool=["avg", "max", "min"], gate_k_pool=["avg", "max", "min"]
)


def folder(tmp_path: Path, **config: Any) -> Path:
    path = tmp_path / "My Model (v2)"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    return path


def test_a_folder_is_a_model_with_sizes_that_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path, max_position_embeddings=4096)
    cfg = compose("eval", own_overrides(str(path), None))
    assert (cfg.model.name, cfg.model.path) == ("my-model-v2-", str(path))
    assert cfg.data.seq_len == cfg.eval.perplexity.length == 4096
    presets = cfg.model.presets
    assert (presets.num_buckets, presets.probes, presets.recent, cfg.eval.needle.probes) == (
        64,
        2,
        256,
        [0, 1, 2, 4],
    )
    assert cfg.eval.latency.lengths == [1024, 2048, 4096]
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "4096 positions, so model.presets has seq_len=4096, num_buckets=64" in err
    given = ["data.seq_len=512", "model.presets.probes=1"]
    assert compose("eval", [*own_overrides(str(path), None, given), *given]).data.seq_len == 512
    err = capsys.readouterr().err
    assert "so model.presets has num_buckets=64, recent=256, long_range=256, through" in err


def test_folders_called_model_have_the_name_of_their_parent_too(tmp_path: Path) -> None:
    names = []
    for parent in ("a", "B"):
        (tmp_path / parent / "model").mkdir(parents=True)
        (tmp_path / parent / "model" / "config.json").write_text('{"model_type": "qwen3"}')
        names.append(
            compose("eval", own_overrides(str(tmp_path / parent / "model"), None)).model.name
        )
    assert names == ["a-model", "b-model"]


def test_training_on_a_cpu_is_shorter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(folder(tmp_path))

    def overrides(command: str, *given: str) -> list[str]:
        return [*own_overrides(path, None, given, command), *given]

    cfg = compose("train-gate", overrides("train-gate", "device=cpu"))
    assert (cfg.train.steps, cfg.train.batch_size, cfg.data.seq_len) == (100, 2, 2048)
    assert capsys.readouterr().err == (
        "msattn: on a CPU, so model.presets has seq_len=2048 instead of 65536, recent=128 instead "
        "of 2047, gate_steps=100 instead of 500, gate_batch=2 instead of 16\n"
    )
    cfg = compose("train-gate", overrides("train-gate", "device=cpu", "train.steps=7"))
    assert (cfg.train.steps, cfg.train.batch_size) == (7, 2)
    cfg = compose("train-qmodel", overrides("train-qmodel", "device=cpu"))
    assert (cfg.train.steps, cfg.train.lr, cfg.qmodel.hidden) == (1500, 1e-3, 512)
    assert (cfg.data.seq_len, cfg.qmodel.long_range, cfg.model.presets.probes) == (2048, 128, 1)
    cfg = compose("fit-kmeans", overrides("fit-kmeans", "device=cpu"))
    assert (cfg.kmeans.num_prompts, cfg.kmeans.points_per_bucket) == (8, 256)
    assert (cfg.data.seq_len, cfg.kmeans.num_buckets) == (2048, 32)
    capsys.readouterr()
    cfg = compose("eval", overrides("eval", "device=cpu"))
    assert cfg.eval.perplexity.length == 2048
    assert cfg.model.presets == replace(OWN, seq_len=2048)
    assert capsys.readouterr().err == (
        "msattn: on a CPU, so model.presets has seq_len=2048 instead of 65536\n"
    )
    assert compose("train-gate", overrides("train-gate", "device=cuda")).train.batch_size == 16
    cfg = compose("fit-kmeans", overrides("fit-kmeans", "device=cpu", "data.seq_len=8192"))
    assert (cfg.data.seq_len, cfg.kmeans.num_buckets) == (8192, OWN.num_buckets)


def test_chunks_on_a_cpu_are_at_most_as_long_as_the_positions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path, max_position_embeddings=1024)
    overrides = own_overrides(str(path), None, ["device=cpu"], "train-gate")
    assert compose("train-gate", overrides).data.seq_len == 1024
    assert "on a CPU, so model.presets has gate_steps=100" in capsys.readouterr().err
    (path / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 32768}')
    overrides = own_overrides(str(path), None, ["device=cpu"], "train-gate")
    assert compose("train-gate", overrides).data.seq_len == 2048
    reduced = "on a CPU, so model.presets has seq_len=2048 instead of 32768, recent=128 instead of"
    assert reduced in capsys.readouterr().err


@pytest.mark.parametrize("way", ["--model", "model="])
def test_named_models_have_smaller_presets_on_a_cpu(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def overrides(command: str, model: str, *given: str) -> list[str]:
        given = (
            (*given, "device=cpu") if way == "--model" else (f"model={model}", *given, "device=cpu")
        )
        return [*own_overrides(model if way == "--model" else None, None, given, command), *given]

    cfg = compose("train-qmodel", overrides("train-qmodel", "smollm2"))
    assert (cfg.qmodel.num_prompts, cfg.train.steps, cfg.train.lr, cfg.qmodel.hidden) == (
        24,
        1500,
        1e-3,
        512,
    )
    reduced = (
        "seq_len=2048 instead of 8192, probes=1 instead of 4, recent=128 instead of 512, "
        "long_range=128 instead of 512, qmodel_prompts=24 instead of 96, "
        "qmodel_steps=1500 instead of 8000"
    )
    assert capsys.readouterr().err == f"msattn: on a CPU, so model.presets has {reduced}\n"
    given = ("model.presets.kmeans_prompts=9", "data.seq_len=8192")
    cfg = compose("fit-kmeans", overrides("fit-kmeans", "smollm2", *given))
    assert (cfg.kmeans.num_prompts, cfg.kmeans.points_per_bucket) == (9, 256)
    assert (
        capsys.readouterr().err
        == "msattn: on a CPU, so model.presets has points_per_bucket=256 instead of all\n"
    )
    for model, *given in (
        ["tiny"],
        ["llama3", "experiment=demo"],
        ["smollm2", "train.steps=9", "train.batch_size=1", "data.seq_len=512"],
    ):
        cfg = compose("train-gate", overrides("train-gate", model, *given))
        assert cfg.model.presets == compose("train-gate", [f"model={model}", *given]).model.presets
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("config", [{"max_position_embeddings": 131072}, {}])
def test_long_models_keep_the_defaults(
    tmp_path: Path, config: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = compose("train-gate", own_overrides(str(folder(tmp_path, **config)), None))
    assert cfg.model.presets == OWN
    assert (cfg.gate.loss, cfg.gate.q_pool, cfg.gate.k_pool) == (
        "kl",
        OWN.gate_q_pool,
        OWN.gate_k_pool,
    )
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("positions", [1, 63, 64, 128, 1000, 2048, 40960, 65535])
def test_sizes_are_possible_for_every_number_of_positions(positions: int) -> None:
    sizes = sizes_for(positions)
    assert 0 <= max(sizes["eval_probes"]) <= sizes["num_buckets"]
    assert 1 <= sizes["probes"] < sizes["num_buckets"]
    assert sizes["recent"] + 1 <= max(positions, 2)
    assert all(length <= positions for length in sizes["latency_lengths"])


def test_packaged_models_and_the_embedded_one() -> None:
    assert own_overrides("llama3", None) == ["model=llama3"]
    assert own_overrides(None, None) == []
    assert compose("train-gate", own_overrides(str(EMBEDDED), None)).data.seq_len == 4096


def test_data_is_a_file_a_folder_or_a_glob(tmp_path: Path) -> None:
    (tmp_path / "it's, a=b.md").write_text("text")
    for path in (tmp_path, tmp_path / "it's, a=b.md", tmp_path / "*.md"):
        cfg = compose("train-gate", own_overrides(None, str(path)))
        assert (cfg.data.source, cfg.data.path) == ("text", str(path))


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (
            "./none",
            None,
            "--model ./none: no such folder or file; expected a folder, a GGUF file, a Hub id, or "
            "one of gemma",
        ),
        (".", None, "--model .: the folder has no config.json"),
        ("file", None, "--model file: this is a file; expected the folder of a model"),
        ("tiny", None, "--model tiny and model=llama3: give one of the two"),
        (None, "none.txt", "--data=none.txt: no such file"),
        (None, ".", r"--data=.: no such file, or no .txt, .md, .jsonl, .parquet"),
    ],
)
def test_mistakes_are_named(model: str | None, data: str | None, message: str, here: Path) -> None:
    (here / "file").touch()
    with pytest.raises(UserError, match=message):
        own_overrides(model, data, ["train.steps=3", "model=llama3"] if model == "tiny" else [])


@pytest.mark.slow
def test_a_gate_of_ones_own_model_and_text(here: Path, msattn: Run) -> None:
    tiny_model("qwen3", vocab_size=4096).save_pretrained("q3")
    embedded_tokenizer().save_pretrained("q3")
    Path("notes.md").write_text(
        "\n".join(f"Note {i}: the answer to {i} is {i * i}." for i in range(2000))
    )
    words = [
        "--model",
        "q3",
        "--data",
        "notes.md",
        "gate.block_size=16",
        "train.steps=2",
        "train.batch_size=1",
        "tracker=none",
    ]
    succeed("train-gate", *words, "device=cpu")
    assert (here / "outputs/q3/base/gate/manifest.json").is_file()
    succeed(
        "generate",
        "--model",
        "q3",
        "--prompt",
        "Note 7: the answer",
        "max_new_tokens=3",
        "device=cpu",
    )
    code, _, err = msattn(
        "generate", "--model", "q3", "name=none", "--prompt", "Note", "device=cpu"
    )
    assert (
        code,
        "msattn train-gate --model q3 --data FILE name=none, or add select=quest" in err,
    ) == (
        2,
        True,
    ), err
