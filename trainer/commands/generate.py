"""``msattn generate``: answers a prompt with dense attention and with a model's artifacts."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from rich.console import Console
from torch import Tensor

from msattn.trainer.commands.answers import (
    Answer,
    Clock,
    check_fits,
    dense_by_choice,
    describe,
    find_served,
    format_number,
    generate_greedily,
    tracked,
)
from msattn.trainer.commands.chat import chat as run_chat
from msattn.trainer.config import GenerateConfig
from msattn.trainer.evaluate.report.tables import with_columns
from msattn.trainer.models import Loaded
from msattn.trainer.models.chat import common_prefix, encode_prompt
from msattn.trainer.progress import activity
from msattn.trainer.serving.attach import attach


def generate(cfg: GenerateConfig, prompt: str, chat: bool = False) -> dict[str, Answer]:
    """Generates with dense and with sparse attention, prints and returns both answers; with
    ``chat`` it chats instead.
    """
    if chat:
        run_chat(cfg, prompt)
        return {}
    served = find_served(cfg)
    ids = encode_prompt(served.model.tokenizer, prompt, cfg.chat)
    check_fits(served.model.config, ids.shape[1], cfg.max_new_tokens, "prompt")
    loaded = served.model.load()
    ids = ids.to(loaded.model.device)
    contexts = {"dense": nullcontext(), "sparse": attach(loaded.model, **served.options)}
    console, results = Console(), {}
    # refuses artifacts that do not fit before the dense answer
    with attach(loaded.model, **served.options) as sparse:
        dense = dense_by_choice(cfg, sparse.dispatch, ids.shape[1], cfg.max_new_tokens)
    console.print(describe(cfg, served, dense), style="dim", highlight=False, markup=False)
    for name, context in contexts.items():
        with activity(f"{name} attention, {ids.shape[1]} prompt tokens"):
            results[name] = _greedy(loaded, ids, cfg.max_new_tokens, context)
        console.rule(name, align="left")
        console.print(results[name].text, markup=False, highlight=False)
    _print_figures(results, ids.shape[1], console)
    for note in _notes(cfg, results["sparse"].stats, loaded.model.device.type == "cpu"):
        console.print(note)
    with tracked(cfg, "generate", served, after_work=True) as tracker:
        if tracker is not None:
            tracker.table(
                "results",
                [{"attention": name, **result.figures} for name, result in results.items()],
            )
            figures = {
                f"{name}/{key}": value
                for name, result in results.items()
                for key, value in result.figures.items()
            }
            tracker.summary({"prompt_tokens": ids.shape[1], **figures})
    return results


def _greedy(
    loaded: Loaded, ids: Tensor, max_new_tokens: int, context: AbstractContextManager[Any]
) -> Answer:
    clock, tokenizer = Clock(), cast("Any", loaded.tokenizer)
    with context as sparse:
        generate_greedily(loaded, ids, max_new_tokens, clock)
        stats = sparse.stats() if sparse is not None else {}
    return Answer(tokenizer.decode(clock.tokens), clock, stats)


def _print_figures(results: dict[str, Answer], prompt_tokens: int, console: Console) -> None:
    headers = ["", "new tokens", "first token, s", "tokens/s", "sparsity", "selectivity"]
    table = with_columns(f"{prompt_tokens} prompt tokens", headers, [""])
    for name, result in results.items():
        figures = [
            result.figures.get(key)
            for key in ("first_token_s", "tokens_per_s", "sparsity", "selectivity")
        ]
        table.add_row(name, str(len(result.clock.tokens)), *map(format_number, figures))
    console.print(table)
    dense, sparse = results["dense"].clock.tokens, results["sparse"].clock.tokens
    console.print(f"The first {common_prefix(dense, sparse)} of {len(dense)} tokens are equal.")


def _notes(cfg: GenerateConfig, stats: dict[str, Any], on_cpu: bool) -> Iterator[str]:
    """Yields sentences about what sparse attention read and whether that saves time."""
    left_out = stats["sparsity"] or stats["selectivity"] not in (None, 1)
    if stats["dense_by_choice"] and cfg.dense_below != 0:
        yield (
            "Attention was dense where that is faster at this length; dense_below=0 makes it "
            "sparse everywhere."
        )
    elif not stats["dense_by_choice"] and not left_out:
        yield "Sparse attention read every key: the prompt is too short for one to be left out."
    if on_cpu and left_out:
        yield (
            "A CPU runs PyTorch instead of the kernels: sparse attention saves time in long "
            "prompts at 80 % sparsity and more, but not for new tokens."
        )
