"""Finding the block that holds all the given letters: what multi-token attention can do in one look, from one command.

    python -m msattn.trainer.mta.block_retrieval --attention plain --out FOLDER/plain
    python -m msattn.trainer.mta.block_retrieval --attention multi_token --out FOLDER/multi_token

A sequence of blocks, each of a few different letters, then a question of some letters that stand together in one block alone:
the answer is that whole block (the task by which the paper motivates its attention)::

    h j n v t . q f j g t . w h f t b . ... # t q -> q f j g t

Plain attention finds the blocks with one letter or the other, and has to put the two together over several layers. A small
Llama learns the task from scratch, with either attention and everything else equal: first weights, problems, their order.
``metrics.jsonl`` in the folder holds the curves, ``result.json`` how well unseen problems are solved at the end.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from msattn.trainer.config import TrackerConfig, TrainConfig
from msattn.trainer.mta.attention import convert
from msattn.trainer.training.loop import fit
from msattn.trainer.training.tracker import Tracker

Tokens = NDArray[np.int64]

ALPHABET = 26
BLOCK_END, QUESTION = ALPHABET, ALPHABET + 1  # tokens after the letters'
VOCABULARY = ALPHABET + 2
# What the command line may change of the plan.
CHOSEN = ("blocks", "letters", "asked", "steps", "batch_size", "lr", "warmup_steps", "eval_every", "test_problems", "seed")


@dataclass(frozen=True)
class Plan:
    """Everything that decides what comes out.

    Attributes
    ----------
    blocks, letters, asked : blocks a problem, letters a block, letters a question.
    test_problems : unseen problems that are solved every ``eval_every`` steps and at the end.
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
    """``[blocks * (letters + 1) + 1 + asked + letters]`` tokens: the blocks, the question and, at the end, its answer.

    Raises
    ------
    ValueError : a question longer than a block, or blocks of all letters, which cannot be told apart.
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
    """``count`` problems as ``input_ids`` int64 [T]; item i depends on (seed, i) alone."""

    def __init__(self, plan: Plan, count: int, *, seed: tuple[int, int]) -> None:
        self.sizes = {"blocks": plan.blocks, "letters": plan.letters, "asked": plan.asked}
        self.count = count
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.from_numpy(problem(np.random.default_rng((*self.seed, index)), **self.sizes))}


class Solver(nn.Module):
    """A language model and its loss on the answers' letters."""

    def __init__(self, model: LlamaForCausalLM, letters: int) -> None:
        super().__init__()
        self.model = model
        self.letters = letters

    def logits(self, input_ids: Tensor) -> Tensor:
        """fp32 [B, letters, vocabulary], at the answer's tokens, each predicted from what stands before it."""
        device = input_ids.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = self.model.model(input_ids=input_ids[:, :-1], use_cache=False).last_hidden_state
            return self.model.lm_head(hidden[:, -self.letters :]).float()

    def forward(self, input_ids: Tensor) -> dict[str, Any]:
        """Mean loss (nats) of the answers in ``input_ids`` [B, T]; ``parts``: of their first letters, the hard ones."""
        answers = input_ids[:, -self.letters :]
        losses = F.cross_entropy(self.logits(input_ids).transpose(1, 2), answers, reduction="none")
        return {"loss": losses.mean(), "parts": {"first_letter": losses[:, 0].mean().detach()}}


def build(plan: Plan) -> Solver:
    """The untrained solver, its weights drawn from ``plan.seed``, the same for both kinds of attention."""
    config = LlamaConfig(
        **plan.architecture,
        vocab_size=VOCABULARY,
        max_position_embeddings=plan.blocks * (plan.letters + 1) + 1 + plan.asked + plan.letters,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(plan.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    if plan.attention == "multi_token":
        convert(model, kernel=(plan.asked, 2 * plan.letters - 1))  # all that is asked, and a block from any of its letters
    return Solver(model, plan.letters)


@torch.no_grad()
def accuracy(solver: Solver, problems: Problems, batch_size: int) -> dict[str, float]:
    """Share of ``problems`` whose whole answer is right (``exact_match``) and the mean loss on them (``test_loss``)."""
    device = solver.model.device
    right, loss = 0, 0.0
    for start in range(0, len(problems), batch_size):
        batch = [problems[index]["input_ids"] for index in range(start, min(start + batch_size, len(problems)))]
        ids = torch.stack(batch).to(device)
        logits, answers = solver.logits(ids), ids[:, -solver.letters :]
        # Each guess is made with the right letters before it: all are right if and only if greedy decoding is.
        right += int((logits.argmax(-1) == answers).all(-1).sum())
        loss += F.cross_entropy(logits.transpose(1, 2), answers, reduction="sum").item() / solver.letters
    return {"exact_match": right / len(problems), "test_loss": loss / len(problems)}


def train(plan: Plan, out: Path, *, device: torch.device, workers: int = 0, resume: bool = False) -> dict[str, float]:
    """Run ``plan``; checkpoints and figures go to ``out``. Returns the last figures of :func:`accuracy`."""
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
    with Tracker.start(TrackerConfig("none"), folder=out, run_name=f"letters-{plan.attention}", config=asdict(plan)) as tracker:
        summary = fit(
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
    result = {"plan": asdict(plan), "seconds": summary.seconds, "losses": summary.losses, "figures": summary.metrics}
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return summary.metrics


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the task."""
    parser = argparse.ArgumentParser(
        prog="python -m msattn.trainer.mta.block_retrieval",
        description="Learn to find the block that holds all the given letters.",
    )
    parser.add_argument("--attention", choices=("plain", "multi_token"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and figures")
    for name in CHOSEN:
        default = getattr(Plan(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"default {default}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=8, help="processes that make problems")
    parser.add_argument("--resume", action="store_true", help="go on from the last complete checkpoint")
    options = parser.parse_args(arguments)

    plan = Plan(options.attention, **{name: getattr(options, name) for name in CHOSEN})
    device = torch.device(options.device)
    figures = train(plan, options.out, device=device, workers=options.workers, resume=options.resume)
    print(json.dumps(figures, indent=2), flush=True)


if __name__ == "__main__":
    main()
