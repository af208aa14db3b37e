"""Measures sparse and dense attention of a model that is split across GPUs; the tables of
docs/measurements.md, "Tensor parallelism".

    torchrun --nproc-per-node 4 docs/experiments/tensor_parallel.py \\
        model=llama3 model.path=FOLDER select.sparsity=0.9

takes the overrides of ``msattn eval``: the model's folder, and from ``eval.throughput`` the
lengths, the requests and their new tokens. Prompts are random tokens. Gate and classifier have
random weights, which cost as much as trained ones. Without ``torchrun``, one GPU is measured. Each
length has three rows:

    dense       transformers' ``generate``; with ``--engine generate_batch`` kernels over pages
    sparse      attached, with the share of the blocks and the number of buckets of ``msattn eval``
    every key   attached, with all blocks and all buckets: as dense attention, up to rounding

``generate`` answers only the first request; its rate counts new tokens after the prompt, while that
of ``generate_batch`` includes the prompts. ``equal`` counts the tokens of each answer before the
first one that differs from dense attention, and ``gap`` is the difference between dense attention's
two largest logits there. Rows, with all new tokens, are written to
``outputs/<model.name>/<name>/tensor_parallel/<engine>-<ranks>.json`` as they are measured.
"""

import json
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from msattn.trainer import models
from msattn.trainer.commands.compose import compose
from msattn.trainer.config import EvalRunConfig, SelectConfig
from msattn.trainer.errors import UserError, first_line, run_program
from msattn.trainer.evaluate.tasks import throughput
from msattn.trainer.evaluate.tasks.timing import ALWAYS_DENSE, cost, random_gate, random_router
from msattn.trainer.memory import release_memory
from msattn.trainer.models.chat import common_prefix
from msattn.trainer.models.parallel import head_shard
from msattn.trainer.models.timing import TokenClock
from msattn.trainer.ranks import is_main_rank, num_ranks
from msattn.trainer.serving.attach import Sparse, attach
from msattn.trainer.storage.lock import locked
from msattn.trainer.storage.replace import replace_file

ENGINES = ("generate", "generate_batch")
WARMUP_TOKENS = 4  # new tokens that are not timed
COLUMNS = (
    "attention",
    "tokens",
    "requests",
    "first token (s)",
    "new tokens/s",
    "GiB per GPU",
    "equal",
    "gap",
)
Attached = Callable[[], AbstractContextManager[Sparse | None]]


class Answers(NamedTuple):
    """New tokens of each request, their time and memory; ``gaps`` between the two largest logits of
    each token, if known.
    """

    tokens: list[list[int]]
    first_token_s: float
    tokens_per_s: float
    peak_mb: float
    gaps: list[float]


