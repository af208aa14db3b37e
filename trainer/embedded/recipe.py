"""Trains the embedded model.

    python -m msattn.trainer.embedded.recipe --text BOOKS --out FOLDER

The model is trained on text and retrieval tasks in three stages of growing length. It learns retrieval on short sequences with
many tasks; the last stage extends it to 4096 tokens and is mostly text. Each stage is one call of
:func:`msattn.trainer.training.loop.fit` that continues the previous one. After an interruption ``--resume`` continues to the
same model. The model is written to ``FOLDER/model``, metrics to ``FOLDER/metrics.jsonl`` and ``FOLDER/model/training.json``.
"""

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from msattn.trainer.config import DataConfig, TrackerConfig, TrainConfig
from msattn.trainer.data.chunking import encode
from msattn.trainer.data.sources import Document, documents
from msattn.trainer.data.tasks.sequences import Crop, TaskSequences, Tokens, needle_prompt
from msattn.trainer.data.tasks.wordings import HELD_OUT, Wording
from msattn.trainer.embedded.tokenizer import load_tokenizer, train_tokenizer
from msattn.trainer.models.devices import resolve_device
from msattn.trainer.models.tap import use_dense_attention
from msattn.trainer.training.loop import fit
from msattn.trainer.training.tracker import Tracker

EMBEDDED_MODEL = Path(__file__).parent / "model"
SHARES = {"books": 0.65, "code": 0.2, "library": 0.15}  # of the crops of text
STANDARD_LIBRARY = "code-python-stdlib"  # begins the names of files with modules of the library, also of held-out ones
DEV_SHARE = 0.02  # share of every book, at its end, that is held out for the metrics during training
DEV_PROMPTS = 64
TEST_PROMPTS = 200


SHORT_TASKS = {"needles": 0.2, "several_values": 0.05, "several_keys": 0.05, "pairs": 0.12, "tracking": 0.08}
LONG_TASKS = {"needles": 0.14, "several_values": 0.03, "several_keys": 0.03, "pairs": 0.05, "tracking": 0.03, "copies": 0.02}


@dataclass(frozen=True)
class Stage:
    """Training at one sequence length.

    ``shares`` are the shares of sequences with each retrieval task; the other sequences are plain text.
    """

    seq_len: int
    batch_size: int
    steps: int
    shares: dict[str, float]
    schedule: str = "constant_with_warmup"
    warmup_steps: int = 100


@dataclass(frozen=True)
class Plan:
    """All settings of the recipe except the text."""

    stages: tuple[Stage, ...] = (
        Stage(512, 256, 3000, {**SHORT_TASKS, "copies": 0.1}, warmup_steps=300),
        Stage(1024, 128, 800, {**SHORT_TASKS, "copies": 0.05}),
        Stage(4096, 48, 1600, LONG_TASKS, schedule="cosine"),
    )
    architecture: dict[str, Any] = field(
        default_factory=lambda: {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        }
    )
    lr: float = 2e-3
    weight_decay: float = 0.1
    beta2: float = 0.95
    seed: int = 0
    log_every: int = 50
    eval_every: int = 500


class Texts:
    """Tokens of the training text and of the held-out ends of the books.

    Parameters
    ----------
    sources : documents of each source in :data:`SHARES`; code may be missing.

    Attributes
    ----------
    tokens : int32 [n] of each source, without the ends of the books.
    dev : int32 [n], the ends of the books.
    """

    def __init__(self, sources: Mapping[str, Iterable[Document]], tokenizer: PreTrainedTokenizerFast) -> None:
        books = list(sources["books"])
        splits = [int(len(book.text) * (1 - DEV_SHARE)) for book in books]
        heads = (Document(book.name, book.text[:split]) for book, split in zip(books, splits, strict=True))
        tails = (Document(book.name, book.text[split:]) for book, split in zip(books, splits, strict=True))
        self.dev = encode(tails, tokenizer)
        encoded = {name: encode(iter(found), tokenizer) for name, found in {**sources, "books": heads}.items()}
        self.tokens = {name: tokens for name, tokens in encoded.items() if len(tokens)}
        shares = np.array([SHARES[name] for name in self.tokens])
        self._shares = shares / shares.sum()

    def crop(self, rng: np.random.Generator, length: int) -> Tokens:
        """Returns ``length`` consecutive training tokens from a random position."""
        return crop_from(self.tokens[str(rng.choice(list(self.tokens), p=self._shares))])(rng, length)


