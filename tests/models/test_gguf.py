"""Models in GGUF files: equal to the model that was written; folders, damage, packed weights."""

import shutil
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.gguf_reader import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

import msattn
from msattn.trainer.commands.doctor_model import doctor_model
from msattn.trainer.config import ModelConfig
from msattn.trainer.errors import UserError
from msattn.trainer.models import fingerprint, load
from msattn.trainer.models.gguf import gguf_config, gguf_header
from tests.factory import random_tokens, tiny_architecture
from tests.models.gguf_files import LLAMA3, SIZE, gguf_model, write_gguf
from tests.running import exit_code, succeed
from tests.sparse import gate_for, save


def load_gguf(path: Path | str, **options: Any) -> Any:
    return load(ModelConfig(name="small", path=str(path), **options), device="cpu", dtype="float32")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A GGUF file of a Llama."""
    return write_gguf(tmp_path / "small.gguf", gguf_model())


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {}),
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_file_is_the_model_that_was_written(name: str, tmp_path: Path) -> None:
    family, overrides = MODELS[name]
    model, ids = gguf_model(family, **overrides), random_tokens(1, 90, vocab_size=SIZE)
    loaded = load_gguf(write_gguf(tmp_path / "small-F32.gguf", model))
    assert torch.allclose(loaded.model(ids).logits, model(ids).logits, atol=1e-4)
    expected = fingerprint(model, loaded.tokenizer, id="small-F32.gguf")
    rope = {
        key: pytest.approx(value) if isinstance(value, float) else value
        for key, value in expected["rope"].items()
    }
    assert loaded.fingerprint == expected | {"rope": rope}
    assert loaded.model.generation_config.eos_token_id == 262
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())


@torch.no_grad()
def test_a_model_of_transformers_loader_takes_the_artifacts_of_a_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "small-q8_0.gguf", gguf_model(), "Q8_0")
    model = load_gguf(file).model
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    ).eval()
    gate, ids = save(tmp_path, model, gate_for(model)), random_tokens(1, 80, vocab_size=SIZE)
    answers = []
    for each in (model, theirs):
        with (
            warnings.catch_warnings(),
            msattn.attach(each, gate=gate, sparsity=0.5, dense_below=0, strict=True),
        ):
            warnings.simplefilter("error")
            answers.append(each.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None))
    assert torch.equal(*answers)


def test_the_tokenizer_matches_special_tokens_digits_and_blank_lines(
    file: Path, tmp_path: Path
) -> None:
    tokenizer = load_gguf(file).tokenizer
    assert (
        tokenizer.tokenize("<|start|>in the\n\n  12<|end|>")
        == [*("<|start|>", "<|start|>", "i", "n", "Ġthe"), *("ĊĊ", "ĠĠ", "1", "2", "<|end|>")][1:]
    )
    assert tokenizer.tokenize("zoo") == ["z", "o", "o"]
    assert len(tokenizer) == SIZE, "transformers' own <|endoftext|> is not added"
    text = "Two cafés, 東京: 10\n"
    assert tokenizer(text).input_ids[0] == tokenizer.bos_token_id == 261
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert tokenizer.eos_token == "<|end|>"
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        == "<|start|>hi<|end|>"
    )
    tokenizer.save_pretrained(tmp_path)
    saved: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert saved(text).input_ids == tokenizer(text).input_ids


def test_the_tokenizer_of_llama_3_knows_whole_words(tmp_path: Path) -> None:
    tokenizer = load_gguf(
        write_gguf(tmp_path / "small.gguf", gguf_model(), tokenizer__ggml__pre="llama-bpe")
    ).tokenizer
    assert tokenizer.tokenize("zoo") == ["zoo"]


def test_a_folder_with_one_file_and_no_other_weights(file: Path) -> None:
    assert load_gguf(file.parent).fingerprint["id"] == "small.gguf"
    shutil.copy(file, file.parent / "other.gguf")
    with pytest.raises(
        UserError, match=r"several GGUF files: other\.gguf, small\.gguf; give the path of one"
    ):
        load_gguf(file.parent)
    load_gguf(file.parent / "other.gguf").model.save_pretrained(file.parent)
    load_gguf(file).tokenizer.save_pretrained(file.parent)
    assert load_gguf(file.parent).fingerprint["id"] == "small", (
        "the folder's own weights come first"
    )


def test_random_weights_take_the_tokenizer_of_a_file(file: Path) -> None:
    loaded = load_gguf(file, init="random", architecture=tiny_architecture(vocab_size=SIZE))
    assert loaded.tokenizer.eos_token == "<|end|>"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"general__architecture": "mamba"},
            "general.architecture=mamba: expected in GGUF files: llama, qwen2, qwen3",
        ),
        (
            {"llama__rope__scaling__type": "yarn"},
            "rope.scaling.type=yarn: expected none or linear in GGUF files",
        ),
        (
            {"llama__rope__dimension_count": 8},
            r"llama\.rope\.dimension_count=8: expected 16, the channels of a head",
        ),
        ({"llama__attention__causal": False}, "llama.attention.causal=false: expected true"),
        (
            {"llama__attention__head_count": 3},
            "its metadata: The hidden size .64. is not a multiple of the number of .* heads",
        ),
        ({"llama__block_count": 3}, r"no weights for model\.layers\.2\."),
        (
            {"llama__block_count": 1},
            r"by its metadata the model has no blk\.1\.attn_k\.weight, .*, which the file has",
        ),
        (
            {"llama__feed_forward_length": 64},
            "has the shape .64, 96., by its configuration it is .64, 64.",
        ),
        ({"llama__embedding_length": 2**19}, "weights by its configuration, at most"),
        ({"tokenizer__ggml__model": "rwkv"}, "tokenizer.ggml.model=rwkv: expected gpt2 or llama"),
        *(
            (
                {f"tokenizer__ggml__{kind}_token_id": token},
                rf"tokenizer\.ggml\.{kind}_token_id={token}: expected 0 to {SIZE - 1}",
            )
            for kind, token in (("bos", -1), ("eos", -1), ("unknown", -2), ("padding", 2**32 - 1))
        ),
        ({"split__count": 3}, "one of 3 parts: join them with llama-gguf-split --merge"),
    ],
)
def test_models_that_are_not_supported_are_refused(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "other.gguf", gguf_model(), **metadata)
    with pytest.raises(UserError, match=message) as error:
        load_gguf(file)
    assert str(error.value).count("\n") == 0
    assert str(error.value).startswith("model.path=")


def test_damaged_files_are_refused(file: Path) -> None:
    whole = file.read_bytes()
    start = whole.index(b"blk.0.attn_norm.weight") + len(b"blk.0.attn_norm.weight")
    # before their number
    tokens = whole.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    damages = [
        b"",
        b"This is a text.\n" * 9,
        whole[:4] + b"\1" + whole[5:],  # the version
        whole[: len(whole) // 400],
        whole[:-100],  # the end of the last tensor
        whole[:start] + b"\xff" + whole[start + 1 :],  # a number of dimensions
        whole[:16] + b"\xff" * 8 + whole[24:],  # the number of entries
        whole[:24] + b"\xf0" + b"\xff" * 7 + whole[32:],  # the length of a key
        whole[:tokens] + b"\xff" * 8 + whole[tokens + 8 :],  # the number of tokens
    ]
    for content in damages:
        file.write_bytes(content)
        with pytest.raises(
            UserError, match=r"^model.path=\S+small.gguf: damaged, cut off, or no GGUF file \(.+\)$"
        ):
            load_gguf(file)
    for place in range(8, start, 2003):  # any byte of the header
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with suppress(UserError):
            load_gguf(file)


@pytest.mark.parametrize("name", MODELS)
def test_the_configuration_is_read_from_the_header_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's package reads a vocabulary in Python, which took ``msattn doctor`` half a
    minute.
    """
    family, overrides = MODELS[name]
    file = write_gguf(tmp_path / "small.gguf", gguf_model(family, **overrides), "Q5_0")
    expected, _ = PreTrainedConfig.get_config_dict(tmp_path, gguf_file=file.name)
    with monkeypatch.context() as patched:
        patched.delattr("gguf.gguf_reader.GGUFReader.__init__")
        found = gguf_config(file, "file")
        assert dict(doctor_model(str(file)))["context"] == "256 tokens"
    expected["eos_token_id"] = [expected["eos_token_id"]]
    equal = {key: value for key, value in expected.items() if key in found and key != "model_type"}
    assert found | equal == found
    assert len(equal) >= 11
    begin, end = gguf_header(file, "file").places["blk.0.attn_q.weight"]
    (tensor,) = (
        tensor for tensor in GGUFReader(file).tensors if tensor.name == "blk.0.attn_q.weight"
    )
    assert (begin, end) == (tensor.data_offset, tensor.data_offset + tensor.n_bytes)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_file_is_unpacked_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    family, overrides = MODELS[name]
    file = write_gguf(tmp_path / "small.gguf", gguf_model(family, **overrides), "Q5_0")
    first = load_gguf(file, cache=str(tmp_path / "kept"))
    (folder,) = (tmp_path / "kept").glob("[!.]*")
    assert f"the unpacked model is kept in {folder} (0.00 GB)" in (said := capsys.readouterr().err)
    assert f"rm -r {folder} frees the space, model.cache=null keeps none" in said
    with monkeypatch.context() as patched:
        patched.delattr("gguf.gguf_reader.GGUFReader.__init__")
        patched.delattr("msattn.trainer.models.tokenizer.gguf_tokenizer")
        second = load_gguf(file, cache=str(tmp_path / "kept"))
    assert "unpacked" not in capsys.readouterr().err
    assert second.fingerprint == first.fingerprint
    ours, theirs = second.model.state_dict(), first.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    ids = random_tokens(1, 90, vocab_size=SIZE)
    assert torch.equal(second.model(ids).logits, first.model(ids).logits)
    assert second.model.generation_config.to_dict() == first.model.generation_config.to_dict()
    assert second.model.config.name_or_path == first.model.config.name_or_path == str(file)
    text = "<|start|>in the\n\n  12<|end|> Two cafés, 東京: 10\n"
    assert second.tokenizer(text).input_ids == first.tokenizer(text).input_ids
    for key in (
        "chat_template",
        "special_tokens_map",
        "eos_token_id",
        "bos_token_id",
        "pad_token_id",
    ):
        assert getattr(second.tokenizer, key) == getattr(first.tokenizer, key)


