"""Trains the embedded model; the table of docs/measurements.md, "The embedded model".

    python docs/experiments/embedded_model.py --text TEXT --test TEST \\
        --haystack ESSAYS --out FOLDER

The model is trained on text and retrieval tasks in stages of growing length. Each stage is one call
of :func:`msattn.trainer.training.loop.fit` that continues the previous one. After an interruption
``--resume`` continues to the same model. The model is written to ``FOLDER/model``, metrics to
``FOLDER/metrics.jsonl`` and ``FOLDER/model/training.json``.
"""

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from msattn.trainer import artifacts
from msattn.trainer.config import DataConfig, TrackerConfig, TrainConfig
from msattn.trainer.config.values import one_of
from msattn.trainer.data.chunking import encode
from msattn.trainer.data.overlap import refuse_shared, shared_windows
from msattn.trainer.data.sources import Document, documents, local_documents
from msattn.trainer.data.tasks.sequences import TaskSequences, TokenIds, crop_from, needle_prompt
from msattn.trainer.data.tasks.wordings import HELD_OUT
from msattn.trainer.embedded import EMBEDDED_MODEL
from msattn.trainer.errors import Fault, UserError, run_program
from msattn.trainer.models.devices import resolve_device
from msattn.trainer.models.tap import use_dense_attention
from msattn.trainer.signals import raised
from msattn.trainer.storage.lock import locked
from msattn.trainer.storage.replace import replace_folder
from msattn.trainer.training.checkpoints import check_start
from msattn.trainer.training.loop import fit
from msattn.trainer.training.tracker import Tracker

# origin of the model; a folder without this file was not written here and is never replaced
RECORD = "training.json"
OPTIONS = {  # keys of the configuration in messages of shared code: options of this program
    "overwrite=true without resume=true": "another --out",
    "overwrite=true starts again, ": "",
    "resume=true": "--resume",
    "name= or outputs=": "--out",
    "another name=": "another --out",
    "outputs=": "--out=",
    "device=": "--device=",
}
SHARES = {"books": 0.65, "code": 0.2, "library": 0.15}  # shares of the text crops
# begins the names of files with modules of the library, also of held-out ones
STANDARD_LIBRARY = "code-python-stdlib"
# share of every book, at its end, that is held out for the metrics during training
DEV_SHARE = 0.02
DEV_PROMPTS, TEST_PROMPTS = 32, 200  # needle prompts, with one and with eight needles each

# prompts [samples, T], and the number of answer tokens at the end of each
NeedlePrompts = tuple[TokenIds, int]


@dataclass(frozen=True)
class Stage:
    """Training at one sequence length.

    Attributes
    ----------
    shares : shares of sequences with each task of
        :data:`msattn.trainer.data.tasks.sequences.NAMES`; the others are text.
    """

    seq_len: int
    batch_size: int
    steps: int
    shares: dict[str, float]
    schedule: str = "constant_with_warmup"
    warmup_steps: int = 100


@dataclass(frozen=True)
class Plan:
    """The architecture of the model and the stages of its training."""

    architecture: dict[str, Any]
    stages: tuple[Stage, ...]
    lr: float
    weight_decay: float = 0.1
    beta2: float = 0.95
    seed: int = 0
    log_every: int = 50
    eval_every: int = 500

    @property
    def tokens(self) -> int:
        return sum(stage.steps * stage.batch_size * stage.seq_len for stage in self.stages)


SHORT_TASKS = {
    "needles": 0.3,
    "several_values": 0.05,
    "several_keys": 0.08,
    "pairs": 0.12,
    "tracking": 0.1,
}
LONG_TASKS = {
    "needles": 0.22,
    "several_values": 0.03,
    "several_keys": 0.03,
    "pairs": 0.05,
    "tracking": 0.03,
    "copies": 0.02,
}

# 5.8 million parameters, 4096 tokens: learns retrieval on short sequences with many tasks; the last
#   stage is mostly text.
PLAN = Plan(
    architecture={
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    },
    stages=(
        Stage(512, 256, 5000, {**SHORT_TASKS, "copies": 0.1}, warmup_steps=300),
        Stage(1024, 128, 800, {**SHORT_TASKS, "copies": 0.05}),
        Stage(4096, 48, 2000, LONG_TASKS, schedule="cosine"),
    ),
    lr=2e-3,
)


