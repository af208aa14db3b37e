"""Figures of a teacher: bits per byte of text, and needles in wordings that it has not seen."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from msattn.trainer.data.tasks.sequences import TokenIds, crop_from, needle_prompt
from msattn.trainer.data.tasks.wordings import HELD_OUT

TEST_PROMPTS = 200

NeedlePrompts = tuple[TokenIds, int]  # prompts [samples, T], and the number of answer tokens at the end of each


def bfloat16_autocast(device: torch.device) -> torch.autocast:
    """Returns bfloat16 autocast on a GPU; on a CPU it is disabled."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, tokens: np.ndarray, seq_len: int, tokenizer: Any) -> float:
    """Returns the bits per UTF-8 byte of ``tokens`` in chunks of ``seq_len``, whose first tokens are not predicted."""
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
    """Returns the share of ``prompts [n, T]`` whose last ``answer_tokens`` tokens are all the most likely ones."""
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


def needle_prompts(tokens: np.ndarray, length: int, tokenizer: Any, *, samples: int, seed: int) -> dict[int, NeedlePrompts]:
    """Returns ``samples`` prompts of ``length`` tokens with one needle and with eight, in held-out wordings in turn."""
    prompts: dict[int, NeedlePrompts] = {}
    for count in (1, 8):
        made = []
        for number in range(samples):
            rng, wording = np.random.default_rng((seed, count, number)), HELD_OUT[number % len(HELD_OUT)]
            made.append(needle_prompt(rng, length, crop_from(tokens), tokenizer, wording, count=count))
        prompts[count] = np.stack([each.ids for each in made]), made[0].answer_tokens
    return prompts


def evaluate(
    model: LlamaForCausalLM, tokens: np.ndarray, seq_len: int, tokenizer: Any, prompts: dict[int, NeedlePrompts]
) -> dict[str, float]:
    """Returns the bits per byte of ``tokens`` and the accuracy on ``prompts``."""
    accuracy = {f"needles_{count}": needle_accuracy(model, *prompts[count]) for count in prompts}
    return {"bits_per_byte": bits_per_byte(model, tokens, seq_len, tokenizer), **accuracy}


def held_out_metrics(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seq_len: int, heldout: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Returns bits per byte of ``--test`` and needle accuracy in ``--haystack``, of those that ``heldout`` has."""
    metrics: dict[str, float] = {}
    if "--test" in heldout:
        metrics["test_bits_per_byte"] = bits_per_byte(model, heldout["--test"], seq_len, tokenizer)
    if "--haystack" in heldout:
        prompts = needle_prompts(heldout["--haystack"], seq_len, tokenizer, samples=TEST_PROMPTS, seed=2)
        metrics |= {f"haystack_needles_{count}": needle_accuracy(model, *prompts[count]) for count in prompts}
    return metrics
