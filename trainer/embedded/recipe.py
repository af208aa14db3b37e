"""How the embedded model is made, from one command:

    python -m msattn.trainer.embedded.recipe --text BOOKS --out FOLDER

Text and retrieval tasks in three stages of growing length: retrieval appears, suddenly, in short sequences full of tasks;
the long stage carries it to 4096 tokens and spends its steps on text. Every stage runs through :func:`msattn.trainer.training.loop.fit`
and is a continuation of the one before; ``--resume`` goes on after a kill, to the same model. The result is
``FOLDER/model``; ``FOLDER/metrics.jsonl`` and ``FOLDER/model/training.json`` say how it went.
"""

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
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
from msattn.trainer.data.retrieval import ANSWER_WEIGHT, TASKS, Crop, PhraseEncoder, Tokens, needle_prompt
from msattn.trainer.data.sources import Document, documents
from msattn.trainer.embedded.tokenizer import load_tokenizer, train_tokenizer
from msattn.trainer.models.tap import use_dense_attention
from msattn.trainer.training.loop import fit
from msattn.trainer.training.tracker import Tracker

SHIPPED = Path(__file__).parent / "model"
LIBRARY_SHARE = 0.2  # of the text, by tokens; the rest is books
DEV_SHARE = 0.02  # the end of every book is kept for the figures that are printed while training
DEV_PROMPTS = 64
TEST_PROMPTS = 200


@dataclass(frozen=True)
class Stage:
    """One stretch of training at one length; ``shares`` of its sequences are tasks, the rest is text alone."""

    seq_len: int
    batch_size: int
    steps: int
    shares: dict[str, float]
    schedule: str = "constant_with_warmup"
    warmup_steps: int = 100


