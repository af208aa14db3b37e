"""``--model``, ``--data`` and ``--prompt``: the user's own model, as Hydra overrides, text and
prompt.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msattn.trainer.commands.compose import compose, quoted
from msattn.trainer.config import ModelPresets
from msattn.trainer.config.model import packaged_models
from msattn.trainer.config.text_files import is_unicode, read_text, refused, text_files
from msattn.trainer.config.values import shown
from msattn.trainer.errors import UserError, print_once
from msattn.trainer.storage.model_files import GGUF, ModelFiles, local_model

TOKENS_PER_BUCKET = 64  # the papers' 1024 buckets for 65,536 tokens
BUCKETS_PER_PROBE = 32
ANSWERING = ("generate", "serve")
# Presets on a CPU by command, besides those that depend on the length of chunks.
CPU_PRESETS: dict[str, dict[str, Any]] = {
    "train-gate": {"gate_steps": 100, "gate_batch": 2},
    "fit-kmeans": {"kmeans_prompts": 8, "points_per_bucket": 256},  # as Faiss does by default
    "train-qmodel": {
        "qmodel_prompts": 24,
        "qmodel_steps": 1500,
        "qmodel_lr": 1e-3,
        "qmodel_hidden": 512,
    },
    "eval": {},
}
# Length of chunks on a CPU. In 4096 tokens, block maps of a model of 135M parameters already take
# a minute on two cores.
CPU_LENGTH = 2048
# Presets that depend on the length, by command.
OF_LENGTH = {
    "train-gate": ("seq_len", "recent"),
    "fit-kmeans": ("seq_len", "num_buckets", "probes", "recent"),
    "train-qmodel": ("seq_len", "probes", "recent", "long_range"),
    "eval": ("seq_len",),
}
# Keys of which a preset that depends on the positions is the default.
KEYS = {
    "seq_len": "data.seq_len",
    "num_buckets": "kmeans.num_buckets",
    "probes": "probes",
    "recent": "recent",
    "long_range": "qmodel.long_range",
    "throughput_length": "eval.throughput.lengths",
}
CPU_KEYS = KEYS | {
    "gate_steps": "train.steps",
    "gate_batch": "train.batch_size",
    "kmeans_prompts": "kmeans.num_prompts",
    "points_per_bucket": "kmeans.points_per_bucket",
    "qmodel_prompts": "qmodel.num_prompts",
    "qmodel_steps": "train.steps",
    "qmodel_lr": "train.lr",
    "qmodel_hidden": "qmodel.hidden",
}
WINDOW_SHARE = 16  # one in 16 of a chunk's tokens is in the dense window, up to the papers' 2047


def own_overrides(
    model: str | None, data: str | None, overrides: Sequence[str] = (), command: str = ""
) -> list[str]:
    """Returns the overrides that ``--model`` and ``--data`` stand for, given the other
    ``overrides`` of ``command``.
    """
    for group, value in {"model": model, "data": data}.items():
        if value is not None and (
            given := [override for override in overrides if override.startswith(f"{group}=")]
        ):
            raise UserError(f"--{group} {value} and {given[0]}: give one of the two")
    added = []
    if model is not None:
        added += (
            [f"model={model}"]
            if model in packaged_models()
            else _model_overrides(model, overrides, command)
        )
    added += _on_cpu(command, added, overrides)
    if data is not None:
        text_files("--data", data)
        added += ["data=text", f"data.path={_quoted(data)}"]
    return added


def is_own(model: str | None, overrides: Sequence[str]) -> bool:
    """Returns True if ``--model`` is the only choice of a model, and names files."""
    chosen = any(override.startswith("model=") for override in overrides)
    return model is not None and model not in packaged_models() and not chosen


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise UserError("give one of --prompt and --prompt-file, or --chat")
    where = "--prompt" if prompt_file is None else f"--prompt-file {shown(prompt_file)}"
    text = str(prompt) if prompt_file is None else read_text(prompt_file, where)
    if not is_unicode(text):
        raise UserError(f"{where}: not UTF-8")
    if not text.strip():
        raise UserError(f"{where}: empty")
    return text


def _model_overrides(model: str, overrides: Sequence[str], command: str) -> list[str]:
    with refused(f"--model {shown(model)}"):
        positions = _positions(model)
    path = Path(os.path.expanduser(model)).resolve()
    name = path.stem if path.suffix.lower() == GGUF else path.name
    if name == "model":  # the name of the folders that finetune writes, and of many others
        name = f"{path.parent.name}-{name}".lstrip("-")
    name = re.sub(r"[^\w.-]+", "-", name).lower()
    sizes = sizes_for(positions) if isinstance(positions, int) else {}
    given = {override.partition("=")[0] for override in overrides}
    values = ", ".join(
        f"{name}={sizes[name]}"
        for name, key in KEYS.items()
        if name in sizes and not {key, f"model.presets.{name}"} & given
    )
    if values and command not in ANSWERING:  # these commands read few of them
        print_once(f"--model {shown(model)}: {positions} positions, so model.presets has {values}")
    return [
        "model=own",
        f"model.name={_quoted(name)}",
        f"model.path={_quoted(model)}",
        *(f"model.presets.{key}={value}" for key, value in sizes.items()),
    ]


def _on_cpu(command: str, of_model: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Returns smaller presets for training and evaluation on a CPU, where the usual ones would take
    days, and prints them.

    The model is that of the overrides ``of_model``, or of ``model=``. The embedded model,
    experiments and sweeps over models have sizes of their own.
    """
    given = dict(override.split("=", 1) for override in overrides if "=" in override)
    model = of_model[0].removeprefix("model=") if of_model else given.get("model", "tiny")
    if (
        command not in CPU_PRESETS
        or model == "tiny"
        or "," in model
        or "experiment" in given
        or not _is_cpu(given.get("device", "auto"))
    ):
        return []
    usual = compose(command, of_model or [f"model={model}"]).model.presets
    values = dict(CPU_PRESETS[command])
    if not {"data.seq_len", "model.presets.seq_len"} & given.keys():
        sizes = sizes_for(CPU_LENGTH)
        values = {name: sizes[name] for name in OF_LENGTH[command]} | values
    presets = {
        name: value
        for name, value in values.items()
        if not {CPU_KEYS[name], f"model.presets.{name}"} & given.keys()
        and _lighter(name, value, getattr(usual, name))
    }
    if not presets:
        return []
    listed = ", ".join(
        f"{name}={value} instead of {'all' if (before := getattr(usual, name)) is None else before}"
        for name, value in presets.items()
    )
    print_once(f"on a CPU, so model.presets has {listed}")
    return [f"model.presets.{name}={value}" for name, value in presets.items()]


