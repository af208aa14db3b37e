"""``msattn generate``: answers a prompt with dense attention and with a model's artifacts."""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msattn.trainer.config import GenerateConfig
from msattn.trainer.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Generation:
    """Greedy text, seconds to the first token, and tokens per second after it."""

    text: str
    tokens: list[int]
    first_token_s: float
    tokens_per_s: float
    stats: dict[str, Any]


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Returns the prompt, given as text or as a file.

    Raises
    ------
    UserError : none or both are given, the file is missing or not UTF-8, or the prompt is empty.
    """
    if (prompt is None) == (prompt_file is None):
        raise UserError("give one of --prompt and --prompt-file")
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"--prompt-file {prompt_file}: not UTF-8 (byte {error.start})") from error
        except OSError as error:
            raise UserError(f"--prompt-file {prompt_file}: {error.strerror}") from error
    assert prompt is not None
    if not prompt.strip():
        raise UserError(f"{'--prompt' if prompt_file is None else f'--prompt-file {prompt_file}'}: empty")
    return prompt


def generate(cfg: GenerateConfig, prompt: str) -> dict[str, Generation]:
    """Generates greedily with dense and with sparse attention, and prints both.

    Returns
    -------
    dict
        The generations ``dense`` and ``sparse``.

    Raises
    ------
    UserError : there is no artifact, an artifact does not fit the model, or the prompt exceeds the model's positions.
    """
    from msattn.trainer import models
    from msattn.trainer.attach import attach
    from msattn.trainer.models.chat import encode_prompt

    chosen = _artifacts(cfg)
    loaded = models.load(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    ids = encode_prompt(loaded.tokenizer, prompt, cfg.chat).to(loaded.model.device)
    needed = ids.shape[1] + cfg.max_new_tokens
    given = f"the prompt's {ids.shape[1]} tokens and max_new_tokens={cfg.max_new_tokens}"
    models.check_length(loaded.model.config, needed, given)
    serving = attach(
        loaded.model,
        gate=chosen["gate"],
        select=cfg.select if chosen["gate"] or cfg.select.scores != "gate" else None,
        qmodel=chosen["qmodel"] or chosen["kmeans"],
        **cfg.routing,
    )
    results = {
        name: _greedy(loaded.model, loaded.tokenizer, ids, cfg.max_new_tokens, context)
        for name, context in (("dense", nullcontext()), ("sparse", serving))
    }
    _print_results(results, ids.shape[1])
    return results


def _artifacts(cfg: GenerateConfig) -> dict[str, str | Path | None]:
    """Returns the paths of the artifacts by kind: those of the configuration, else those of the model and name."""
    from msattn.trainer import artifacts
    from msattn.trainer.models.loading import config_and_tokenizer

    chosen = {kind: getattr(cfg.artifacts, kind) or artifacts.default_artifact(cfg, kind) for kind in artifacts.KINDS}
    if cfg.select.scores != "gate":  # a baseline needs no gate
        chosen["gate"] = None
    elif not any(chosen.values()):
        config_and_tokenizer(cfg.model)  # a model that is not supported has its own message
        folder = artifacts.artifact_folder(cfg.outputs, cfg.model.name, cfg.name, "gate").parent
        raise UserError(
            f"{folder}: no artifact to try; train one, e.g. msattn train-gate {cfg.arguments(cfg.name)}, or add select=quest, "
            "which needs no training"
        )
    return chosen


def _greedy(model: Any, tokenizer: Any, ids: "Tensor", max_new_tokens: int, context: Any) -> Generation:
    import torch
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        """Records the time of each token; the first call is for the prompt."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    clock = Clock()
    with context as sparse, torch.no_grad():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            streamer=clock,
            pad_token_id=tokenizer.eos_token_id,
        )
        stats = sparse.stats() if sparse is not None else {}
    tokens = output[0, ids.shape[1] :].tolist()
    start, first, *rest = clock.times
    rate = len(rest) / (rest[-1] - first) if rest else float("nan")
    return Generation(tokenizer.decode(tokens), tokens, first - start, rate, stats)


def _print_results(results: dict[str, Generation], prompt_tokens: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for name, result in results.items():
        console.rule(name, align="left")
        console.print(result.text, markup=False, highlight=False)
    table = Table(title=f"{prompt_tokens} prompt tokens", title_justify="left")
    for column in ("", "new tokens", "first token, s", "tokens/s", "sparsity", "selectivity"):
        table.add_column(column, justify="left" if not column else "right")
    for name, result in results.items():
        read = [_format(result.stats.get(key)) for key in ("sparsity", "selectivity")]
        table.add_row(name, str(len(result.tokens)), _format(result.first_token_s), _format(result.tokens_per_s), *read)
    console.print(table)
    dense, sparse = results["dense"].tokens, results["sparse"].tokens
    equal = next((i for i, (a, b) in enumerate(zip(dense, sparse, strict=False)) if a != b), min(len(dense), len(sparse)))
    console.print(f"The first {equal} of {len(dense)} tokens are equal.")
    if results["sparse"].stats["dense_by_choice"]:
        console.print("The prompt used dense attention, which is faster at this length; select.dense_below=0 makes it sparse.")


def _format(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.3g}"