def read_sources(folders: Sequence[str]) -> dict[str, list[Document]]:
    """Returns the documents of ``folders``, files ``code-*`` apart from books, and those of the
    standard library.
    """
    local = [document for folder in folders for document in local_documents("--text", folder)]
    books = [document for document in local if not document.name.startswith("code-")]
    if not books:
        raise UserError(
            f"--text={' '.join(folders)}: no book; files whose names begin with code- are not books"
        )
    return {
        "books": books,
        "code": [
            document
            for document in local
            if document.name.startswith("code-") and not document.name.startswith(STANDARD_LIBRARY)
        ],
        "library": list(documents(DataConfig("stdlib"), heldout=False)),
    }


def check_unseen(sources: Mapping[str, Sequence[Document]], heldout: Mapping[str, str]) -> None:
    """Raises UserError if much of the text of a folder of ``heldout``, by option, is in
    ``sources``; warns of some.
    """
    for option, path in heldout.items():
        counts = shared_windows(
            chain.from_iterable(sources.values()), local_documents(option, path)
        )
        refuse_shared(*counts, f"{option}={path}", "the training text")


def check_lengths(tokens: Mapping[str, np.ndarray], plan: Plan) -> None:
    """Raises UserError if ``tokens``, named by option and text, are too few for the longest
    sequences of ``plan``.
    """
    needed = plan.stages[-1].seq_len + 1
    for text, ids in tokens.items():
        if len(ids) < needed:
            raise UserError(f"{text}: {len(ids):,} tokens; training needs at least {needed:,}")


class Texts:
    """Tokens of the training text, for each source in :data:`SHARES`, and as ``dev`` tokens from
    the ends of the books.
    """

    def __init__(
        self, sources: Mapping[str, Iterable[Document]], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        books = list(sources["books"])
        splits = [int(len(book.text) * (1 - DEV_SHARE)) for book in books]
        heads = (
            Document(book.name, book.text[:split])
            for book, split in zip(books, splits, strict=True)
        )
        tails = (
            Document(book.name, book.text[split:])
            for book, split in zip(books, splits, strict=True)
        )
        self.dev = encode(tails, tokenizer)
        encoded = {
            name: encode(iter(of_source), tokenizer)
            for name, of_source in {**sources, "books": heads}.items()
        }
        self.tokens = {name: tokens for name, tokens in encoded.items() if len(tokens)}
        shares = np.array([SHARES[name] for name in self.tokens])
        self._shares = shares / shares.sum()

    def by_name(self) -> dict[str, np.ndarray]:
        sources = {f"--text, {name}": tokens for name, tokens in self.tokens.items()}
        return {**sources, f"--text, the last {DEV_SHARE:.0%} of each book": self.dev}

    def crop(self, rng: np.random.Generator, length: int) -> TokenIds:
        return crop_from(self.tokens[str(rng.choice(list(self.tokens), p=self._shares))])(
            rng, length
        )


class StageDataset(Dataset[dict[str, Tensor]]):
    """Sequences ``input_ids`` int32 and ``weights`` fp32 ``[seq_len + 1]``; item ``i`` depends on
    (seed, stage, i) alone.
    """

    def __init__(
        self, texts: Texts, tasks: TaskSequences, stage: Stage, *, seed: tuple[int, int], bos: int
    ) -> None:
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
        return {
            "input_ids": torch.from_numpy(ids.astype(np.int32)),
            "weights": torch.from_numpy(weights),
        }


def bfloat16_autocast(device: torch.device) -> torch.autocast:
    """Returns bfloat16 autocast on a GPU; on a CPU it is disabled."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


class WeightedLanguageModel(nn.Module):
    """Next-token loss with token weights, as one graph for ``torch.compile``."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, weights: Tensor) -> dict[str, Any]:
        """Returns the weighted mean loss (nats) of tokens 1 to T of ``input_ids [B, T + 1]``.

        ``parts`` holds the unweighted means over text tokens and over answer tokens.
        """
        ids = input_ids.long()
        with bfloat16_autocast(ids.device):
            hidden = self.model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden)
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
        )
        weights = weights[:, 1:].flatten()
        parts = {"text": _mean(losses, weights == 1.0), "answers": _mean(losses, weights > 1.0)}
        return {
            "loss": (losses * weights).sum() / weights.sum(),
            "parts": {k: v.detach() for k, v in parts.items()},
        }


