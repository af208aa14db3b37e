"""Block retrieval: training of a small Llama to find the block that contains all given letters.

    python -m msattn.trainer.mta.block_retrieval --attention plain --out FOLDER/plain
    python -m msattn.trainer.mta.block_retrieval --attention multi_token --out FOLDER/multi_token

This is the task that motivates Multi-Token Attention (arXiv 2504.00927). A problem is a sequence of blocks of distinct letters,
followed by a question: some letters that occur together in only one block. The answer is that whole block::

    h j n v t . q f j g t . w h f t b . ... # t q -> q f j g t

A head of plain attention finds blocks with one of the letters, and the matches have to be combined over several layers. The
model learns from scratch with either attention; initial weights, problems and their order are equal. ``metrics.jsonl`` in the
folder holds the curves, and ``result.json`` the final accuracy on unseen problems.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from msattn.trainer.config import TrackerConfig, TrainConfig
from msattn.trainer.data.tasks.sequences import Tokens
from msattn.trainer.mta.attention import convert
from msattn.trainer.training.loop import fit
from msattn.trainer.training.tracker import Tracker

ALPHABET = 26
BLOCK_END, QUESTION = ALPHABET, ALPHABET + 1  # the token ids after those of the letters
VOCAB_SIZE = ALPHABET + 2
# The fields of the plan that are command line options.
OPTIONS = ("blocks", "letters", "asked", "steps", "batch_size", "lr", "warmup_steps", "eval_every", "test_problems", "seed")


@dataclass(frozen=True)
class Plan:
    """All settings of an experiment.

    Attributes
    ----------
    blocks, letters, asked : blocks per problem, letters per block, letters per question.
    test_problems : unseen problems that are solved every ``eval_every`` steps and at the end.

    The other fields are those of :class:`msattn.trainer.config.TrainConfig` and ``LlamaConfig``.
    """

    attention: Literal["plain", "multi_token"] = "multi_token"
    blocks: int = 50
    letters: int = 5
    asked: int = 2
    architecture: dict[str, Any] = field(
        default_factory=lambda: {
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        }
    )
    steps: int = 4000
    batch_size: int = 128
    lr: float = 5e-4
    warmup_steps: int = 200
    log_every: int = 50
    eval_every: int = 500
    test_problems: int = 1000
    seed: int = 0


def problem(rng: np.random.Generator, *, blocks: int, letters: int, asked: int) -> Tokens:
    """Draws a problem: ``[blocks * (letters + 1) + 1 + asked + letters]`` tokens of blocks, question and answer.

    Raises
    ------
    ValueError : a question longer than a block, or blocks of the whole alphabet, which cannot be distinguished.
    """
    if not 1 <= asked <= letters < ALPHABET or blocks < 1:
        raise ValueError(f"blocks={blocks}, letters={letters}, asked={asked}: expected 1 <= asked <= letters < {ALPHABET}")
    text = _random_blocks(rng, blocks, letters)
    target = int(rng.integers(blocks))
    question = rng.permutation(text[target])[:asked]
    while True:
        holds_all = np.isin(text, question).sum(1) == asked
        holds_all[target] = False
        if not holds_all.any():
            break
        text[holds_all] = _random_blocks(rng, int(holds_all.sum()), letters)
    ended = np.concatenate([text, np.full((blocks, 1), BLOCK_END)], axis=1)
    return np.concatenate([ended.ravel(), [QUESTION], question, text[target]])


def _random_blocks(rng: np.random.Generator, count: int, letters: int) -> Tokens:
    return rng.random((count, ALPHABET)).argsort(1)[:, :letters]


class Problems(Dataset[dict[str, Tensor]]):
    """Dataset of ``count`` problems, ``input_ids`` int64 [T]; item i depends on (seed, i) alone."""

    def __init__(self, plan: Plan, count: int, *, seed: tuple[int, int]) -> None:
        self.sizes = {"blocks": plan.blocks, "letters": plan.letters, "asked": plan.asked}
        self.count = count
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.from_numpy(problem(np.random.default_rng((*self.seed, index)), **self.sizes))}


class Solver(nn.Module):
    """A language model with a loss on the letters of the answer."""

    def __init__(self, model: LlamaForCausalLM, letters: int) -> None:
        super().__init__()
        self.model = model
        self.letters = letters

    def logits(self, input_ids: Tensor) -> Tensor:
        """Returns the logits of the answer's tokens, fp32 [B, letters, vocabulary], with teacher forcing."""
        device = input_ids.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = self.model.model(input_ids=input_ids[:, :-1], use_cache=False).last_hidden_state
            return self.model.lm_head(hidden[:, -self.letters :]).float()

    def forward(self, input_ids: Tensor) -> dict[str, Any]:
        """Returns the mean loss (nats) of the answers in ``input_ids`` [B, T], and that of their first letters as a part.

        Only the first letter has to be found by the question; the others follow it in the block.
        """
        answers = input_ids[:, -self.letters :]
        losses = F.cross_entropy(self.logits(input_ids).transpose(1, 2), answers, reduction="none")
        return {"loss": losses.mean(), "parts": {"first_letter": losses[:, 0].mean().detach()}}