def test_other_contents_and_types_are_unpacked_beside(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = str(tmp_path / "kept")
    load_gguf(file, cache=cache)
    assert (
        load(
            ModelConfig(name="small", path=str(file), cache=cache), device="cpu", dtype="bfloat16"
        ).model.dtype
        == torch.bfloat16
    )
    write_gguf(file, gguf_model(initializer_range=0.5))
    changed = load_gguf(file, cache=cache)
    assert len([*(tmp_path / "kept").glob("small-*")]) == 3
    assert changed.fingerprint == load_gguf(file, cache=cache).fingerprint
    capsys.readouterr()
    (tmp_path / "file").write_text("")
    assert load_gguf(file, cache=str(tmp_path / "file")).fingerprint == changed.fingerprint
    assert "warning: the unpacked model is not kept: " in capsys.readouterr().err
    (damaged,) = (
        folder for folder in (tmp_path / "kept").glob("small-*") if same_weights(folder, changed)
    )
    (damaged / "model.safetensors").write_bytes(b"")
    with pytest.raises(
        UserError, match=rf"small.gguf: unpacked in {damaged}: the files there cannot be loaded"
    ):
        load_gguf(file, cache=cache)


@pytest.mark.parametrize("left", ["model.safetensors", "config.json", None])
def test_what_an_interrupted_deletion_left_is_unpacked_again(
    file: Path, tmp_path: Path, left: str | None
) -> None:
    cache = tmp_path / "kept"
    first = load_gguf(file, cache=str(cache))
    (folder,) = cache.glob("small-*")
    for path in folder.iterdir():
        if path.name != left:
            path.unlink()
    assert load_gguf(file, cache=str(cache)).fingerprint == first.fingerprint
    assert (folder / "tokenizer.json").is_file()


def test_a_disk_that_is_full_at_the_tokenizer_is_a_warning(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise Exception("No space left on device (os error 28)")  # as Rust's tokenizers do

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full)
    assert load_gguf(file, cache=str(tmp_path / "kept")).tokenizer.eos_token is not None
    assert "warning: the unpacked model is not kept: " in capsys.readouterr().err
    assert not [*(tmp_path / "kept").glob("small-*")]


def test_the_kept_folder_is_the_model_of_the_file(file: Path, tmp_path: Path) -> None:
    """Not that of the first command, which may have extended the context."""
    scaled = ModelConfig(
        name="small",
        path=str(file),
        cache=str(tmp_path / "kept"),
        rope_scaling={"rope_type": "yarn", "factor": 4.0},
    )
    assert load(scaled, device="cpu", dtype="float32").model.config.max_position_embeddings > 256
    (folder,) = (tmp_path / "kept").glob("small-*")
    assert (
        load(
            ModelConfig(name="small", path=str(folder)), device="cpu"
        ).model.config.max_position_embeddings
        == 256
    )


def same_weights(folder: Path, loaded: Any) -> bool:
    return torch.equal(
        AutoModelForCausalLM.from_pretrained(folder).lm_head.weight, loaded.model.lm_head.weight
    )


def test_a_missing_package_names_the_extra(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        UserError, match=r"the package gguf, .*, is not installed; pip install 'msattn\[gguf\]'"
    ):
        load_gguf(file)


def test_commands_take_a_file(
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    quick_start: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    own = ["--model", "small.gguf", "device=cpu"]
    succeed(
        "generate", *own, "select=quest", "--prompt", "the 12", "max_new_tokens=2", "chat=false"
    )
    capsys.readouterr()
    file.write_bytes(file.read_bytes()[:-1000])
    assert exit_code("generate", *own, "--prompt", "the 12", "select=quest") == 2
    assert "Traceback" not in (printed := capsys.readouterr().err)
    assert "small.gguf: damaged, cut off, or no GGUF file" in printed
