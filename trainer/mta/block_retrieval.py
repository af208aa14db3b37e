"""Block retrieval, the task that motivates Multi-Token Attention (arXiv 2504.00927), and a small
Llama that learns it.

A problem is a sequence of blocks of distinct letters, followed by a question: some letters that
occur together in only one block. The answer is that whole block::

    h j n v t . q f j g t . w h f t b . ... # t q -> q f j g t

A head of plain attention finds blocks with one of the letters; the matches have to be combined over
several layers.
"""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from msattn.kernels.types import ConvMask
from msattn.trainer.config.train import MtaConfig
from msattn.trainer.data.tasks.sequences import TokenIds
from msattn.trainer.mta.attention import convert

ALPHABET = 26
BLOCK_END, QUESTION = ALPHABET, ALPHABET + 1  # the token ids after those of the letters
VOCAB_SIZE = ALPHABET + 2


def problem(rng: np.random.Generator, *, blocks: int, letters: int, asked: int) -> TokenIds:
    """Draws a problem: ``[blocks * (letters + 1) + 1 + asked + letters]`` tokens of blocks,
    question and answer.

    Raises ValueError for a question longer than a block, or blocks of the whole alphabet, which
    cannot be distinguished.
    """
    if not 1 <= asked <= letters < ALPHABET or blocks < 1:
        raise ValueError(
            f"blocks={blocks}, letters={letters}, asked={asked}: expected 1 <= asked <= letters < "
            f"{ALPHABET}"
        )
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


def _random_blocks(rng: np.random.Generator, count: int, letters: int) -> TokenIds:
    return rng.random((count, ALPHABET)).argsort(1)[:, :letters]


class Problems(Dataset[dict[str, Tensor]]):
    """Dataset of ``count`` problems, ``input_ids`` int64 [T]; item i depends only on (seed, i)."""

    def __init__(self, cfg: MtaConfig, count: int, *, seed: tuple[int, int]) -> None:
        self.sizes = {"blocks": cfg.blocks, "letters": cfg.letters, "asked": cfg.asked}
        self.count = count
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": torch.from_numpy(
                problem(np.random.default_rng((*self.seed, index)), **self.sizes)
            )
        }


class Solver(nn.Module):
    """A language model with a loss on the letters of the answer."""

    def __init__(self, model: LlamaForCausalLM, letters: int) -> None:
        super().__init__()
        self.model = model
        self.letters = letters

    def logits(self, input_ids: Tensor) -> Tensor:
        """Returns the logits of the answer's tokens, fp32 [B, letters, vocabulary], with teacher
        forcing.
        """
        device = input_ids.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = self.model.model(
                input_ids=input_ids[:, :-1], use_cache=False
            ).last_hidden_state
            return self.model.lm_head(hidden[:, -self.letters :]).float()

    def forward(self, input_ids: Tensor) -> dict[str, Any]:
        """Returns the mean loss (nats) of the answers in ``input_ids`` [B, T], and the loss of
        their first letters as a part.

        Only the first letter must be found with the question; the others follow it in the block.
        """
        answers = input_ids[:, -self.letters :]
        losses = F.cross_entropy(self.logits(input_ids).transpose(1, 2), answers, reduction="none")
        return {"loss": losses.mean(), "parts": {"first_letter": losses[:, 0].mean().detach()}}


def build(cfg: MtaConfig, seed: int) -> Solver:
    """Returns an untrained solver. Its weights depend on ``seed`` and are equal for both kinds of
    attention.
    """
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=cfg.hidden_size,
        intermediate_size=4 * cfg.hidden_size,
        num_hidden_layers=cfg.num_layers,
        num_attention_heads=cfg.num_heads,
        num_key_value_heads=cfg.num_heads,
        max_position_embeddings=cfg.blocks * (cfg.letters + 1) + 1 + cfg.asked + cfg.letters,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    )
    if cfg.attention == "multi_token":
        # The kernel covers the question; or a block, starting from any letter.
        convert(model, kernel=(cfg.asked, 2 * cfg.letters - 1), mask=cast(ConvMask, cfg.mask))
    return Solver(model, cfg.letters)


@torch.no_grad()
def accuracy(solver: Solver, problems: Problems, batch_size: int) -> dict[str, float]:
    """Returns the share of ``problems`` with a correct answer (``exact_match``) and the mean loss
    (``test_loss``).
    """
    device = solver.model.device
    correct, loss = 0, 0.0
    for start in range(0, len(problems), batch_size):
        batch = [
            problems[index]["input_ids"]
            for index in range(start, min(start + batch_size, len(problems)))
        ]
        ids = torch.stack(batch).to(device)
        logits, answers = solver.logits(ids), ids[:, -solver.letters :]
        # With teacher forcing all letters are correct if and only if the greedily decoded answer
        # is.
        correct += int((logits.argmax(-1) == answers).all(-1).sum())
        loss += (
            F.cross_entropy(logits.transpose(1, 2), answers, reduction="sum").item()
            / solver.letters
        )
    return {"exact_match": correct / len(problems), "test_loss": loss / len(problems)}