def measure(cfg: EvalRunConfig, engine: str, *, cuda_graphs: bool) -> Iterator[dict[str, Any]]:
    """Yields a row for each length, number of requests and kind of attention; every rank must
    iterate.
    """
    model = _load(cfg)
    settings, alone = cfg.eval.throughput, engine == "generate"
    for length, requests in product(settings.lengths, [1] if alone else settings.requests):
        prompts = throughput.random_prompts(model, requests, length, cfg.seed)
        dense: Answers | None = None
        for name, attached in _cases(cfg, model, alone=alone, cuda_graphs=cuda_graphs).items():
            release_memory()  # frees the last measurement's cache and graphs
            if alone:
                # kernels compile
                generate(model, attached, prompts[0][: max(1, length // 4)], WARMUP_TOKENS + 2)
                answers = generate(model, attached, prompts[0], settings.tokens)
            else:
                run = throughput.measure(model, attached, prompts, settings)
                answers = Answers(run.answers, run.first_token(0.5), run.rate, run.peak_mb, [])
            dense = dense or answers
            case = {
                "engine": engine,
                "attention": name,
                "ranks": num_ranks(),
                "length": length,
                "requests": requests,
            }
            yield case | answers._asdict() | _compared(answers, dense)


def _load(cfg: EvalRunConfig) -> PreTrainedModel:
    device = models.resolve_device(cfg.device)
    divided: dict[str, Any] = {"distributed_config": DistributedConfig(tp_size=num_ranks())}
    placed = divided if num_ranks() > 1 else {"device_map": {"": device}}
    dtype = models.resolve_dtype(cfg.dtype, device)
    try:
        model = AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=dtype, **placed)
    except (OSError, ValueError) as error:
        raise UserError(f"model.path={cfg.model.path}: {first_line(error)}") from error
    # refuses numbers of ranks that do not divide the heads; dense attention would fail with them
    head_shard(model)
    return model.eval().requires_grad_(False)


def _cases(
    cfg: EvalRunConfig, model: PreTrainedModel, *, alone: bool, cuda_graphs: bool
) -> dict[str, Attached]:
    """Returns a function for each kind of attention that attaches it, dense first."""
    torch.manual_seed(cfg.seed)  # every rank takes its heads of the same gate
    gate, routing = random_gate(cfg, model), random_router(cfg, model)
    served = {"gate": gate.gate, "qmodel": routing.router, "cuda_graphs": cuda_graphs}
    ((_, setting),) = routing.own_settings()
    everything = {
        "select": SelectConfig(sparsity=0.0),
        "probes": routing.router.num_buckets,
        "dense_layers": (),
    }
    sparse = {"select": gate.select, **routing.attach_options(setting)}
    return {
        "dense": nullcontext
        if alone
        else partial(attach, model, **served, **sparse, dense_below=ALWAYS_DENSE),
        "sparse": partial(attach, model, **served, **sparse, dense_below=0),
        "every key": partial(attach, model, **served, **everything, dense_below=0),
    }


@torch.no_grad()
def generate(model: Any, attached: Attached, prompt: list[int], new_tokens: int) -> Answers:
    """Returns the greedy answer of ``new_tokens`` tokens to one prompt, at least two more than
    :data:`WARMUP_TOKENS`.
    """
    ids, clock = torch.tensor([prompt], device=model.device), TokenClock()
    with attached(), cost(model.device) as spent:
        begin = time.perf_counter()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
            output_logits=True,
            return_dict_in_generate=True,
        )
    first, last = 1 + WARMUP_TOKENS, new_tokens  # the clock's first time is the prompt's
    rate = (last - first) / (clock.times[last] - clock.times[first])
    gaps = [_gap(logits) for logits in output.logits]
    answer = output.sequences[0, len(prompt) :].tolist()
    return Answers([answer], clock.times[1] - begin, rate, spent.peak_mb, gaps)


def _gap(logits: Tensor) -> float:
    largest, second = logits[0].float().topk(2).values.tolist()
    return largest - second


def _compared(answers: Answers, dense: Answers) -> dict[str, Any]:
    """Returns how many tokens of each answer equal dense attention's, and the ``gap`` at the first
    that differs, if known.
    """
    equal = [common_prefix(*pair) for pair in zip(answers.tokens, dense.tokens, strict=True)]
    return {
        "equal": equal,
        "gap": dense.gaps[equal[0]] if dense.gaps and equal[0] < len(dense.gaps) else None,
    }


def main() -> None:
    """Measures an engine, and prints its rows as they are measured."""
    parser = ArgumentParser(description="Measure a model that is split across GPUs.")
    parser.add_argument(
        "--engine", choices=ENGINES, default=ENGINES[0], help="engine that answers the prompts"
    )
    parser.add_argument("--eager", action="store_true", help="generate_batch without CUDA graphs")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of msattn eval")
    args = parser.parse_intermixed_args()
    cfg: EvalRunConfig = compose("eval", args.overrides)
    if cfg.eval.throughput.tokens < WARMUP_TOKENS + 2:
        raise UserError(
            f"eval.throughput.tokens={cfg.eval.throughput.tokens}: expected at least "
            f"{WARMUP_TOKENS + 2}"
        )
    path = cfg.folder / "tensor_parallel" / f"{args.engine}-{num_ranks()}.json"
    rows: list[dict[str, Any]] = []
    with locked(path):
        try:
            for row in measure(cfg, args.engine, cuda_graphs=not args.eager):
                rows.append(row)
                if is_main_rank():
                    print(
                        "  ".join(
                            f"{title} {cell}"
                            for title, cell in zip(COLUMNS, _cells(row), strict=True)
                        ),
                        flush=True,
                    )
                    with replace_file(path) as new:
                        new.write_text(json.dumps(rows) + "\n")
        except torch.OutOfMemoryError as error:
            raise UserError(
                "device=cuda: too little memory; reduce eval.throughput.lengths or "
                "eval.throughput.requests"
            ) from error


def _cells(row: dict[str, Any]) -> list[str]:
    figures = [row["first_token_s"], row["tokens_per_s"], row["peak_mb"] / 1024]
    equal = ", ".join(map(str, row["equal"])) + f" of {len(row['tokens'][0])}"
    gap = "" if row["gap"] is None else f"{row['gap']:.3g}"
    return [
        row["attention"],
        f"{row['length']:,}",
        str(row["requests"]),
        *(f"{figure:.4g}" for figure in figures),
        equal,
        gap,
    ]


if __name__ == "__main__":
    run_program(main)