def _mean(values: Tensor, where: Tensor) -> Tensor:
    return (values * where).sum() / where.sum().clamp(min=1)


@torch.no_grad()
def bits_per_byte(
    model: LlamaForCausalLM, tokens: np.ndarray, seq_len: int, tokenizer: Any
) -> float:
    """Returns the bits per UTF-8 byte of ``tokens`` in chunks of ``seq_len``, whose first tokens
    are not predicted.
    """
    chunks = tokens[: len(tokens) // seq_len * seq_len].reshape(-1, seq_len)
    nats, device = 0.0, model.device
    for batch in _batches(chunks, seq_len):
        ids = torch.from_numpy(batch.astype(np.int64)).to(device)
        with bfloat16_autocast(device):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        nats += F.cross_entropy(
            logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"
        ).item()
    texts = tokenizer.batch_decode(
        [*chunks[:, 1:].tolist()], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return nats / np.log(2) / sum(len(text.encode()) for text in texts)


@torch.no_grad()
def needle_accuracy(model: LlamaForCausalLM, prompts: np.ndarray, answer_tokens: int) -> float:
    """Returns the share of ``prompts [n, T]`` whose last ``answer_tokens`` tokens are all the most
    likely ones.
    """
    correct, device = 0, model.device
    for batch in _batches(prompts, prompts.shape[1]):
        ids = torch.from_numpy(batch).to(device)
        with bfloat16_autocast(device):
            hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[
                :, -answer_tokens:
            ]
            guesses = model.lm_head(hidden).argmax(-1)
        correct += int((guesses == ids[:, -answer_tokens:]).all(-1).sum())
    return correct / len(prompts)


def _batches(rows: np.ndarray, seq_len: int) -> Iterable[np.ndarray]:
    size = max(1, 131072 // seq_len)
    return (rows[start : start + size] for start in range(0, len(rows), size))


def needle_prompts(
    tokens: np.ndarray, length: int, tokenizer: Any, *, samples: int, seed: int
) -> dict[int, NeedlePrompts]:
    """Returns ``samples`` prompts of ``length`` tokens with one needle and with eight, in held-out
    wordings in turn.
    """
    prompts: dict[int, NeedlePrompts] = {}
    for count in (1, 8):
        made = []
        for number in range(samples):
            rng = np.random.default_rng((seed, count, number))
            wording = HELD_OUT[number % len(HELD_OUT)]
            made.append(
                needle_prompt(rng, length, crop_from(tokens), tokenizer, wording, count=count)
            )
        prompts[count] = np.stack([prompt.ids for prompt in made]), made[0].answer_tokens
    return prompts


def evaluate(
    model: LlamaForCausalLM,
    tokens: np.ndarray,
    seq_len: int,
    tokenizer: Any,
    prompts: dict[int, NeedlePrompts],
) -> dict[str, float]:
    """Returns the bits per byte of ``tokens`` and the accuracy on ``prompts``."""
    accuracy = {f"needles_{count}": needle_accuracy(model, *prompts[count]) for count in prompts}
    return {"bits_per_byte": bits_per_byte(model, tokens, seq_len, tokenizer), **accuracy}


def build_model(plan: Plan, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Returns the untrained model with weights drawn from ``plan.seed``."""
    config = LlamaConfig(
        **plan.architecture,
        vocab_size=len(tokenizer),
        max_position_embeddings=max(stage.seq_len for stage in plan.stages),
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(plan.seed)
    model = AutoModelForCausalLM.from_config(config)
    use_dense_attention(model)
    return model


def train(
    plan: Plan,
    texts: Texts,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    *,
    device: torch.device,
    workers: int = 0,
    compiled: bool = False,
    resume: bool = False,
) -> tuple[LlamaForCausalLM, float]:
    """Runs the stages of ``plan`` and returns the model and the seconds of all steps, also of those
    before a resumption.
    """
    model = build_model(plan, tokenizer).to(device)  # pyrefly: ignore[bad-argument-type]
    module = WeightedLanguageModel(model)
    tasks, seconds = TaskSequences(tokenizer, texts.crop), 0.0
    bos: Any = tokenizer.bos_token_id
    with Tracker(
        TrackerConfig("none"), folder=out, run_name="embedded", config=asdict(plan)
    ) as tracker:
        for number, stage in enumerate(plan.stages):
            print(f"stage {number + 1}: {stage}", flush=True)
            check_start(out / f"stage-{number + 1}" / "checkpoints", {}, resume=resume)
            prompts = needle_prompts(
                texts.dev, stage.seq_len, tokenizer, samples=DEV_PROMPTS, seed=1
            )
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
            result = fit(
                module,
                StageDataset(texts, tasks, stage, seed=(plan.seed, number), bos=bos),
                train=settings,
                folder=out / f"stage-{number + 1}",
                tracker=tracker,
                device=device,
                seed=plan.seed,
                resume=resume,
                evaluate=partial(evaluate, model, texts.dev, stage.seq_len, tokenizer, prompts),
            )
            seconds += result.seconds
            tracker.offset += stage.steps
    return model, seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; errors are those of :func:`run`, with this program's options in their
    messages.
    """
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument(
        "--text", nargs="+", required=True, help="files or folders of books and code to train on"
    )
    parser.add_argument(
        "--test", required=True, help="folder of held-out texts for the final bits per byte"
    )
    parser.add_argument(
        "--haystack", required=True, help="folder of held-out texts for the final needle accuracy"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for checkpoints, metrics and the model"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--workers", type=int, default=14, help="data loader processes")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the last complete checkpoint"
    )
    args = parser.parse_args(arguments)
    with _options_in_messages(), raised():
        run(args)


@contextmanager
def _options_in_messages() -> Iterator[None]:
    """Replaces keys of the configuration in the messages of errors by :data:`OPTIONS`."""
    try:
        yield
    except (UserError, Fault, KeyboardInterrupt) as error:
        for key, option in OPTIONS.items():
            error.args = tuple(str(part).replace(key, option) for part in error.args)
        raise


def run(args: argparse.Namespace) -> None:
    """Trains the model of :data:`PLAN` with the options ``args`` of the command line, and writes it
    with its figures.
    """
    one_of("device", args.device, ("auto", "cpu", "cuda"))
    device, folder = resolve_device(args.device), args.out / "model"
    artifacts.check_writable(folder, overwrite=True, marker=RECORD)
    tokenizer: Any = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    sources, heldout = read_sources(args.text), {"--test": args.test, "--haystack": args.haystack}
    check_unseen(sources, heldout)
    unseen = {
        option: encode(local_documents(option, path), tokenizer) for option, path in heldout.items()
    }
    texts = Texts(sources, tokenizer)
    check_lengths(unseen | texts.by_name(), PLAN)
    counts = {name: len(tokens) for name, tokens in texts.tokens.items()}
    print(f"tokens of text: {counts}, held out: {len(texts.dev)}", flush=True)

    # forked data workers would wait for threads that they lack
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    options = {
        "device": device,
        "workers": args.workers,
        "compiled": device.type == "cuda",
        "resume": args.resume,
    }
    with locked(folder):
        model, seconds = train(PLAN, texts, tokenizer, args.out, **options)
        # figures are those of the weights in the file; frequencies of RoPE stay exact
        for weight in model.parameters():
            weight.data = weight.half().float()
        record = {
            "plan": asdict(PLAN),
            "parameters": model.num_parameters(),
            "tokens": PLAN.tokens,
            "minutes": round(seconds / 60, 1),
            "versions": artifacts.versions(),
            "figures": heldout_figures(model, tokenizer, PLAN.stages[-1].seq_len, unseen),
        }
        with replace_folder(folder) as new:
            model.half().save_pretrained(new)
            tokenizer.save_pretrained(new)
            (new / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record["figures"], indent=2), flush=True)


def heldout_figures(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    tokens: Mapping[str, np.ndarray],
) -> dict[str, float]:
    """Returns the bits per byte of the ``tokens`` of ``--test`` and the accuracy on needles in
    those of ``--haystack``.
    """
    prompts = needle_prompts(tokens["--haystack"], seq_len, tokenizer, samples=TEST_PROMPTS, seed=2)
    figures = evaluate(model, tokens["--test"], seq_len, tokenizer, prompts)
    return {
        "test_bits_per_byte": figures.pop("bits_per_byte"),
        **{f"haystack_{name}": figures[name] for name in figures},
    }


if __name__ == "__main__":
    run_program(main)