def build(plan: Plan) -> Solver:
    """Returns an untrained solver. Its weights depend on ``plan.seed`` and are equal for both kinds of attention."""
    config = LlamaConfig(
        **plan.architecture,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=plan.blocks * (plan.letters + 1) + 1 + plan.asked + plan.letters,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(plan.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    if plan.attention == "multi_token":
        convert(model, kernel=(plan.asked, 2 * plan.letters - 1))  # the question, and a block from any letter
    return Solver(model, plan.letters)


@torch.no_grad()
def accuracy(solver: Solver, problems: Problems, batch_size: int) -> dict[str, float]:
    """Returns the share of ``problems`` with a correct answer (``exact_match``) and the mean loss (``test_loss``)."""
    device = solver.model.device
    correct, loss = 0, 0.0
    for start in range(0, len(problems), batch_size):
        batch = [problems[index]["input_ids"] for index in range(start, min(start + batch_size, len(problems)))]
        ids = torch.stack(batch).to(device)
        logits, answers = solver.logits(ids), ids[:, -solver.letters :]
        # With teacher forcing all letters are correct if and only if the greedily decoded answer is.
        correct += int((logits.argmax(-1) == answers).all(-1).sum())
        loss += F.cross_entropy(logits.transpose(1, 2), answers, reduction="sum").item() / solver.letters
    return {"exact_match": correct / len(problems), "test_loss": loss / len(problems)}


def train(plan: Plan, out: Path, *, device: torch.device, workers: int = 0, resume: bool = False) -> dict[str, float]:
    """Trains by ``plan``, writes checkpoints and metrics to ``out`` and returns the last result of :func:`accuracy`."""
    solver = build(plan).to(device)
    problems = Problems(plan, plan.steps * plan.batch_size, seed=(plan.seed, 0))
    test = Problems(plan, plan.test_problems, seed=(plan.seed, 1))
    settings = TrainConfig(
        lr=plan.lr,
        steps=plan.steps,
        batch_size=plan.batch_size,
        micro_batch_size=plan.batch_size,
        warmup_steps=min(plan.warmup_steps, plan.steps),
        beta2=0.98,
        log_every=plan.log_every,
        eval_every=plan.eval_every,
        save_every=plan.eval_every,
        num_workers=workers,
    )
    with Tracker.start(
        TrackerConfig("none"), folder=out, run_name=f"block-retrieval-{plan.attention}", config=asdict(plan)
    ) as tracker:
        trained = fit(
            solver,
            problems,
            train=settings,
            folder=out,
            tracker=tracker,
            device=device,
            seed=plan.seed,
            resume=resume,
            evaluate=lambda: accuracy(solver, test, plan.batch_size),
        )
    result = {"plan": asdict(plan), "seconds": trained.seconds, "losses": trained.losses, "figures": trained.metrics}
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return trained.metrics


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m msattn.trainer.mta.block_retrieval",
        description="Train a small Llama to find the block that contains all given letters.",
    )
    parser.add_argument("--attention", choices=("plain", "multi_token"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and metrics")
    for name in OPTIONS:
        default = getattr(Plan(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"default {default}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=8, help="data loader processes")
    parser.add_argument("--resume", action="store_true", help="continue from the last complete checkpoint")
    options = parser.parse_args(arguments)

    plan = Plan(options.attention, **{name: getattr(options, name) for name in OPTIONS})
    device = torch.device(options.device)
    figures = train(plan, options.out, device=device, workers=options.workers, resume=options.resume)
    print(json.dumps(figures, indent=2), flush=True)


if __name__ == "__main__":
    main()