def crop_from(tokens: np.ndarray) -> Crop:
    """Returns a function that draws consecutive tokens from ``tokens``."""

    def crop(rng: np.random.Generator, length: int) -> Tokens:
        start = int(rng.integers(len(tokens) - length + 1))
        return tokens[start : start + length].astype(np.int64)

    return crop


NeedlePrompts = tuple[Tokens, int]  # prompts [samples, T], and the number of answer tokens at the end of each


class StageDataset(Dataset[dict[str, Tensor]]):
    """Sequences of one stage.

    An item has ``input_ids`` (int32) and ``weights`` (float32), both ``[seq_len + 1]``. Item ``i`` depends on (seed, stage, i)
    alone.
    """

    def __init__(self, texts: Texts, tasks: TaskSequences, stage: Stage, *, seed: tuple[int, int], bos: int) -> None:
        self.texts = texts
        self.tasks = tasks
        self.stage = stage
        self.seed = seed
        self.bos = bos

    def __len__(self) -> int:
        return self.stage.steps * self.stage.batch_size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rng = np.random.default_rng((*self.seed, index))
        length = self.stage.seq_len + 1
        names, shares = list(self.stage.shares), np.cumsum(list(self.stage.shares.values()))
        choice = int(np.searchsorted(shares, rng.random(), side="right"))
        if choice < len(names):
            ids, weights = self.tasks.make(names[choice], rng, length)
        else:
            ids, weights = self.texts.crop(rng, length), np.ones(length, np.float32)
        if rng.random() < 0.5:
            ids[0] = self.bos  # so that the model works with and without bos
        return {"input_ids": torch.from_numpy(ids.astype(np.int32)), "weights": torch.from_numpy(weights)}


