"""Compares sparse attention inside vLLM with vLLM's own attention, on the same requests; the table
of docs/serving.md, "Speed in vLLM".

    python docs/experiments/vllm_speed.py MODEL \\
        --msattn '{"gate": "outputs/my/base", "qmodel": "outputs/my/base"}'

The requests are random tokens, or parts of a ``--text``, and arrive at once; one more is measured
alone. With ``--shared`` as many requests follow that begin with the same tokens, the first of them
alone. Each engine runs in its own process, so that the GPU's memory is free, with vLLM's defaults
except for the limits of lengths and requests. With ``--engine '{"load_format": "dummy"}'`` weights
are random, and MODEL needs only a config.json. Drafts (``speculative_config``) need a text.
"""

import argparse
import json
import os
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields
from importlib.util import find_spec
from inspect import signature
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from msattn.trainer.config.values import nearest, require
from msattn.trainer.errors import Fault, UserError, first_line, run_program
from msattn.trainer.evaluate.report.tables import with_columns
from msattn.trainer.serving.engines.vllm.engine import SECTION
from msattn.trainer.storage.lock import locked
from msattn.trainer.storage.replace import replace_file

FIGURES = {  # key: title
    "tokens_per_s": "new tokens a second, all requests",
    "first_token_p50_s": "time to first token, p50 (s)",
    "first_token_p99_s": "time to first token, p99 (s)",
    "token_ms": "a new token of each request, last prompt done (ms)",
    "alone_first_token_s": "alone: time to first token (s)",
    "alone_tokens_per_s": "alone: new tokens a second",
    "sparsity": "share of the blocks left out by prompts",
    "selectivity": "share of the keys read by new tokens",
    "accepted": "share of the drafts that are accepted",
    "shared_first_token_s": "a prefix is new: time to first token (s)",
    "shared_later_first_token_p50_s": "others with it at once: time to first token, p50 (s)",
    "shared_cached": "share of their tokens found in the cache",
    "shared_sparsity": "share of the blocks left out by their others",
}
LESS_MEMORY = (
    "a smaller --length, fewer --requests or a lower gpu_memory_utilization in --engine need less"
)
WARM_UP = 4  # new tokens of the warm-up requests, which compile kernels


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    options, engine = mapping("--msattn", args.msattn), mapping("--engine", args.engine)
    for name in ("length", "requests", "new"):
        least = 1 + (name == "new")  # the time of a token is that between two
        require(
            getattr(args, name) >= least,
            f"--{name}",
            getattr(args, name),
            f"expected at least {least}",
        )
    fits = 0 <= args.shared < args.length and (not args.shared or args.requests > 1)
    require(
        fits,
        "--shared",
        args.shared,
        "expected 0 or, with at least 2 --requests, a number below --length",
    )
    if find_spec("vllm") is None:
        raise UserError(
            "vLLM is not installed; run pip install 'msattn[vllm]', in an environment of its own"
        )
    # if it is a link, the target is replaced
    file = Path(args.json).resolve() if args.json else None
    ok = file is None or ((file.is_file() or not file.exists()) and os.access(file.parent, os.W_OK))
    require(ok, "--json", file, "expected a file in a folder that can be written")
    number = args.length * (args.requests + 1)
    text = tokens_of(args.model, Path(args.text), number, "--text") if args.text else None
    requests = args.length, args.requests, args.new, args.shared, text
    found = {
        name: _in_process(args.model, engine, given, *requests)
        for name, given in (("vLLM", None), ("msattn", options))
    }
    _show(found, f"{args.requests} requests of {args.length:,} tokens, {args.new} new tokens each")
    if file is not None:
        with locked(file), replace_file(file) as new:
            new.write_text(
                json.dumps({**vars(args), "figures": found}, indent=2) + "\n", encoding="utf-8"
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare two engines.")
    parser.add_argument("model", help="folder or Hub id of a model")
    parser.add_argument(
        "--msattn", required=True, help='JSON, as additional_config["msattn"] of vLLM'
    )
    parser.add_argument(
        "--engine",
        default="{}",
        help='JSON, parameters of vLLM\'s LLM, e.g. {"tensor_parallel_size": 2}',
    )
    parser.add_argument("--length", type=int, default=32768, help="tokens per prompt")
    parser.add_argument("--requests", type=int, default=8, help="requests that arrive at once")
    parser.add_argument("--new", type=int, default=128, help="new tokens per request")
    parser.add_argument(
        "--text",
        help="file whose tokens are the prompts, one after the other; without it they are random",
    )
    parser.add_argument(
        "--shared",
        type=int,
        default=0,
        help="also measure requests that share this many first tokens",
    )
    parser.add_argument("--json", help="file to write the figures to")
    return parser


def mapping(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"{name} {text:.80}: no JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{name} {text:.80}: expected a JSON object")
    return value


def tokens_of(model: str, text: Path, number: int, name: str) -> list[int]:
    """Returns the first tokens of a text. Raises UserError that names an argument if it has
    fewer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        tokens = tokenizer(text.read_text(encoding="utf-8"))["input_ids"]
    except (OSError, ValueError) as error:
        raise UserError(f"{model}, {text}: {error}") from error
    require(
        len(tokens) >= number,
        name,
        text,
        f"it has {len(tokens):,} tokens, of which {number:,} are needed",
    )
    return tokens[:number]


def _in_process(*arguments: Any) -> dict[str, float | None]:
    """Returns :func:`measure` of the arguments, computed in a separate process."""
    name = "vLLM" if arguments[2] is None else "msattn"
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found = pool.submit(_measured, *arguments).result()
    except BrokenProcessPool as error:
        raise UserError(
            f"{name}: the engine's process ended, probably for lack of memory; {LESS_MEMORY}"
        ) from error
    if isinstance(found, Exception):
        found.args = (f"{name}: {found}",)
        raise found
    return found


def _measured(*arguments: Any) -> dict[str, float | None] | UserError | Fault:
    """Returns :func:`measure`; turns its error into one of ours, because not all of vLLM's can be
    sent to another process.
    """
    from torch import OutOfMemoryError

    try:
        return measure(*arguments)
    except (MemoryError, OutOfMemoryError) as error:
        return UserError(f"too little memory ({first_line(error)}); {LESS_MEMORY}")
    except (ValueError, OSError) as error:  # OSError: there is no such model
        return UserError(first_line(error))
    except Exception as error:
        fault = Fault(f"{type(error).__name__}: {first_line(error)}")
        fault.add_note(traceback.format_exc().rstrip())
        return fault


def measure(
    model: str,
    engine: Mapping[str, Any],
    options: Mapping[str, Any] | None,
    length: int,
    requests: int,
    new: int,
    shared: int,
    text: Sequence[int] | None = None,
) -> dict[str, float | None]:
    """Returns the :data:`FIGURES` of vLLM's own attention, or of msattn with ``options``; ``text``
    are the tokens of ``requests + 1`` prompts. Uses the process's GPUs.
    """
    llm = start(model, engine, options, length + new, requests)
    prompts = (
        _random_prompts(requests + 1, length, llm)
        if text is None
        else [[*text[n * length : (n + 1) * length]] for n in range(requests + 1)]
    )
    figures = answered(llm, prompts, new)
    figures |= with_prefix(llm, prompts[:-1], new, shared) if shared else {}
    llm.llm_engine.engine_core.shutdown()
    return {key: figures.get(key) for key in FIGURES}


def start(
    model: str,
    engine: Mapping[str, Any],
    options: Mapping[str, Any] | None,
    length: int,
    requests: int,
) -> Any:
    """Returns vLLM's LLM for this many requests of ``length`` tokens, answers included; ``engine``
    has further parameters.
    """
    # the engine's errors are raised in this process
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for the statistics of the workers
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.llm import LLM

    from msattn.trainer.serving.engines.vllm.plugin import backend_name

    accepted = [*signature(LLM).parameters, *(each.name for each in fields(EngineArgs))]
    for key in engine:
        require(
            key in accepted, "--engine", key, f"vLLM has no such parameter{nearest(key, accepted)}"
        )
    given: dict[str, Any] = {
        "max_model_len": length,
        "max_num_seqs": requests,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
    }
    if options is not None:
        given |= {
            "attention_backend": backend_name(),
            "additional_config": {SECTION: dict(options)},
        }
    llm = LLM(model=model, **{**given, **engine})
    if engine.get("load_format") == "dummy":
        llm.collective_rpc(_scale_weights)
    return llm


def _scale_weights(worker: Any) -> None:
    """Gives random weights the scale of new ones; those of vLLM are so small that keys and values
    are 0 in FP8, and all keys are in one bucket. Quantized weights and draft models keep theirs.
    """
    from torch import linalg

    for name, weight in worker.model_runner.model.named_parameters():
        if name.endswith("norm.weight"):
            weight.data.fill_(1)
        elif weight.dim() > 1 and weight.is_floating_point() and weight.element_size() > 1:
            size = linalg.vector_norm(weight.data).clamp(min=1e-9)
            weight.data.mul_(0.02 * weight.numel() ** 0.5 / size)


def answered(llm: Any, prompts: Sequence[list[int]], new: int) -> dict[str, float | None]:
    """Returns the figures of requests without a common prefix, the first of them alone."""
    # whole: kernels also compile for lengths of chunks behind others
    for warm_up in (prompts[:1], prompts[1:]):
        _generate(llm, warm_up, WARM_UP)
        _forget(llm)
    before = _drafts(llm)
    together = [each.metrics for each in _generate(llm, prompts[1:], new)]
    read, (drafted, accepted) = statistics(llm), _drafts(llm) - before
    alone = _generate(llm, prompts[:1], new)[0].metrics
    first = sorted(each.first_token_latency for each in together)
    begun = min(each.first_token_ts - each.first_token_latency for each in together)
    ended = max(each.last_token_ts for each in together)
    last = max(together, key=lambda each: each.first_token_ts)
    return {
        "tokens_per_s": len(together) * new / (ended - begun),
        "first_token_p50_s": first[len(first) // 2],
        "first_token_p99_s": first[round(0.99 * (len(first) - 1))],
        "token_ms": 1e3 * (last.last_token_ts - last.first_token_ts) / (new - 1),
        "alone_first_token_s": alone.first_token_latency,
        "alone_tokens_per_s": (new - 1) / (alone.last_token_ts - alone.first_token_ts),
        "sparsity": read.get("sparsity"),
        "selectivity": read.get("selectivity"),
        "accepted": accepted / drafted if drafted else None,
    }


def with_prefix(
    llm: Any, prompts: Sequence[list[int]], new: int, shared: int
) -> dict[str, float | None]:
    """Returns the figures of requests that share their first ``shared`` tokens: one alone, then the
    others at once.
    """
    prompts = [prompts[0][:shared] + prompt[shared:] for prompt in prompts]
    for tokens in (WARM_UP, new):  # new lengths of chunks and prefixes compile kernels
        _forget(llm)
        (begun,) = _generate(llm, prompts[:1], tokens)
        statistics(llm, clear=True)
        later = _generate(llm, prompts[1:], tokens)
    first = sorted(each.metrics.first_token_latency for each in later)
    return {
        "shared_first_token_s": begun.metrics.first_token_latency,
        "shared_later_first_token_p50_s": first[len(first) // 2],
        "shared_cached": sum(each.num_cached_tokens or 0 for each in later)
        / sum(len(each.prompt_token_ids) for each in later),
        "shared_sparsity": statistics(llm).get("sparsity"),
    }


def _forget(llm: Any) -> None:
    """Forgets cached prefixes of earlier requests, and the statistics."""
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM keeps pages of requests that ended")
    statistics(llm, clear=True)


def statistics(llm: Any, *, clear: bool = False) -> dict[str, Any]:
    """Returns msattn's statistics, none for vLLM's own attention; ``clear`` resets them."""
    from msattn.trainer.serving.engines.vllm.backend import clear_stats, stats

    if SECTION not in llm.llm_engine.vllm_config.additional_config:
        return {}
    return llm.collective_rpc(clear_stats if clear else stats)[0] or {}


def _drafts(llm: Any) -> "np.ndarray[Any, Any]":
    """Returns the numbers of drafts so far: all, and those that were accepted."""
    counted = {each.name: getattr(each, "value", 0) for each in llm.get_metrics()}
    names = ("draft_tokens", "accepted_tokens")
    return np.array([counted.get(f"vllm:spec_decode_num_{name}", 0) for name in names])


def _random_prompts(count: int, length: int, llm: Any) -> list[list[int]]:
    """Returns prompts of random tokens, no two alike."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(
        llm.model_config.get_vocab_size(), (count, length), generator=generator
    ).tolist()


def _generate(llm: Any, prompts: Sequence[list[int]], new: int) -> list[Any]:
    """Returns vLLM's answers to requests that arrive at once, with their metrics."""
    from vllm.sampling_params import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    return llm.generate([{"prompt_token_ids": each} for each in prompts], sampling)


def _show(found: Mapping[str, Mapping[str, float | None]], title: str) -> None:
    table = with_columns(title, ["", *found], [""])
    for key, name in FIGURES.items():
        values = [figures[key] for figures in found.values()]
        if any(value is not None for value in values):
            table.add_row(name, *("" if value is None else f"{value:.4g}" for value in values))
    Console().print(table)


if __name__ == "__main__":
    run_program(main)
