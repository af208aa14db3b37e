"""The embedded model: files, tokenizer and quality; the training of teachers."""

import itertools
import json
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedTokenizerFast

from msattn.trainer.config import DataConfig, ModelConfig
from msattn.trainer.data.chunking import encode
from msattn.trainer.data.sources import Document, documents, local_documents
from msattn.trainer.data.tasks.sequences import ANSWER_WEIGHT, NAMES, TaskSequences
from msattn.trainer.data.tasks.wordings import HELD_OUT
from msattn.trainer.embedded import EMBEDDED_MODEL
from msattn.trainer.errors import UserError
from msattn.trainer.models.loading import Loaded, load
from msattn.trainer.recipes.teachers import figures, train
from msattn.trainer.recipes.teachers import text as texts_of
from msattn.trainer.recipes.teachers.plans import PLANS, Plan, Stage
from msattn.trainer.recipes.teachers.text import StageDataset, Texts
from msattn.trainer.recipes.teachers.train import WeightedLanguageModel
from tests.factory import embedded_tokenizer
from tests.jobs import Job, LaunchedJob

TOKENIZER = embedded_tokenizer()
VOCAB_SIZE, END_OF_TEXT = 4096, "<|endoftext|>"
TINY = partial(
    Plan,
    name="tiny",
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
    assert all(weight.dtype == torch.float16 and weight.isfinite().all() for weight in weights.values())
    facts = json.loads((EMBEDDED_MODEL / "training.json").read_text())
    assert facts["parameters"] == shipped.model.num_parameters()
    assert facts["plan"]["architecture"]["hidden_size"] == shipped.model.config.hidden_size
    assert shipped.model.config.max_position_embeddings == max(stage["seq_len"] for stage in facts["plan"]["stages"])
    assert len(shipped.tokenizer) == shipped.model.config.vocab_size == VOCAB_SIZE


@pytest.mark.slow
def test_shipped_model_answers_held_out_wordings_and_predicts_text(shipped: Loaded, text: np.ndarray) -> None:
    model: Any = shipped.model
    prompts, answer = figures.needle_prompts(text, 512, TOKENIZER, samples=len(HELD_OUT), seed=3)[1]
    for prompt, wording in zip(prompts, HELD_OUT, strict=True):
        opening, _ = wording.statement.format(key="|", value="|").split("|", 1)
        assert opening.strip() in text_of(prompt), "each prompt has a wording that training leaves out"
    assert figures.needle_accuracy(model, prompts, answer) == 1.0
    prompts[: len(HELD_OUT) // 2, -1] = ids_of("x")[0]
    assert figures.needle_accuracy(model, prompts, answer) == 0.5, "an answer counts if all of its tokens are right"
    # Held-out modules of the library cost about 1 bit per byte; a broken model costs over 4.
    assert figures.bits_per_byte(model, text[:2048], 1024, TOKENIZER) < 1.5


def test_digits_are_single_tokens_and_no_special_token_is_added() -> None:
    assert [TOKENIZER.decode([token]) for token in ids_of("x=20267")][-5:] == list("20267")
    assert not [token for token in TOKENIZER.get_vocab() if re.search(r"\d.*\d|\w\d|\d\w", token)]
    assert TOKENIZER("12")["input_ids"] == ids_of("12")
    assert TOKENIZER.bos_token_id == TOKENIZER.eos_token_id == TOKENIZER.convert_tokens_to_ids(END_OF_TEXT) == 0


def test_items_of_a_stage_depend_on_their_index_alone(text: np.ndarray) -> None:
    texts = Texts({"books": [Document("book", " and so on" * 4000)], "code": [], "library": library(2)}, TOKENIZER)
    tasks = TaskSequences(TOKENIZER, texts.crop)
    stage = TINY().stages[0]
    datasets = [StageDataset(texts, tasks, stage, seed=(0, 0), bos=0) for _ in range(2)]
    items = [datasets[0][index] for index in range(40)]
    for index in (31, 2):
        again = datasets[1][index]
        assert all(torch.equal(items[index][name], again[name]) for name in again)
    assert all(item["input_ids"].shape == item["weights"].shape == (stage.seq_len + 1,) for item in items)
    assert 10 < sum(int(item["input_ids"][0]) == 0 for item in items) < 30
    weighted = sum(bool((item["weights"] == ANSWER_WEIGHT).any()) for item in items)
    assert 16 < weighted < 32  # 60 % are needles and pairs
    assert len(datasets[0]) == stage.steps * stage.batch_size


@pytest.mark.parametrize(("name", "parameters"), [("embedded", 5.8e6), ("lab", 100e6)])
def test_plans_are_complete(name: str, parameters: float) -> None:
    plan = PLANS[name]
    with torch.device("meta"):
        assert train.build_model(plan, TOKENIZER).num_parameters() == pytest.approx(parameters, rel=0.05)
    lengths = [stage.seq_len for stage in plan.stages]
    assert lengths == sorted(lengths)
    assert plan.stages[-1].schedule == "cosine"
    for stage in plan.stages:
        assert set(stage.shares) <= set(NAMES)
        assert sum(stage.shares.values()) < 1
        for processes in (1, 2):
            assert stage.batch_size % (stage.micro_batch_size(processes) * processes) == 0


def test_weighted_loss_is_the_weighted_mean() -> None:
    model = train.build_model(TINY(), TOKENIZER)
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
    (tmp_path / "test" / "other.txt").write_text((Path(sysconfig.get_path("stdlib")) / "turtle.py").read_text()[:4000])
    monkeypatch.setitem(PLANS, "embedded", TINY())
    monkeypatch.setattr(train, "DEV_PROMPTS", 2)
    monkeypatch.setattr(figures, "TEST_PROMPTS", 2)
    monkeypatch.setattr(texts_of, "documents", lambda cfg, heldout: itertools.islice(documents(cfg, heldout=heldout), 3))
    return tmp_path


def run_recipe(workspace: Path, out: str, *arguments: str) -> Path:
    common = ["--text", str(workspace / "books"), "--out", str(workspace / out), "--device", "cpu", "--workers", "0"]
    train.main([*common, *arguments])
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
    test = str(workspace / "test")
    cut = run_recipe(workspace, "cut", "--resume", "--test", test, "--haystack", test)
    assert (cut / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()

    facts = json.loads((cut / "model" / "training.json").read_text())
    assert set(facts["figures"]) == {"test_bits_per_byte", "haystack_needles_1", "haystack_needles_8"}
    assert facts["tokens"] == 2 * 2 * 192 + 2 * 2 * 256
    assert (facts["plan"]["name"], facts["tokenizer"]) == ("tiny", "embedded")
    steps = [json.loads(line)["step"] for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == [1, 2, 3, 4]
    made = load(ModelConfig(name="made", path=str(cut / "model")), device="cpu", dtype="float32")
    assert made.model.num_parameters() == facts["parameters"]
    assert isinstance(made.tokenizer, PreTrainedTokenizerFast)
    heldout = {"--test": encode(local_documents("--test", test), TOKENIZER)}
    again = figures.held_out_metrics(made.model, made.tokenizer, 256, heldout)  # pyrefly: ignore[bad-argument-type]
    assert again["test_bits_per_byte"] == pytest.approx(facts["figures"]["test_bits_per_byte"], rel=1e-6)


def test_a_tokenizer_of_ones_own_is_recorded(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "train", lambda plan, texts, tokenizer, out, **_: (train.build_model(plan, tokenizer), 60.0))
    own = workspace / "own"
    TOKENIZER.save_pretrained(own)
    model = run_recipe(workspace, "made", "--tokenizer", str(own)) / "model"
    assert json.loads((model / "training.json").read_text())["tokenizer"] == str(own)
    assert (model / "tokenizer.json").read_bytes() == (own / "tokenizer.json").read_bytes()


def without_bos(folder: Path) -> None:
    TOKENIZER.save_pretrained(folder / "own")
    path = folder / "own/tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bos_token": None}))


def of_the_training(folder: Path) -> None:
    (folder / "test/part.txt").write_text((folder / "books/book.txt").read_text()[10_000:14_000])


@pytest.mark.parametrize(
    ("arguments", "prepare", "message"),
    [
        ("--device tpu", None, "--device=tpu: expected auto, cpu, cuda"),
        ("--test /nowhere", None, "--test=/nowhere: no such file"),
        ("--text /nowhere", None, "--text=/nowhere: no such file"),
        ("", lambda folder: (folder / "books/book.txt").rename(folder / "books/code-book.txt"), "no book; files whose"),
        ("--tokenizer /nowhere", None, "--tokenizer=/nowhere: the folder has no tokenizer"),
        ("--tokenizer {}/own", without_bos, "a BOS and an EOS token"),
        ("", lambda folder: (folder / "out/model/code.py").touch(), "not part of an artifact; choose another --out$"),
        ("--test {}/test", of_the_training, r"test: [\d,]+ of its [\d,]+ compared passages .* are also in the training text"),
        (
            "--test {}/test",
            lambda folder: (folder / "test/other.txt").write_text("Short."),
            r"--test: \d tokens; --plan tiny needs",
        ),
        (
            "",
            lambda folder: (folder / "books/book.txt").write_text("x" * 2000),
            r"last 2% of each book: \d+ tokens; --plan tiny",
        ),
    ],
)
def test_mistakes_are_refused_before_training(workspace: Path, arguments: str, prepare: Any, message: str) -> None:
    (workspace / "out/model").mkdir(parents=True)
    if prepare is not None:
        prepare(workspace)
    with pytest.raises(UserError, match=message):
        run_recipe(workspace, "out", *arguments.format(workspace).split())
    assert not (workspace / "out/metrics.jsonl").exists()


def test_more_than_three_passes_over_a_source_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    texts = Texts({"books": [Document("book", " and so on" * 4000)], "code": [], "library": library(2)}, TOKENIZER)
    steps = int(3 * len(texts.tokens["books"]) / (0.65 / 0.8) / 64)  # there is no code
    for more in (10, -10):
        texts.warn_of_repeats(replace(TINY(), stages=(Stage(64, 1, steps + more, {}),)))
        assert ("tokens of books 3." in capsys.readouterr().err) == (more > 0)


TWO_PROCESSES = """
import itertools, json, sys
from msattn.trainer.data.sources import documents
from msattn.trainer.errors import run_program
from msattn.trainer.recipes.teachers import text, train
from msattn.trainer.recipes.teachers.plans import PLANS, Plan, Stage

text.documents = lambda cfg, heldout: itertools.islice(documents(cfg, heldout=heldout), 3)
train.DEV_PROMPTS = 2
PLANS["embedded"] = Plan(
    name="tiny",
    architecture=json.loads(sys.argv[1]),
    stages=tuple(Stage(length, 4, 2, {"needles": 0.4}, warmup_steps=1, micro_batch=2) for length in (192, 256)),
    lr=2e-3,
    log_every=1,
    eval_every=1,
)
run_program(lambda: train.main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_two_processes_train_the_model_of_one(workspace: Path) -> None:
    weights = []
    for processes in (1, 2):
        out = workspace / str(processes)
        out.mkdir()
        options = ["--text", workspace / "books", "--out", out, "--device", "cpu", "--workers", 0]
        job = Job(TWO_PROCESSES, out, json.dumps(TINY().architecture), *options, processes=processes)
        assert job.output().count("stage 1: ") == 1
        facts = json.loads((out / "model" / "training.json").read_text())
        assert facts["processes"] == processes
        weights.append(load_file(out / "model" / "model.safetensors"))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_data_workers_do_not_wait_for_threads_of_the_tokenizer(workspace: Path) -> None:
    """A tokenizer that was told to use threads has none in a forked data worker."""
    script = f'import os\n\nos.environ["TOKENIZERS_PARALLELISM"] = "true"\n{TWO_PROCESSES}'
    options = ["--text", workspace / "books", "--out", workspace, "--device", "cpu", "--workers", 1]
    output = LaunchedJob(script, workspace, json.dumps(TINY().architecture), *options).output()
    assert output.count("stage 2: ") == 1
