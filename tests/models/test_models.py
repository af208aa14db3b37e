"""Tests of model loading, refused architectures and their messages, fingerprints, devices and
dtypes.
"""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from msattn.trainer.config import ModelConfig
from msattn.trainer.errors import UserError
from msattn.trainer.models.devices import resolve_device, resolve_dtype
from msattn.trainer.models.families import check_length, check_supported, max_length
from msattn.trainer.models.loading import load
from tests.factory import random_tokens, save_tokenizer, tiny_architecture, tiny_config, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model and its tokenizer, saved by ``save_pretrained``."""
    tiny_model("llama").save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    return tmp_path


def pretrained(path: Path | str, **options: Any) -> ModelConfig:
    return ModelConfig(name="tiny", path=str(path), **options)


def random_init(path: Path, **overrides: Any) -> ModelConfig:
    save_tokenizer(path)
    return ModelConfig(
        name="tiny", path=str(path), init="random", architecture=tiny_architecture(**overrides)
    )


def test_a_local_folder_loads_frozen(folder: Path) -> None:
    loaded = load(pretrained(folder), device="cpu")
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.tokenizer("t3 t5")["input_ids"] == [3, 5]
    assert loaded.fingerprint["id"] == "tiny", "artifacts may be published: no local path"
    tokens = random_tokens(1, 9)
    assert torch.equal(loaded.model(tokens).logits, tiny_model("llama")(tokens).logits)


def test_random_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    cfg = random_init(tmp_path)
    state = torch.get_rng_state()
    prints = [load(cfg, device="cpu", seed=seed).fingerprint["weights_hash"] for seed in (1, 1, 2)]
    assert prints[0] == prints[1] != prints[2]
    assert torch.equal(torch.get_rng_state(), state)


def test_fingerprint_is_the_same_in_every_dtype(folder: Path) -> None:
    prints = [
        load(pretrained(folder), device="cpu", dtype=dtype).fingerprint
        for dtype in ("float32", "bfloat16")
    ]
    assert prints[0] == prints[1]
    half = tiny_model("llama").half()
    half.save_pretrained(folder)
    prints = [
        load(pretrained(folder), dtype=d, device="cpu").fingerprint
        for d in ("float32", "float16", "bfloat16")
    ]
    assert prints[0] == prints[1] == prints[2]


def test_rope_scaling_extends_the_context(folder: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    loaded = load(pretrained(folder, rope_scaling=scaling), device="cpu")
    assert max_length(loaded.model.config) == 1024
    assert loaded.model.config.rope_parameters["original_max_position_embeddings"] == 256
    assert loaded.fingerprint["rope"]["rope_type"] == "yarn"
    for wrong, message in (
        ({"rope_type": "yarnn"}, r"model\.rope_scaling\.rope_type=yarnn: expected default, linear"),
        ({"rope_type": "linear"}, r"Missing required keys in .*factor"),
        ({"rope_type": "yarn", "factor": 0.5}, "rope_type=yarn, factor=0.5"),
        (
            {"rope_type": "yarn", "factor": "x"},
            "model.rope_scaling=.*could not convert string to float",
        ),
    ):
        with pytest.raises(UserError, match=message):
            load(pretrained(folder, rope_scaling=wrong), device="cpu")


def test_sequences_longer_than_the_positions_are_refused() -> None:
    check_length(tiny_config(), 256)
    check_length(tiny_config(rope="dynamic"), 512)
    with pytest.raises(
        UserError, match=r"data\.seq_len=257: the model has positions for 256 tokens"
    ):
        check_length(tiny_config(), 257)


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        (
            "mistral",
            {"sliding_window": 64},
            "no layer can be sparse; layer 0: it attends through a sliding window of 64",
        ),
        (
            "gemma2",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention=True: expected causal attention",
        ),
        (
            "gpt_neox",
            {},
            "model_type=gpt_neox: expected one of the decoders llama, mistral, qwen2, qwen3",
        ),
        ("deepseek_v3", {}, "multi-head latent attention"),
        (
            "gemma3_text",
            {"sliding_window": None},
            "sliding_window=None: layers of type sliding_attention need a number",
        ),
        (
            "llama",
            {"num_key_value_heads": 3},
            "num_attention_heads=4: expected a multiple of num_key_value_heads=3",
        ),
        (
            "qwen3",
            {"layer_types": ["linear_attention", "full_attention"]},
            "linear_num_key_heads=None: layers of type linear",
        ),
        ("llama", {"head_dim": 12}, "head_dim=12: expected a multiple of 8"),
        (
            "qwen3",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5: model_type=qwen3 rotates all channels; expected 1",
        ),
        ("hunyuan_v1_dense", {"head_dim": 2}, "head_dim=2: expected a multiple of 8"),
    ],
)
def test_unsupported_architectures_are_refused(
    family: str, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_supported(tiny_config(family, **overrides))


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias", "use_cache", "tie_word_embeddings"])
def test_null_flags_are_false_for_model_and_tokenizer(folder: Path, key: str) -> None:
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {key: None}))
    assert load(pretrained(folder), device="cpu").tokenizer.vocab_size == 128


def test_out_of_memory_while_loading_is_a_user_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(
        UserError,
        match=r"model=tiny: the weights in torch\.float32 do not fit into the GPU's memory",
    ):
        load(pretrained(folder), device="cpu")


def test_an_unreachable_hub_gives_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"model\.path=nobody/nothing: not a local folder, and .* Hugging Face Hub"
    ) as caught:
        load(pretrained("nobody/nothing"), device="cpu")
    assert "\n" not in str(caught.value)
    assert "model.init=random" in str(caught.value)


def test_devices_and_dtypes_resolve_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert resolve_dtype("auto", cpu) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    with pytest.raises(UserError, match=r"dtype=float8: expected auto, float32"):
        resolve_dtype("float8", cpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == cpu
    with pytest.raises(UserError, match="device=cuda: PyTorch sees no CUDA GPU"):
        resolve_device("cuda")


@pytest.mark.gpu
@pytest.mark.slow
def test_random_8b_loads_in_seconds_without_a_second_copy(tmp_path: Path) -> None:
    shape = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
    heads = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    loaded = load(random_init(tmp_path, **shape, **heads), device="cuda")
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < 30
    assert loaded.model.dtype == torch.bfloat16
    assert torch.cuda.max_memory_allocated() < 1.2 * 2 * loaded.model.num_parameters()


def test_further_chat_templates_stay_in_the_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "secret"
    outside.write_text("{{ messages }}")
    templates = folder / "additional_chat_templates"
    templates.mkdir()
    (templates / "rag.jinja").write_text("{{ messages }}")
    assert load(pretrained(folder), device="cpu").tokenizer is not None
    (templates / "tool_use.jinja").symlink_to(outside)
    with pytest.raises(
        UserError,
        match=r"additional_chat_templates/tool_use\.jinja links to a file outside its folder",
    ):
        load(pretrained(folder), device="cpu")


def without_some_weights(folder: Path) -> None:
    model = tiny_model("llama")
    weights = model.state_dict()
    del weights["model.layers.1.self_attn.k_proj.weight"]
    model.save_pretrained(folder, state_dict=weights)


def with_a_high_pad_token(folder: Path) -> None:
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {"pad_token_id": 4096}))


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (shutil.rmtree, r": no such folder or GGUF file; run make models"),
    (lambda at: (at / "config.json").unlink(), r"no config\.json"),
    (lambda at: (at / "model.safetensors").unlink(), r"\(no weights: expected one of model\.safe"),
    (lambda at: (at / "tokenizer.json").unlink(), "the folder has no tokenizer"),
    (without_some_weights, r"has no weights for model\.layers\.1\.self_attn\.k_proj\.weight"),
    # the file is not printed
    (with_a_high_pad_token, r"config\.json: pad_token_id=4096 is not below vocab_size=128$"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damaged_folders_are_refused(
    folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)
    with pytest.raises(UserError, match=message):
        load(pretrained(folder, obtained_by="run make models"), device="cpu")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_sise": 3}, r"model\.architecture\.hidden_sise \(did you mean hidden_size\?\)"),
        ({"family": "bert"}, "model_type=bert"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}},
            r"model\.architecture: .*low_freq_factor",
        ),
        ({"vocab_size": 64}, "vocab_size=64: the tokenizer has 128 tokens"),
    ],
)
def test_invalid_architectures_are_refused(
    tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load(random_init(tmp_path, **overrides), device="cpu")
