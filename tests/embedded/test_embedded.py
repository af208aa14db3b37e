"""The embedded model: files, tokenizer, training tasks, quality and recipe."""

import itertools
import json
import re
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedTokenizerFast

from msattn.trainer.config import DataConfig, ModelConfig
from msattn.trainer.data import retrieval as tasks
from msattn.trainer.data.chunking import encode
from msattn.trainer.data.sources import Document, documents
from msattn.trainer.embedded import recipe
from msattn.trainer.embedded.recipe import EMBEDDED_MODEL, Stage, StageDataset, Texts, WeightedLanguageModel, crop_from
from msattn.trainer.embedded.tokenizer import END_OF_TEXT, VOCAB_SIZE, load_tokenizer, train_tokenizer
from msattn.trainer.models.loading import Loaded, load

TOKENIZER = load_tokenizer(EMBEDDED_MODEL)
PHRASES = tasks.PhraseEncoder(TOKENIZER)
WEIGHT = 6.0
SAYING = re.compile(r" The secret number of( .+?) is (\d{5})\.")
TINY = partial(
    recipe.Plan,
    stages=(
        Stage(192, 2, 2, {"needles": 0.4, "pairs": 0.2, "copies": 0.2}, warmup_steps=1),
        Stage(256, 2, 2, {"needles": 0.4, "pairs": 0.2, "copies": 0.2}, schedule="cosine"),
    ),
    architecture={
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    log_every=1,
    eval_every=1,
)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def text_of(ids: np.ndarray) -> str:
    return str(TOKENIZER.decode(ids))


def library(count: int) -> Iterator[Document]:
    """Returns documents that the embedded model was not trained on."""
    return itertools.islice(documents(DataConfig("stdlib"), heldout=True), count)


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    return encode(library(4), TOKENIZER)


@pytest.fixture(scope="module")
def shipped() -> Loaded:
    return load(ModelConfig(name="tiny", path="embedded"), device="cpu", dtype="float32")


def test_shipped_files_are_small_and_consistent(shipped: Loaded) -> None:
    assert sum(path.stat().st_size for path in EMBEDDED_MODEL.iterdir()) <= 12 * 2**20
    weights = load_file(EMBEDDED_MODEL / "model.safetensors")
    assert all(weight.dtype == torch.float16 and weight.isfinite().all() for weight in weights.values())
    facts = json.loads((EMBEDDED_MODEL / "training.json").read_text())
    assert facts["parameters"] == shipped.model.num_parameters()
    assert facts["plan"]["architecture"]["hidden_size"] == shipped.model.config.hidden_size
    assert shipped.model.config.max_position_embeddings == max(stage["seq_len"] for stage in facts["plan"]["stages"])
    assert len(shipped.tokenizer) == shipped.model.config.vocab_size == VOCAB_SIZE


def test_shipped_model_retrieves_passkeys_and_predicts_text(shipped: Loaded, text: np.ndarray) -> None:
    model: Any = shipped.model
    prompts, answer = recipe.needle_prompts(text, 1024, TOKENIZER, samples=4, seed=3)[1]
    assert recipe.needle_accuracy(model, prompts, answer) == 1.0
    # Held-out modules of the library cost about 1 bit per byte; a broken model costs over 4.
    assert recipe.bits_per_byte(model, text[:2048], 1024, TOKENIZER) < 1.5


@pytest.mark.slow
@given(st.text())
@settings(max_examples=200, deadline=None)
def test_tokenizer_round_trips_any_text(content: str) -> None:
    ids = ids_of(content)
    assert TOKENIZER.decode(ids, clean_up_tokenization_spaces=False) == content
    assert TOKENIZER.eos_token_id not in ids or END_OF_TEXT in content


def test_digits_are_single_tokens_and_no_special_token_is_added() -> None:
    assert [TOKENIZER.decode([token]) for token in ids_of("x=20267")][-5:] == list("20267")
    assert not [token for token in TOKENIZER.get_vocab() if re.search(r"\d.*\d|\w\d|\d\w", token)]
    assert TOKENIZER("12")["input_ids"] == ids_of("12")
    assert TOKENIZER.bos_token_id == TOKENIZER.eos_token_id == TOKENIZER.convert_tokens_to_ids(END_OF_TEXT) == 0


def test_tokenizer_training_is_deterministic() -> None:
    corpus = [document.text for document in library(3)]
    first, second = (train_tokenizer(corpus, vocab_size=400) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()
    assert len(first) == 400
    sample = f"naïve 2026\t\r\n  {corpus[0][:200]}"
    assert first.decode(first.encode(sample)) == sample
    assert not [token for token in first.get_vocab() if re.search(r"\d\d", token)]


def answer_slices(weights: np.ndarray) -> list[slice]:
    """Returns a slice for each run of answer weights."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (weights > 1).astype(int), [0]])))
    return [slice(start, stop) for start, stop in edges.reshape(-1, 2).tolist()]


@pytest.mark.parametrize("number", range(20))
def test_tokens_of_a_needle_are_those_of_its_sentence(number: int) -> None:
    rng = np.random.default_rng(number)
    key, value = tasks.random_key(rng), tasks.random_value(rng)
    assert re.fullmatch(r"[1-9]\d{4}", value)
    digits = np.array(ids_of(value))
    for frame, sentence in (("needle", f" {tasks.needle(key, value)}"), ("pair", f" {key}: {value},")):
        ids, weights = PHRASES.fill(frame, np.array(ids_of(f" {key}")), digits, WEIGHT)
        assert ids.tolist() == ids_of(sentence)
        (answer,) = answer_slices(weights)
        assert text_of(ids[answer]) == f" {value}"
        assert set(weights[: answer.start]) | set(weights[answer.stop :]) == {0.0}
    assert tasks.needle(key, value) == f"{tasks.question(key)} {value}."


@given(st.integers(0, 2**32), st.integers(192, 1100), st.sampled_from(sorted(tasks.TASKS)))
@settings(max_examples=60, deadline=None)
def test_every_task_fills_its_length_and_weights_only_predictable_tokens(seed: int, length: int, task: str) -> None:
    words = np.array(ids_of(" some words that stand for text, and more of them" * 150))
    ids, weights = tasks.TASKS[task](np.random.default_rng(seed), length, crop_from(words), PHRASES, WEIGHT)
    again, _ = tasks.TASKS[task](np.random.default_rng(seed), length, crop_from(words), PHRASES, WEIGHT)
    assert ids.shape == weights.shape == (length,)
    assert np.array_equal(ids, again)
    assert 0 <= ids.min() <= ids.max() < len(TOKENIZER)
    assert set(weights) <= {0.0, 1.0, WEIGHT}
    answers = answer_slices(weights)
    assert bool(answers) == (task != "copies")
    encoded = ids.astype("<i8").tobytes()
    for answer in answers if task == "pairs" else []:
        value = ids[answer].astype("<i8").tobytes()
        assert encoded.find(value) // 8 < answer.start  # it occurs before the answer
    if task == "needles":
        values: dict[str, str] = {}
        repeats = 0
        for key, value in SAYING.findall(text_of(ids)):
            repeats += key in values
            assert values.setdefault(key, value) == value
        assert len(answers) == repeats > 0


@given(st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_copies_repeat_a_passage_and_weight_only_predictable_tokens(seed: int) -> None:
    starts = itertools.count(step=1000)

    def crop(rng: np.random.Generator, length: int) -> np.ndarray:
        return np.arange(length) + next(starts)  # tokens below 1000 are the passage's, above are text

    ids, weights = tasks.copies(np.random.default_rng(seed), 512, crop, PHRASES, WEIGHT)
    in_passage = ids < 1000
    size = len(np.unique(ids[in_passage]))
    passages, weighed = ids[in_passage].reshape(-1, size), weights[in_passage].reshape(-1, size)
    assert len(passages) in (2, 3)
    assert (passages == passages[0]).all()
    shuffled = passages[0].tolist() != list(range(size))
    assert set(weighed[0]) == ({0.0} if shuffled else {1.0})
    assert (weighed[1:] == [0.0, 0.0] + [1.0] * (size - 2)).all()
    assert set(weights[~in_passage]) == {1.0}


@given(
    st.integers(0, 2**32), st.integers(200, 700), st.sampled_from([1, 3, 8]), st.none() | st.sampled_from([0.0, 0.3, 0.5, 1.0])
)
@settings(max_examples=60, deadline=None)
def test_needle_prompts_have_the_given_length_and_depth(seed: int, length: int, count: int, depth: float | None) -> None:
    words = np.array(ids_of(" some words, that stand; for text." * 200))
    rng = np.random.default_rng(seed)
    ids, answer, _ = tasks.needle_prompt(rng, length, crop_from(words), TOKENIZER, count=count, depth=depth)
    assert ids.shape == (length,)
    whole = text_of(ids)
    key, value = re.findall(r"The secret number of (\w+ \w+) is (\d{5})$", whole)[0]
    assert text_of(ids[-answer:]) == f" {value}"
    hidden = SAYING.findall(whole)
    assert len(hidden) == len({key for key, _ in hidden}) == count
    assert dict(hidden)[f" {key}"] == value
    if depth is not None and count == 1:
        before, after = whole.split(f" {tasks.needle(key, value)}")
        first = before.count(" ")  # words before the needle, of all words of the text
        total = first + after.removesuffix(f" {tasks.question(key)} {value}").count(" ")
        assert first == round(depth * (total - 1))


def test_prompt_too_short_for_its_needles_is_an_error() -> None:
    crop = crop_from(np.array(ids_of(" word" * 200)))
    with pytest.raises(ValueError, match=r"length=40: 8 needles and a question need at least 1\d\d tokens"):
        tasks.needle_prompt(np.random.default_rng(0), 40, crop, TOKENIZER, count=8)


def test_items_of_a_stage_depend_on_their_index_alone(text: np.ndarray) -> None:
    texts = Texts([Document("book", " and so on" * 4000)], library(2), TOKENIZER)
    stage = TINY().stages[0]
    datasets = [StageDataset(texts, PHRASES, stage, seed=(0, 0), bos=0) for _ in range(2)]
    items = [datasets[0][index] for index in range(40)]
    for index in (31, 2):
        again = datasets[1][index]
        assert all(torch.equal(items[index][name], again[name]) for name in again)
    assert all(item["input_ids"].shape == item["weights"].shape == (stage.seq_len + 1,) for item in items)
    assert 10 < sum(int(item["input_ids"][0]) == 0 for item in items) < 30
    weighted = sum(bool((item["weights"] == recipe.ANSWER_WEIGHT).any()) for item in items)
    assert 16 < weighted < 32  # 60 % are needles and pairs
    assert len(datasets[0]) == stage.steps * stage.batch_size


def test_weighted_loss_is_the_weighted_mean() -> None:
    model = recipe.build_model(TINY(), TOKENIZER)
    ids = torch.randint(0, VOCAB_SIZE, (2, 9))
    weights = torch.ones(2, 9)
    weights[0, 3:5], weights[1, 6] = 6.0, 0.0
    outputs = WeightedLanguageModel(model)(ids.int(), weights)
    log_probabilities = model(input_ids=ids[:, :-1]).logits.log_softmax(-1)
    losses = -log_probabilities.gather(-1, ids[:, 1:, None])[..., 0]
    kept = weights[:, 1:]
    torch.testing.assert_close(outputs["loss"], (losses * kept).sum() / kept.sum())
    torch.testing.assert_close(outputs["parts"]["text"], losses[kept == 1].mean().detach())
    torch.testing.assert_close(outputs["parts"]["answers"], losses[kept == 6].mean().detach())


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a folder with a book, and a recipe small enough for tests."""
    book = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text()
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "book.txt").write_text(book)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "other.txt").write_text(book[:4000])
    monkeypatch.setattr(recipe, "Plan", TINY)
    monkeypatch.setattr(recipe, "DEV_PROMPTS", 2)
    monkeypatch.setattr(recipe, "TEST_PROMPTS", 2)
    monkeypatch.setattr(recipe, "documents", lambda cfg, heldout: itertools.islice(documents(cfg, heldout=heldout), 3))
    return tmp_path


