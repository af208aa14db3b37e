"""Models of GGUF files that are unpacked once and kept as transformers folders, by the hash of the
file.

transformers converts vocabulary and weights in Python, for a minute or more.
"""

import hashlib
import json
import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from msattn.trainer.errors import UserError, first_line, print_once
from msattn.trainer.storage.hashes import file_hash
from msattn.trainer.storage.lock import locked_in_turn
from msattn.trainer.storage.replace import replace_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

FORMAT = 1  # to be raised when a file would be unpacked differently


def unpacked_folder(gguf: Path, cache: str, dtype: torch.dtype) -> Path:
    """Returns the folder in ``cache`` for a file that is unpacked to ``dtype``."""
    depends_on = [
        FORMAT,
        file_hash(gguf),
        str(dtype),
        *map(version, ("gguf", "tokenizers", "transformers")),
    ]
    key = hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:16]
    return Path(os.path.expanduser(cache)) / f"{gguf.stem}-{key}"


def is_complete(folder: Path) -> bool:
    """Returns False if there is no such folder, or only what a user's interrupted deletion has left
    of it.
    """
    return all((folder / name).is_file() for name in ("config.json", "tokenizer.json")) and any(
        folder.glob("*.safetensors")
    )


@contextmanager
def in_turn(folder: Path) -> Iterator[bool]:
    """Waits until no other process writes ``folder``, and yields False, with a warning, if it
    cannot be written.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked_in_turn(folder))
        except UserError as error:
            print_once(f"warning: the unpacked model is not kept: {error}")
            yield False
        else:
            yield True


def keep(
    model: "PreTrainedModel",
    config: "PreTrainedConfig",
    tokenizer: "PreTrainedTokenizerBase",
    folder: Path,
) -> None:
    """Writes an unpacked model with the ``config`` of its file; prints where, or a warning if that
    fails, as on a full disk.
    """
    try:
        save(model, config, tokenizer, folder)
    except UserError as error:
        print_once(f"warning: the unpacked model is not kept: {error}")
        return
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e9
    freed = f"rm -r {shlex.quote(str(folder))} frees the space, model.cache=null keeps none"
    print_once(
        f"the unpacked model is kept in {folder} ({size:.2f} GB), so that later starts take "
        f"seconds; {freed}"
    )


def save(
    model: "PreTrainedModel",
    config: "PreTrainedConfig",
    tokenizer: "PreTrainedTokenizerBase",
    folder: Path,
) -> None:
    """Writes a model and its tokenizer as a folder of transformers, completely or not at all. The
    caller holds its lock.
    """
    with replace_folder(folder, resumes=False) as new, no_progress_bar():
        model.save_pretrained(new)
        config.architectures, config.dtype = model.config.architectures, model.dtype
        config.save_pretrained(new)
        try:
            tokenizer.save_pretrained(new)
        except Exception as error:  # Rust's errors have no class of their own
            raise OSError(first_line(error)) from error


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Disables transformers' progress bar inside the context, for local files, which load and save
    in seconds.
    """
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