def _lighter(name: str, value: float, usual: float | None) -> bool:
    """Returns True if a preset saves time; a learning rate goes with fewer steps."""
    return usual is None or (value > usual if name == "qmodel_lr" else value < usual)


def _is_cpu(device: str) -> bool:
    if device != "auto":
        return device == "cpu"
    import torch  # takes a second or two, and the job needs it

    return not torch.cuda.is_available()


def sizes_for(positions: int) -> dict[str, Any]:
    """Returns presets for a model with fewer positions than the default length, in the papers'
    proportions.
    """
    default = ModelPresets()
    if positions >= default.seq_len:
        return {}
    buckets = max(positions // TOKENS_PER_BUCKET, 2)
    probes = max(buckets // BUCKETS_PER_PROBE, 1)
    window = max(positions // WINDOW_SHARE, 1)
    return {
        "seq_len": positions,
        "num_buckets": buckets,
        "probes": probes,
        "recent": min(window, default.recent),
        "long_range": min(window, default.long_range),
        "eval_probes": sorted({0, max(probes // 2, 1), probes, min(2 * probes, buckets)}),
        "latency_lengths": [length for length in default.latency_lengths if length <= positions]
        or [positions],
        "decoding_lengths": [positions],
        "throughput_length": max(positions // 2, 1),
    }


def _positions(model: str) -> Any:
    """Returns the number of positions that ``config.json`` or a GGUF file states."""
    name = f"--model {shown(model)}"
    local = local_model(model, name)
    if local is None and os.path.exists(os.path.expanduser(model)):
        raise UserError(
            f"{name}: this is a file; expected the folder of a model, or a file that ends in {GGUF}"
        )
    if local is None and (
        model.startswith(".") or not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.endswith(GGUF)
    ):
        accepted = f"a folder, a GGUF file, a Hub id, or one of {', '.join(packaged_models())}"
        raise UserError(f"{name}: no such folder or file; expected {accepted}")
    files = ModelFiles(name, local or model)
    if files.gguf is None:
        return files.config().get("max_position_embeddings")
    from msattn.trainer.models.gguf import gguf_header

    metadata = gguf_header(files.gguf, name).metadata
    return metadata.get(f"{metadata['general.architecture']}.context_length")


def _quoted(value: str) -> str:
    """Returns ``value`` as a quoted string of Hydra's override grammar, in which it is no
    interpolation.
    """
    return quoted(re.sub(r"(\\*)\$\{", r"\1\1\\${", value))