class WeightedLanguageModel(nn.Module):
    """Next-token loss with token weights, as one graph for ``torch.compile``."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, weights: Tensor) -> dict[str, Any]:
        """Returns the weighted mean loss (nats) of tokens 1 to T.

        ``input_ids`` and ``weights`` are ``[B, T + 1]``. ``parts`` holds the unweighted means over text tokens and over answer
        tokens.
        """
        ids = input_ids.long()
        with bfloat16_autocast(ids.device):
            hidden = self.model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden)
        losses = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        weights = weights[:, 1:].flatten()
        parts = {"text": _mean(losses, weights == 1.0), "answers": _mean(losses, weights > 1.0)}
        return {"loss": (losses * weights).sum() / weights.sum(), "parts": {k: v.detach() for k, v in parts.items()}}


def _mean(values: Tensor, where: Tensor) -> Tensor:
    return (values * where).sum() / where.sum().clamp(min=1)


def bfloat16_autocast(device: torch.device) -> torch.autocast:
    """Returns bfloat16 autocast on a GPU; on a CPU it is disabled."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def build_model(plan: Plan, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Returns the untrained model with weights drawn from ``plan.seed``."""
    config = LlamaConfig(
        **plan.architecture,
        vocab_size=len(tokenizer),
        max_position_embeddings=max(stage.seq_len for stage in plan.stages),
        tie_word_embeddings=True,
        bos_token_id=cast(int, tokenizer.bos_token_id),
        eos_token_id=cast(int, tokenizer.eos_token_id),
    )
    torch.manual_seed(plan.seed)
    model = AutoModelForCausalLM.from_config(config)
    use_dense_attention(model)
    return model


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, tokens: np.ndarray, seq_len: int, tokenizer: Any) -> float:
    """Returns the bits per UTF-8 byte of ``tokens`` in chunks of ``seq_len``.

    The first token of a chunk is not predicted.
    """
    chunks = tokens[: len(tokens) // seq_len * seq_len].reshape(-1, seq_len)
    nats, device = 0.0, model.device
    for batch in _batches(chunks, seq_len):
        ids = torch.from_numpy(batch.astype(np.int64)).to(device)
        with bfloat16_autocast(device):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        nats += F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum").item()
    texts = tokenizer.batch_decode([*chunks[:, 1:].tolist()], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return nats / np.log(2) / sum(len(text.encode()) for text in texts)


@torch.no_grad()
def needle_accuracy(model: LlamaForCausalLM, prompts: np.ndarray, answer_tokens: int) -> float:
    """Returns the share of ``prompts [n, T]`` whose answer is predicted greedily.

    All of the last ``answer_tokens`` tokens must be the most likely ones.
    """
    correct, device = 0, model.device
    for batch in _batches(prompts, prompts.shape[1]):
        ids = torch.from_numpy(batch).to(device)
        with bfloat16_autocast(device):
            hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[:, -answer_tokens:]
            guesses = model.lm_head(hidden).argmax(-1)
        correct += int((guesses == ids[:, -answer_tokens:]).all(-1).sum())
    return correct / len(prompts)


def _batches(rows: np.ndarray, seq_len: int) -> Iterable[np.ndarray]:
    size = max(1, 131072 // seq_len)
    return (rows[start : start + size] for start in range(0, len(rows), size))


def needle_prompts(
    tokens: np.ndarray, length: int, tokenizer: Any, *, samples: int, seed: int, wordings: Sequence[Wording] = HELD_OUT
) -> dict[int, NeedlePrompts]:
    """Returns ``samples`` prompts with one needle and with eight.

    They have ``length`` tokens and ask in ``wordings``, in turn; the text around the needles is cropped from ``tokens``.
    """
    prompts: dict[int, NeedlePrompts] = {}
    for count in (1, 8):
        made = []
        for number in range(samples):
            rng, wording = np.random.default_rng((seed, count, number)), wordings[number % len(wordings)]
            made.append(needle_prompt(rng, length, crop_from(tokens), tokenizer, wording, count=count))
        prompts[count] = np.stack([each.ids for each in made]), made[0].answer_tokens
    return prompts


def evaluate(
    model: LlamaForCausalLM, tokens: np.ndarray, seq_len: int, tokenizer: Any, prompts: dict[int, NeedlePrompts]
) -> dict[str, float]:
    """Returns the bits per byte of ``tokens`` and the accuracy on ``prompts``."""
    accuracy = {f"needles_{count}": needle_accuracy(model, *prompts[count]) for count in prompts}
    return {"bits_per_byte": bits_per_byte(model, tokens, seq_len, tokenizer), **accuracy}


def train(
    plan: Plan,
    texts: Texts,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    *,
    device: torch.device,
    workers: int = 0,
    compiled: bool = False,
    resume: bool = False,
) -> LlamaForCausalLM:
    """Runs the stages of ``plan``.

    Checkpoints are written to ``out/stage-N``, metrics to ``out/metrics.jsonl``.
    """
    model = build_model(plan, tokenizer).to(device)  # pyrefly: ignore[bad-argument-type]
    module = WeightedLanguageModel(model)
    tasks = TaskSequences(tokenizer, texts.crop)
    with Tracker.start(TrackerConfig("none"), folder=out, run_name="embedded", config=asdict(plan)) as tracker:
        for number, stage in enumerate(plan.stages):
            print(f"stage {number + 1}: {stage}", flush=True)
            prompts = needle_prompts(texts.dev, stage.seq_len, tokenizer, samples=DEV_PROMPTS, seed=1)
            data = StageDataset(texts, tasks, stage, seed=(plan.seed, number), bos=cast(int, tokenizer.bos_token_id))
            settings = TrainConfig(
                lr=plan.lr,
                steps=stage.steps,
                batch_size=stage.batch_size,
                micro_batch_size=stage.batch_size,
                schedule=stage.schedule,
                warmup_steps=min(stage.warmup_steps, stage.steps),
                weight_decay=plan.weight_decay,
                beta2=plan.beta2,
                log_every=plan.log_every,
                eval_every=plan.eval_every,
                save_every=plan.eval_every,
                num_workers=workers,
                compile=compiled,
            )
            fit(
                module,
                data,
                train=settings,
                folder=out / f"stage-{number + 1}",
                tracker=tracker,
                device=device,
                seed=plan.seed,
                resume=resume,
                evaluate=partial(evaluate, model, texts.dev, stage.seq_len, tokenizer, prompts),
            )
            tracker.offset += stage.steps
    return model


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> LlamaForCausalLM:
    """Writes fp16 weights and the tokenizer; returns the model as it will be loaded."""
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.float()


def held_out_metrics(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seq_len: int, test: str | None, haystack: str | None
) -> dict[str, float]:
    """Returns bits per byte of ``test`` and needle accuracy in ``haystack``.

    Both are folders with text that was not trained on.
    """
    metrics: dict[str, float] = {}
    if test is not None:
        metrics["test_bits_per_byte"] = bits_per_byte(model, encode(local_documents(test), tokenizer), seq_len, tokenizer)
    if haystack is not None:
        prompts = needle_prompts(encode(local_documents(haystack), tokenizer), seq_len, tokenizer, samples=TEST_PROMPTS, seed=2)
        metrics |= {f"haystack_needles_{count}": needle_accuracy(model, *prompts[count]) for count in prompts}
    return metrics


def read_sources(folders: Sequence[str]) -> dict[str, list[Document]]:
    """Returns the documents of ``folders``, files ``code-*`` apart from books, and those of the standard library."""
    found = [document for folder in folders for document in local_documents(folder)]
    return {
        "books": [each for each in found if not each.name.startswith("code-")],
        "code": [each for each in found if each.name.startswith("code-") and not each.name.startswith(STANDARD_LIBRARY)],
        "library": list(documents(DataConfig("stdlib"), heldout=False)),
    }


def local_documents(path: str) -> Iterator[Document]:
    """Yields all documents under ``path``."""
    return documents(DataConfig("text", path=path, heldout_path=path), heldout=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m msattn.trainer.embedded.recipe", description="Train the embedded model.")
    parser.add_argument("--text", nargs="+", required=True, help="folders of books to train on")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints, metrics and the model")
    parser.add_argument("--test", help="folder of held-out texts for the final bits per byte")
    parser.add_argument("--haystack", help="folder of held-out texts for the final needle accuracy")
    parser.add_argument("--steps", nargs="+", type=int, help="optimizer steps of each stage, instead of the plan's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--workers", type=int, default=14, help="data loader processes")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--resume", action="store_true", help="continue from the last complete checkpoint")
    args = parser.parse_args(arguments)

    plan = Plan(seed=args.seed)
    if args.steps is not None:
        if len(args.steps) != len(plan.stages):
            parser.error(f"--steps: give {len(plan.stages)} numbers, one per stage")
        plan = replace(plan, stages=tuple(replace(s, steps=n) for s, n in zip(plan.stages, args.steps, strict=True)))
    started = time.time()
    sources = read_sources(args.text)
    if (EMBEDDED_MODEL / "tokenizer.json").exists():
        tokenizer = load_tokenizer(EMBEDDED_MODEL)
    else:
        tokenizer = train_tokenizer(document.text for found in sources.values() for document in found)
    texts = Texts(sources, tokenizer)
    counts = {name: len(tokens) for name, tokens in texts.tokens.items()}
    print(f"tokens of text: {counts}, held out: {len(texts.dev)}", flush=True)

    device = resolve_device(args.device)
    compiled = device.type == "cuda" and not args.no_compile
    model = train(plan, texts, tokenizer, args.out, device=device, workers=args.workers, compiled=compiled, resume=args.resume)
    record: dict[str, Any] = {
        "plan": asdict(plan),
        "parameters": model.num_parameters(),
        "tokens": sum(stage.steps * stage.batch_size * stage.seq_len for stage in plan.stages),
        "minutes": round((time.time() - started) / 60, 1),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    model = save(model, tokenizer, args.out / "model")
    record["figures"] = held_out_metrics(model, tokenizer, plan.stages[-1].seq_len, args.test, args.haystack)
    (args.out / "model" / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record["figures"], indent=2), flush=True)


if __name__ == "__main__":
    main()
