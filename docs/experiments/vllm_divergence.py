"""Compares the next tokens of an engine of vLLM with those of another one: of msattn with a cache
in FP8 with one in bf16, or with vLLM's own attention. The figures of docs/serving.md, "Caches in
FP8".

    python docs/experiments/vllm_divergence.py MODEL TEXT --msattn '{...}' --save bf16.pt
    python docs/experiments/vllm_divergence.py MODEL TEXT --msattn '{...}' --against bf16.pt \\
        --engine '{"kv_cache_dtype": "fp8"}'

The first tokens of a text are asked for the next one, at places over its length: once as a prompt,
whose last chunk is read like prompts, and once when all but the last token are cached, which is
then read like a new one.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import vllm_speed as speed
from rich.console import Console
from torch import Tensor

from msattn.trainer.config.values import require
from msattn.trainer.errors import run_program
from msattn.trainer.evaluate.report.tables import with_columns

PAGE = 64  # tokens; whole pages of a prompt are cached
KINDS = ("prompts", "new tokens")


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    options = None if args.msattn is None else speed.mapping("--msattn", args.msattn)
    engine = speed.mapping("--engine", args.engine)
    require(args.places >= 1, "--places", args.places, "expected at least 1")
    require(
        args.length > PAGE * args.places,
        "--length",
        args.length,
        f"expected more than {PAGE} tokens for each of the {args.places} --places",
    )
    tokens = speed.tokens_of(args.model, Path(args.text), args.length, "text")
    limits = {"max_logprobs": -1, "block_size": PAGE, "enable_prefix_caching": True}
    llm = speed.start(args.model, limits | engine, options, args.length + 1, 1)
    found, shares = _distributions(llm, tokens, args.places)
    if args.save:
        torch.save(found, args.save)
    if args.against:
        _show(torch.load(args.against, weights_only=True), found, shares)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare the next tokens of two engines.")
    parser.add_argument("model", help="folder or Hub id of a model")
    parser.add_argument("text", help="file of at least --length tokens")
    parser.add_argument(
        "--msattn",
        help='JSON, as additional_config["msattn"] of vLLM; without it, its own attention',
    )
    parser.add_argument("--engine", default="{}", help="JSON, parameters of vLLM's LLM")
    parser.add_argument("--length", type=int, default=32768, help="tokens of the text")
    parser.add_argument("--places", type=int, default=64, help="places where tokens are compared")
    parser.add_argument("--save", help="file for the log-probabilities of this engine")
    parser.add_argument("--against", help="file of another engine, for the same text and places")
    return parser


def _distributions(llm: Any, tokens: list[int], places: int) -> tuple[Tensor, list[float | None]]:
    """Returns the log-probabilities of the next token, of prompts and of new tokens
    ``[2, places, vocabulary]``, and the shares of blocks left out and of keys read.
    """
    from vllm.sampling_params import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, detokenize=False)
    size = len(tokens) // places // PAGE * PAGE
    found = torch.full((2, places, llm.model_config.get_vocab_size()), -torch.inf)
    for place in range(places):
        prompt = {"prompt_token_ids": tokens[: size * (place + 1) + 1]}
        for kind in range(2):
            (answer,) = llm.generate(prompt, sampling, use_tqdm=False)[0].outputs
            each = answer.logprobs[0]
            found[kind, place, list(each)] = torch.tensor([x.logprob for x in each.values()])
    read = speed.statistics(llm)
    return found, [read.get("sparsity"), read.get("selectivity")]


def _show(base: Tensor, found: Tensor, shares: list[float | None]) -> None:
    require(
        base.shape == found.shape, "--against", list(base.shape), f"expected {list(found.shape)}"
    )
    terms = base.exp() * (base - found).masked_fill(base == -torch.inf, 0)
    divergence = terms.sum(-1)
    same = (base.argmax(-1) == found.argmax(-1)).float()
    columns = ["", "KL, mean", "KL, largest", "same first choice", "left out or read"]
    table = with_columns(f"{found.shape[1]} places of each kind", columns, [""])
    for kind, name in enumerate(KINDS):
        share = shares[kind]
        table.add_row(
            name, f"{divergence[kind].mean():.3g}", f"{divergence[kind].max():.3g}",
            f"{same[kind].mean():.3f}", "" if share is None else f"{share:.3f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    run_program(main)