@dataclass(frozen=True)
class Plan:
    """Everything that decides what comes out, besides the text."""

    stages: tuple[Stage, ...] = (
        Stage(512, 256, 800, {"needles": 0.2, "pairs": 0.15, "copies": 0.15}, warmup_steps=300),
        Stage(1024, 128, 200, {"needles": 0.2, "pairs": 0.1, "copies": 0.1}),
        Stage(4096, 48, 400, {"needles": 0.16, "pairs": 0.03, "copies": 0.05}, schedule="cosine"),
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
    """Tokens to train on, and the books' ends to watch.

    Attributes
    ----------
    books, library, dev : int32 [n].
    """

    def __init__(self, books: Iterable[Document], library: Iterable[Document], tokenizer: PreTrainedTokenizerFast) -> None:
        whole = list(books)
        cut = [int(len(book.text) * (1 - DEV_SHARE)) for book in whole]
        heads = (Document(book.name, book.text[:at]) for book, at in zip(whole, cut, strict=True))
        tails = (Document(book.name, book.text[at:]) for book, at in zip(whole, cut, strict=True))
        self.books = encode(heads, tokenizer)
        self.dev = encode(tails, tokenizer)
        self.library = encode(iter(library), tokenizer)

    def crop(self, rng: np.random.Generator, length: int) -> Tokens:
        """``length`` successive training tokens, from anywhere."""
        return crop_of(self.library if rng.random() < LIBRARY_SHARE else self.books)(rng, length)


def crop_of(tokens: np.ndarray) -> Crop:
    """A function that cuts so many successive tokens out of ``tokens``."""

    def crop(rng: np.random.Generator, length: int) -> Tokens:
        start = int(rng.integers(len(tokens) - length + 1))
        return tokens[start : start + length].astype(np.int64)

    return crop


NeedlePrompts = tuple[Tokens, int]  # [samples, T], and how many tokens at the end of each are the answer


class Mixture(Dataset[dict[str, Tensor]]):
    """The sequences of one stage: ``input_ids`` int32 and ``weights`` float32, [seq_len + 1]; item ``i`` depends on (seed,
    stage, i) alone."""

    def __init__(self, texts: Texts, phrases: PhraseEncoder, stage: Stage, *, seed: tuple[int, int], bos: int) -> None:
        self.texts = texts
        self.phrases = phrases
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
            ids, weights = TASKS[names[choice]](rng, length, self.texts.crop, self.phrases, ANSWER_WEIGHT)
        else:
            ids, weights = self.texts.crop(rng, length), np.ones(length, np.float32)
        if rng.random() < 0.5:
            ids[0] = self.bos  # the model serves with and without one
        return {"input_ids": torch.from_numpy(ids.astype(np.int32)), "weights": torch.from_numpy(weights)}


class WeightedLanguageModel(nn.Module):
    """Next-token loss under the tasks' weights; forward and loss in one graph, for ``torch.compile``."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, weights: Tensor) -> dict[str, Any]:
        """Mean loss (nats) of tokens 1..T of ``input_ids`` [B, T + 1] under their weights; ``parts``: the plain means over
        text and over answers."""
        ids = input_ids.long()
        with half_precision(ids.device):
            hidden = self.model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden)
        losses = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        weights = weights[:, 1:].flatten()
        parts = {"text": _mean(losses, weights == 1.0), "answers": _mean(losses, weights > 1.0)}
        return {"loss": (losses * weights).sum() / weights.sum(), "parts": {k: v.detach() for k, v in parts.items()}}


def _mean(values: Tensor, where: Tensor) -> Tensor:
    return (values * where).sum() / where.sum().clamp(min=1)


def half_precision(device: torch.device) -> torch.autocast:
    """bfloat16 autocast on a GPU; nothing on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def build_model(plan: Plan, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model, its weights drawn from ``plan.seed``."""
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
    """Bits a UTF-8 byte of ``tokens``, cut into chunks of ``seq_len`` of which the first token is given."""
    chunks = tokens[: len(tokens) // seq_len * seq_len].reshape(-1, seq_len)
    nats, device = 0.0, model.device
    for batch in _batches(chunks, seq_len):
        ids = torch.from_numpy(batch.astype(np.int64)).to(device)
        with half_precision(device):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        nats += F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum").item()
    texts = tokenizer.batch_decode([*chunks[:, 1:].tolist()], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return nats / np.log(2) / sum(len(text.encode()) for text in texts)


@torch.no_grad()
def needle_accuracy(model: LlamaForCausalLM, prompts: np.ndarray, answer_tokens: int) -> float:
    """Share of ``prompts`` [n, T] whose last ``answer_tokens`` are all the most likely next tokens."""
    right, device = 0, model.device
    for batch in _batches(prompts, prompts.shape[1]):
        ids = torch.from_numpy(batch).to(device)
        with half_precision(device):
            hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[:, -answer_tokens:]
            guesses = model.lm_head(hidden).argmax(-1)
        right += int((guesses == ids[:, -answer_tokens:]).all(-1).sum())
    return right / len(prompts)


def _batches(rows: np.ndarray, seq_len: int) -> Iterable[np.ndarray]:
    size = max(1, 131072 // seq_len)
    return (rows[start : start + size] for start in range(0, len(rows), size))


def prompts_in(tokens: np.ndarray, length: int, tokenizer: Any, *, samples: int, seed: int) -> dict[int, NeedlePrompts]:
    """``samples`` prompts of ``length`` tokens, with one and with eight needles, in crops of ``tokens``."""
    prompts: dict[int, NeedlePrompts] = {}
    for count in (1, 8):
        rngs = (np.random.default_rng((seed, count, number)) for number in range(samples))
        made = [needle_prompt(rng, length, crop_of(tokens), tokenizer, count=count) for rng in rngs]
        prompts[count] = np.stack([ids for ids, _ in made]), made[0][1]
    return prompts


def quality(
    model: LlamaForCausalLM, tokens: np.ndarray, seq_len: int, tokenizer: Any, prompts: dict[int, NeedlePrompts]
) -> dict[str, float]:
    """Bits per byte of ``tokens`` at ``seq_len`` and the accuracy on ``prompts``."""
    figures = {f"needles_{count}": needle_accuracy(model, *prompts[count]) for count in prompts}
    return {"bits_per_byte": bits_per_byte(model, tokens, seq_len, tokenizer), **figures}


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
    """Run the stages of ``plan``; checkpoints go to ``out/stage-N``, figures to ``out/metrics.jsonl``."""
    model = build_model(plan, tokenizer).to(device)  # pyright: ignore[reportArgumentType]
    module = WeightedLanguageModel(model)
    phrases = PhraseEncoder(tokenizer)
    with Tracker.start(TrackerConfig("none"), folder=out, run_name="embedded", config=asdict(plan)) as tracker:
        for number, stage in enumerate(plan.stages):
            print(f"stage {number + 1}: {stage}", flush=True)
            prompts = prompts_in(texts.dev, stage.seq_len, tokenizer, samples=DEV_PROMPTS, seed=1)
            data = Mixture(texts, phrases, stage, seed=(plan.seed, number), bos=cast(int, tokenizer.bos_token_id))
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
                evaluate=partial(quality, model, texts.dev, stage.seq_len, tokenizer, prompts),
            )
            tracker.offset += stage.steps
    return model


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> LlamaForCausalLM:
    """Write weights in fp16 and the tokenizer into ``folder``; returns the model as it will be read back."""
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.float()


def held_out_figures(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seq_len: int, test: str | None, haystack: str | None
) -> dict[str, float]:
    """Bits per byte of the texts in ``test``, needle accuracy in those of ``haystack``: folders that were never trained on."""
    figures: dict[str, float] = {}
    if test is not None:
        figures["test_bits_per_byte"] = bits_per_byte(model, encode(local(test), tokenizer), seq_len, tokenizer)
    if haystack is not None:
        prompts = prompts_in(encode(local(haystack), tokenizer), seq_len, tokenizer, samples=TEST_PROMPTS, seed=2)
        figures |= {f"haystack_needles_{count}": needle_accuracy(model, *prompts[count]) for count in prompts}
    return figures


def local(path: str) -> Iterator[Document]:
    """All documents under ``path``."""
    return documents(DataConfig("text", path=path, heldout_path=path), heldout=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the recipe."""
    parser = argparse.ArgumentParser(prog="python -m msattn.trainer.embedded.recipe", description="Train the embedded model.")
    parser.add_argument("--text", nargs="+", required=True, help="folders of books to train on")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints, figures and the model")
    parser.add_argument("--test", help="folder of texts for the final bits per byte")
    parser.add_argument("--haystack", help="folder of texts for the final needle accuracy")
    parser.add_argument("--steps", nargs="+", type=int, help="optimizer steps of each stage, instead of the plan's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--resume", action="store_true", help="go on from the last complete checkpoint")
    asked = parser.parse_args(arguments)

    plan = Plan(seed=asked.seed)
    if asked.steps is not None:
        if len(asked.steps) != len(plan.stages):
            parser.error(f"--steps: {len(plan.stages)} numbers, one a stage")
        plan = replace(plan, stages=tuple(replace(s, steps=n) for s, n in zip(plan.stages, asked.steps, strict=True)))
    started = time.time()
    # The code-* files repeat modules of the library, those too that are held out.
    books = [book for folder in asked.text for book in local(folder) if not book.name.startswith("code-")]
    library = list(documents(DataConfig("stdlib"), heldout=False))
    if (SHIPPED / "tokenizer.json").exists():
        tokenizer = load_tokenizer(SHIPPED)
    else:
        tokenizer = train_tokenizer(document.text for document in [*books, *library])
    texts = Texts(books, library, tokenizer)
    print(f"{len(texts.books)} tokens of books, {len(texts.library)} of the library, {len(texts.dev)} to watch", flush=True)

    device = torch.device(asked.device)
    compiled = device.type == "cuda" and not asked.no_compile
    model = train(
        plan, texts, tokenizer, asked.out, device=device, workers=asked.workers, compiled=compiled, resume=asked.resume
    )
    facts = {
        "plan": asdict(plan),
        "parameters": model.num_parameters(),
        "tokens": sum(stage.steps * stage.batch_size * stage.seq_len for stage in plan.stages),
        "minutes": round((time.time() - started) / 60, 1),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    model = save(model, tokenizer, asked.out / "model")
    facts["figures"] = held_out_figures(model, tokenizer, plan.stages[-1].seq_len, asked.test, asked.haystack)
    (asked.out / "model" / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts["figures"], indent=2), flush=True)


if __name__ == "__main__":
    main()
