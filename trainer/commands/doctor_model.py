"""``msattn doctor MODEL``: shows, from the configuration alone, which layers can be sparse, and
suggests the next commands.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from msattn.trainer.commands.compose import compose
from msattn.trainer.commands.own import own_overrides
from msattn.trainer.errors import UserError
from msattn.trainer.progress import activity

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from msattn.trainer.config import GenerateConfig

SPARSITY = 0.9  # sparsity of prompts, for the break-even length
CACHE_BYTES = 2  # bytes per number in the KV cache, fp16 or bf16
Row = tuple[str, str]


def doctor_model(model: str) -> list[Row]:
    """Prints a table about a model (an option of the group, a folder or a Hub id) from its
    configuration; returns its rows.
    """
    from msattn.trainer.models.loading import read_config

    with activity(f"doctor {model}"):
        cfg: Any = compose("generate", own_overrides(model, None))
        config = read_config(cfg.model)
        rows = list(_rows(cfg, config))
    table = Table(title=f"msattn doctor: {cfg.model.name}", title_justify="left", show_header=False)
    for _ in range(2):
        table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    Console(highlight=False, markup=False).print(table)
    return rows


def _rows(cfg: "GenerateConfig", config: "PreTrainedConfig") -> Iterator[Row]:
    from msattn.trainer import models

    layers, heads, kv_heads, size = (
        shape(config)
        for shape in (models.num_layers, models.num_heads, models.num_kv_heads, models.head_dim)
    )
    yield (
        "model",
        f"{config.model_type}, {layers} layers, {heads} query heads, {kv_heads} key/value heads, "
        f"head size {size}",
    )
    length = models.max_length(config)
    key_bytes = 2 * kv_heads * size * CACHE_BYTES
    yield "context", f"{length:,} tokens"
    reason = _refusal(config)
    served = models.served_layers(config) if reason is None else list(range(layers))
    per_token = len(served) * key_bytes
    in_full = (
        f"{per_token / 2**10:,.4g} KiB per token, {per_token * length / 2**20:,.5g} MiB "
        f"when full (16 bits)"
    )
    yield (
        "KV cache",
        in_full if len(served) == layers else f"{in_full}, for the layers that can be sparse",
    )
    if reason is not None:
        yield "sparse", "nothing"
        yield "dense", reason
        return
    which = (
        f"all {layers} layers"
        if len(served) == layers
        else f"layers {_numbers(served)} of {layers}"
    )
    yield "sparse", f"{which}: prompts with gates or training-free scores, new tokens with buckets"
    yield "dense", "\n".join(_dense(cfg, config, served))
    yield from _break_even(cfg, key_bytes, length)
    own, others = _artifacts(cfg, config)
    yield "artifacts", "\n".join([*own, *others]) or f"none in {cfg.outputs}"
    yield "next", "\n".join(_next(cfg, trained=bool(own)))


def _refusal(config: "PreTrainedConfig") -> str | None:
    from msattn.trainer import models

    try:
        models.check_supported(config)
    except UserError as error:
        return str(error)
    return None


def _dense(cfg: "GenerateConfig", config: "PreTrainedConfig", served: list[int]) -> Iterator[str]:
    from msattn.trainer import models

    reasons: dict[str, list[int]] = {}
    for attention in models.attention_layers(config):
        if attention.kept is not None:
            reasons.setdefault(attention.kept, []).append(attention.layer)
    for reason, layers in reasons.items():
        yield f"layers {_numbers(layers)}, each because {reason}"
    by_default = [
        layer
        for layer in served
        if layer in ((0,) if cfg.dense_layers is None else cfg.dense_layers)
    ]
    if by_default:
        yield f"new tokens in layer {_numbers(by_default)}, by default (dense_layers)"
    yield "all passes below the break-even lengths"


def _numbers(layers: list[int]) -> str:
    """Returns layers as text, with ranges for consecutive layers."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(
        str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts
    )


def _break_even(cfg: "GenerateConfig", key_bytes: int, longest: int) -> Iterator[Row]:
    from msattn.trainer import models
    from msattn.trainer.models.break_even import decoding_break_even, prefill_break_even

    device, presets = models.resolve_device("auto"), cfg.model.presets
    share = presets.probes / presets.num_buckets
    lengths = {
        f"prompts at sparsity {SPARSITY}": prefill_break_even(SPARSITY, device),
        f"new tokens with {presets.probes} of {presets.num_buckets} buckets": decoding_break_even(
            device, key_bytes, presets.recent + 1, share, 1
        ),
    }
    texts = [f"{what}: {_tokens(tokens, longest)}" for what, tokens in lengths.items()]
    yield (
        "faster from",
        f"{texts[0]}\n{texts[1]} (measured on {'a GPU' if device.type == 'cuda' else 'a CPU'})",
    )


def _tokens(tokens: int, longest: int) -> str:
    return f"{tokens:,} tokens" if tokens <= longest else "beyond the context"


def _artifacts(cfg: "GenerateConfig", config: "PreTrainedConfig") -> tuple[list[str], list[str]]:
    """Returns the artifacts that commands find for this model, including shipped ones, and others
    with its configuration.
    """
    from msattn.trainer import artifacts
    from msattn.trainer.artifacts.manifest import SHAPE_FIELDS, read_manifest
    from msattn.trainer.models.identity import config_fingerprint

    own, others, expected = list[str](), list[str](), config_fingerprint(config)
    for run in sorted(Path(cfg.outputs).glob("*/*")):
        for kind, folder in artifacts.artifacts_of_run(run).items():
            try:
                made_for = read_manifest(folder, folder)["model"]
            except UserError as error:
                others.append(str(error))
                continue
            if any(made_for[key] != expected[key] for key in (*SHAPE_FIELDS, "config_hash")):
                continue
            if run.parent.name == cfg.model.name:
                own.append(f"{kind}: {folder}")
            else:
                others.append(f"{kind}: {folder}, made for {made_for['id']}")
    if cfg.model.is_embedded:
        own += [
            f"{kind}: shipped with msattn" for kind in artifacts.artifacts_of_run(artifacts.SHIPPED)
        ]
    return own, others


def _next(cfg: "GenerateConfig", *, trained: bool) -> list[str]:
    """Returns the commands to run next; FILE stands for a file of the user."""
    argument = cfg.model.argument
    # the presets name none, and training refuses to choose
    text = " --data FILE" if cfg.data.source is None else ""
    trials = [f"msattn generate {argument} select=quest --prompt-file FILE"]
    training = [
        f"msattn {command} {argument}{text}"
        for command in ("train-gate", "fit-kmeans", "train-qmodel")
    ]
    return [*([] if trained else trials + training), f"msattn eval {argument}"]
