"""``msattn generate``: answers a prompt with dense attention and with a model's artifacts."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from msattn.trainer.config import GenerateConfig
from msattn.trainer.config.text_files import is_unicode, read_text
from msattn.trainer.config.values import shown
from msattn.trainer.errors import UserError, print_once

if TYPE_CHECKING:
    from torch import Tensor

    from msattn.trainer.models import Loaded


@dataclass(frozen=True)
class Completion:
    """Greedy text, seconds to the first token, and tokens per second after it."""

    text: str
    tokens: list[int]
    first_token_s: float
    tokens_per_s: float
    stats: dict[str, Any]
    figures: dict[str, float]  # for a tracker


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Returns the prompt, given as text or as a file.

    Raises
    ------
    UserError : none or both are given, the file cannot be read, or the prompt is not UTF-8 or empty.
    """
    if (prompt is None) == (prompt_file is None):
        raise UserError("give one of --prompt and --prompt-file, or --chat")
    where = "--prompt" if prompt_file is None else f"--prompt-file {shown(prompt_file)}"
    text = str(prompt) if prompt_file is None else read_text(prompt_file, where)
    if not is_unicode(text):
        raise UserError(f"{where}: not UTF-8")
    if not text.strip():
        raise UserError(f"{where}: empty")
    return text


def generate(cfg: GenerateConfig, prompt: str, chat: bool = False) -> dict[str, Completion]:
    """Generates greedily with dense and with sparse attention, and prints both.

    Parameters
    ----------
    chat : chats with sparse attention instead, beginning with ``prompt`` if it is not empty.

    Returns
    -------
    dict
        The generations ``dense`` and ``sparse``; none of a chat.

    Raises
    ------
    UserError : there is no artifact, an artifact does not fit the model, or the prompt exceeds the model's positions.
    """
    from msattn.trainer.attach import attach
    from msattn.trainer.commands.greedy import check_fits, describe, load_served
    from msattn.trainer.commands.tracked import tracked
    from msattn.trainer.models.chat import encode_prompt

    if chat:
        from msattn.trainer.commands.chat import chat as run

        run(cfg, prompt)
        return {}
    served = load_served(cfg)
    loaded = served.loaded
    ids = encode_prompt(loaded.tokenizer, prompt, cfg.chat).to(loaded.model.device)
    check_fits(loaded.model, ids.shape[1], cfg.max_new_tokens, "prompt")
    contexts = {"dense": nullcontext(), "sparse": attach(loaded.model, **served.options)}
    print_once(describe(cfg, served))
    results = {name: _greedy(loaded, ids, cfg.max_new_tokens, context) for name, context in contexts.items()}
    _print_results(results, ids.shape[1])
    with tracked(cfg, "generate", served, after_work=True) as tracker:
        if tracker is not None:
            tracker.table("results", [{"attention": name, **result.figures} for name, result in results.items()])
            figures = {f"{name}/{key}": value for name, result in results.items() for key, value in result.figures.items()}
            tracker.summary({"prompt_tokens": ids.shape[1], **figures})
    return results


def _greedy(loaded: "Loaded", ids: "Tensor", max_new_tokens: int, context: Any) -> Completion:
    from msattn.trainer.commands.greedy import Clock, answer_figures, generate_greedily

    clock, tokenizer = Clock(), cast("Any", loaded.tokenizer)
    with context as sparse:
        generate_greedily(loaded, ids, max_new_tokens, clock)
        stats = sparse.stats() if sparse is not None else {}
    text, figures = tokenizer.decode(clock.tokens), answer_figures(clock, stats)
    return Completion(text, clock.tokens, clock.first_token_s, clock.tokens_per_s, stats, figures)


def _print_results(results: dict[str, Completion], prompt_tokens: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from msattn.trainer.commands.greedy import common_prefix, format_number

    console = Console()
    for name, result in results.items():
        console.rule(name, align="left")
        console.print(result.text, markup=False, highlight=False)
    table = Table(title=f"{prompt_tokens} prompt tokens", title_justify="left")
    for column in ("", "new tokens", "first token, s", "tokens/s", "sparsity", "selectivity"):
        table.add_column(column, justify="left" if not column else "right")
    for name, result in results.items():
        read = [format_number(result.stats.get(key)) for key in ("sparsity", "selectivity")]
        table.add_row(
            name, str(len(result.tokens)), format_number(result.first_token_s), format_number(result.tokens_per_s), *read
        )
    console.print(table)
    dense, sparse = results["dense"].tokens, results["sparse"].tokens
    console.print(f"The first {common_prefix(dense, sparse)} of {len(dense)} tokens are equal.")
    if results["sparse"].stats["dense_by_choice"]:
        console.print("Dense attention served where it is faster at this length; dense_below=0 reads sparsely everywhere.")
