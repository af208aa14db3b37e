"""The embedded model: files, tokenizer and quality; its training."""

import itertools
import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import embedded_model
import numpy as np
import pytest
import torch
from embedded_model import (
    PLAN,
    Plan,
    Stage,
    StageDataset,
    Texts,
    WeightedLanguageModel,
)
from safetensors.torch import load_file
from torch import nn

from msattn.trainer.config import DataConfig, ModelConfig
from msattn.trainer.data.chunking import encode
from msattn.trainer.data.sources import Document, documents, local_documents
from msattn.trainer.data.tasks.sequences import ANSWER_WEIGHT, NAMES, TaskSequences
from msattn.trainer.data.tasks.wordings import HELD_OUT
from msattn.trainer.embedded import EMBEDDED_MODEL
from msattn.trainer.errors import UserError
from msattn.trainer.models.loading import Loaded, load
from tests.factory import embedded_tokenizer
from tests.jobs import LaunchedJob

TOKENIZER = embedded_tokenizer()
VOCAB_SIZE, END_OF_TEXT = 4096, "<|endoftext|>"
TINY = Plan(
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
    lr=2e-3,
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
    assert all(
        weight.dtype == torch.float16 and weight.isfinite().all() for weight in weights.values()
    )
    facts = json.loads((EMBEDDED_MODEL / "training.json").read_text())
    assert facts["parameters"] == shipped.model.num_parameters()
    assert facts["plan"]["architecture"]["hidden_size"] == shipped.model.config.hidden_size
    assert shipped.model.config.max_position_embeddings == max(
        stage["seq_len"] for stage in facts["plan"]["stages"]
    )
    assert len(shipped.tokenizer) == shipped.model.config.vocab_size == VOCAB_SIZE


@pytest.mark.slow
def test_shipped_model_answers_held_out_wordings_and_predicts_text(
    shipped: Loaded, text: np.ndarray
) -> None:
    model: Any = shipped.model
    prompts, answer = embedded_model.needle_prompts(
        text, 512, TOKENIZER, samples=len(HELD_OUT), seed=3
    )[1]
    for prompt, wording in zip(prompts, HELD_OUT, strict=True):
        opening, _ = wording.statement.format(key="|", value="|").split("|", 1)
        assert opening.strip() in text_of(prompt), (
            "each prompt has a wording that training leaves out"
        )
    assert embedded_model.needle_accuracy(model, prompts, answer) == 1.0
    prompts[: len(HELD_OUT) // 2, -1] = ids_of("x")[0]
    assert embedded_model.needle_accuracy(model, prompts, answer) == 0.5, (
        "an answer counts if all of its tokens are right"
    )
    # Held-out modules of the library cost about 1 bit per byte; a broken model costs over 4.
    assert embedded_model.bits_per_byte(model, text[:2048], 1024, TOKENIZER) < 1.5


def test_digits_are_single_tokens_and_no_special_token_is_added() -> None:
    assert [TOKENIZER.decode([token]) for token in ids_of("x=20267")][-5:] == list("20267")
    assert not [token for token in TOKENIZER.get_vocab() if re.search(r"\d.*\d|\w\d|\d\w", token)]
    assert TOKENIZER("12")["input_ids"] == ids_of("12")
    assert (
        TOKENIZER.bos_token_id
        == TOKENIZER.eos_token_id
        == TOKENIZER.convert_tokens_to_ids(END_OF_TEXT)
        == 0
    )


def test_items_of_a_stage_depend_on_their_index_alone(text: np.ndarray) -> None:
    texts = Texts(
        {"books": [Document("book", " and so on" * 4000)], "code": [], "library": library(2)},
        TOKENIZER,
    )
    tasks = TaskSequences(TOKENIZER, texts.crop)
    stage = TINY.stages[0]
    datasets = [StageDataset(texts, tasks, stage, seed=(0, 0), bos=0) for _ in range(2)]
    items = [datasets[0][index] for index in range(40)]
    for index in (31, 2):
        again = datasets[1][index]
        assert all(torch.equal(items[index][name], again[name]) for name in again)
    assert all(
        item["input_ids"].shape == item["weights"].shape == (stage.seq_len + 1,) for item in items
    )
    assert 10 < sum(int(item["input_ids"][0]) == 0 for item in items) < 30
    weighted = sum(bool((item["weights"] == ANSWER_WEIGHT).any()) for item in items)
    assert 16 < weighted < 32  # 60 % are needles and pairs
    assert len(datasets[0]) == stage.steps * stage.batch_size


def test_the_plan_is_complete() -> None:
    with torch.device("meta"):
        assert embedded_model.build_model(PLAN, TOKENIZER).num_parameters() == pytest.approx(
            5.8e6, rel=0.05
        )
    lengths = [stage.seq_len for stage in PLAN.stages]
    assert lengths == sorted(lengths)
    assert PLAN.stages[-1].schedule == "cosine"
    for stage in PLAN.stages:
        assert set(stage.shares) <= set(NAMES)
        assert sum(stage.shares.values()) < 1


def test_weighted_loss_is_the_weighted_mean() -> None:
    model = embedded_model.build_model(TINY, TOKENIZER)
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
    (tmp_path / "test" / "other.txt").write_text(
        (Path(sysconfig.get_path("stdlib")) / "turtle.py").read_text()[:4000]
    )
    monkeypatch.setattr(embedded_model, "PLAN", TINY)
    monkeypatch.setattr(embedded_model, "DEV_PROMPTS", 2)
    monkeypatch.setattr(embedded_model, "TEST_PROMPTS", 2)
    monkeypatch.setattr(
        embedded_model,
        "documents",
        lambda cfg, heldout: itertools.islice(documents(cfg, heldout=heldout), 3),
    )
    return tmp_path


def arguments_of(workspace: Path, out: Path, workers: int = 0) -> list[str]:
    test = str(workspace / "test")
    texts = ["--text", str(workspace / "books"), "--test", test, "--haystack", test]
    return [*texts, "--out", str(out), "--device", "cpu", "--workers", str(workers)]


def run_recipe(workspace: Path, out: str, *arguments: str) -> Path:
    embedded_model.main([*arguments_of(workspace, workspace / out), *arguments])
    return workspace / out


@pytest.mark.slow
def test_resumed_recipe_gives_the_same_model(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    says = r"was trained to step \d+; --resume continues it, another --out keeps both"
    with pytest.raises(UserError, match=says):
        run_recipe(workspace, "cut")
    cut = run_recipe(workspace, "cut", "--resume")
    assert (cut / "model" / "model.safetensors").read_bytes() == (
        whole / "model" / "model.safetensors"
    ).read_bytes()

    facts = json.loads((cut / "model" / "training.json").read_text())
    assert set(facts["figures"]) == {
        "test_bits_per_byte",
        "haystack_needles_1",
        "haystack_needles_8",
    }
    assert facts["tokens"] == 2 * 2 * 192 + 2 * 2 * 256
    steps = [
        json.loads(line)["step"] for line in (whole / "metrics.jsonl").read_text().splitlines()
    ]
    assert sorted(set(steps)) == [1, 2, 3, 4]
    made = load(ModelConfig(name="made", path=str(cut / "model")), device="cpu", dtype="float32")
    assert made.model.num_parameters() == facts["parameters"]
    tokens: Any = encode(local_documents("--test", str(workspace / "test")), made.tokenizer)
    again = embedded_model.bits_per_byte(made.model, tokens, 256, made.tokenizer)  # pyrefly: ignore[bad-argument-type]
    assert again == pytest.approx(facts["figures"]["test_bits_per_byte"], rel=1e-6)


def of_the_training(folder: Path) -> None:
    (folder / "test/part.txt").write_text((folder / "books/book.txt").read_text()[10_000:14_000])


@pytest.mark.parametrize(
    ("arguments", "prepare", "message"),
    [
        ("--device tpu", None, "--device=tpu: expected auto, cpu, cuda"),
        ("--test /nowhere", None, "--test=/nowhere: no such file"),
        ("--text /nowhere", None, "--text=/nowhere: no such file"),
        (
            "",
            lambda folder: (folder / "books/book.txt").rename(folder / "books/code-book.txt"),
            "no book; files whose",
        ),
        (
            "",
            lambda folder: (folder / "out/model/code.py").touch(),
            "not part of an artifact; choose another --out$",
        ),
        (
            "",
            of_the_training,
            r"test: [\d,]+ of its [\d,]+ compared passages .* are also in the training text",
        ),
        (
            "",
            lambda folder: (folder / "test/other.txt").write_text("Short."),
            r"--test: \d tokens; training needs at least",
        ),
        (
            "",
            lambda folder: (folder / "books/book.txt").write_text("x" * 2000),
            r"last 2% of each book: \d+ tokens; training needs",
        ),
    ],
)
def test_mistakes_are_refused_before_training(
    workspace: Path, arguments: str, prepare: Any, message: str
) -> None:
    (workspace / "out/model").mkdir(parents=True)
    if prepare is not None:
        prepare(workspace)
    with pytest.raises(UserError, match=message):
        run_recipe(workspace, "out", *arguments.split())
    assert not (workspace / "out/metrics.jsonl").exists()


SCRIPT = """
import itertools, os, sys

os.environ["TOKENIZERS_PARALLELISM"] = "true"

from msattn.trainer.data.sources import documents
from msattn.trainer.errors import run_program
import embedded_model
from tests.experiments.test_embedded_model import TINY

embedded_model.documents = lambda cfg, heldout: itertools.islice(documents(cfg, heldout=heldout), 3)
embedded_model.DEV_PROMPTS = embedded_model.TEST_PROMPTS = 2
embedded_model.PLAN = TINY
run_program(lambda: embedded_model.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_data_workers_do_not_wait_for_threads_of_the_tokenizer(workspace: Path) -> None:
    """A tokenizer that was told to use threads has none in a forked data worker."""
    output = LaunchedJob(SCRIPT, workspace, *arguments_of(workspace, workspace, workers=1)).output()
    assert output.count("stage 2: ") == 1