def run_recipe(workspace: Path, out: str, *arguments: str) -> Path:
    common = ["--text", str(workspace / "books"), "--out", str(workspace / out), "--device", "cpu", "--workers", "0"]
    recipe.main([*common, *arguments])
    return workspace / out


@pytest.mark.slow
def test_resumed_recipe_gives_the_same_model(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_recipe(workspace, "whole")
    forward = WeightedLanguageModel.forward
    calls = 0

    def killed(self: nn.Module, **batch: Any) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls == 4:  # the second step of the second stage
            raise RuntimeError("killed")
        return forward(self, **batch)

    with monkeypatch.context() as patch:
        patch.setattr(WeightedLanguageModel, "forward", killed)
        with pytest.raises(RuntimeError, match="killed"):
            run_recipe(workspace, "cut")
    cut = run_recipe(workspace, "cut", "--resume", "--test", str(workspace / "test"), "--haystack", str(workspace / "test"))
    assert (cut / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()

    facts = json.loads((cut / "model" / "training.json").read_text())
    assert set(facts["figures"]) == {"test_bits_per_byte", "haystack_needles_1", "haystack_needles_8"}
    assert facts["tokens"] == 2 * 2 * 192 + 2 * 2 * 256
    steps = [json.loads(line)["step"] for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == [1, 2, 3, 4]
    made = load(ModelConfig(name="made", path=str(cut / "model")), device="cpu", dtype="float32")
    assert made.model.num_parameters() == facts["parameters"]
    assert isinstance(made.tokenizer, PreTrainedTokenizerFast)


def test_recipe_needs_one_number_of_steps_per_stage(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_recipe(workspace, "out", "--steps", "1")
    assert stopped.value.code == 2
    assert "--steps: give 2 numbers, one per stage" in capsys.readouterr().err
