"""Arrays that are computed once for a text, such as its tokens, and kept on disk for later runs and
other ranks.

A file's name is a hash of everything that its array depends on, so files are never updated. Each
file holds a hash of its content. Writers take turns and files appear complete, so no partial file
of a killed run is ever read.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from msattn.trainer.errors import UserError, first_line, free_space, print_once
from msattn.trainer.storage.hashes import DamagedFile, read_hashed, write_hashed
from msattn.trainer.storage.lock import locked_in_turn

LEAST_SECONDS = 1.0  # what takes less is recomputed rather than kept
# total size of a folder's files; the least recently used ones are removed first
MOST_BYTES = 64 * 10**9


def cached(
    folder: str | None,
    what: str,
    identity: Callable[[], Any | None],
    make: Callable[[], np.ndarray],
    *,
    quiet: bool = False,
    however_short: bool = False,
) -> np.ndarray:
    """Returns the array that ``make`` returns: from a file in ``folder`` if there is one, else
    computed and kept there.

    A damaged file is written again, with a warning. If the array cannot be kept, as on a full disk,
    a warning names it by ``what``. An array that takes less than :data:`LEAST_SECONDS` is kept only
    if ``however_short``. ``identity`` returns, as JSON values, everything that the array depends
    on, or None if that is not known; then nothing is kept.
    """
    key = _key(identity) if folder is not None else None
    if folder is None or key is None:
        return make()
    path = Path(os.path.expanduser(folder)) / f"{key}.safetensors"
    value, _ = _read(path)
    if value is not None:
        return value
    with ExitStack() as stack:
        try:
            stack.enter_context(locked_in_turn(path))
        except UserError:
            print_once(
                f"warning: data.cache={folder}: the folder is not writable, the {what} are not "
                f"kept; {free_space(path)}"
            )
            return make()
        value, fault = _read(path)  # another process may have written it meanwhile
        if fault:
            print_once(f"warning: {path} is damaged ({fault}); the {what} will be created again")
        if value is None:
            start = time.monotonic()
            value = make()
            # Nor is a text kept that changed while it was read.
            if (however_short or time.monotonic() - start >= LEAST_SECONDS) and _key(
                identity
            ) == key:
                _write(path, value, what, quiet)
    return value


def _key(identity: Callable[[], Any | None]) -> str | None:
    known = identity()
    return (
        None
        if known is None
        else hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]
    )


def _read(path: Path) -> tuple[np.ndarray | None, str]:
    """Returns the array in a file; or None and, if there is a file, what is damaged."""
    try:
        tensors, _ = read_hashed(path, path.name)
    except FileNotFoundError:
        return None, ""
    except DamagedFile as error:
        return None, str(error)
    with suppress(OSError):
        os.utime(path)  # recently used, see _make_room
    return tensors["array"].numpy(), ""


def _write(path: Path, array: np.ndarray, what: str, quiet: bool) -> None:
    if array.nbytes > MOST_BYTES:
        print_once(f"the {what} take {array.nbytes / 1e9:.1f} GB and are not kept")
        return
    try:
        _make_room(path.parent, array.nbytes)
        write_hashed(path, {"array": torch.from_numpy(array)}, path.name)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        print_once(
            f"warning: {path} cannot be written ({reason}; {free_space(path)}); the {what} are "
            f"not kept"
        )
        return
    if not quiet:
        print_once(
            f"the {what} are kept in {path} ({array.nbytes / 1e6:,.1f} MB; data.cache=null keeps "
            f"none)"
        )


def _make_room(folder: Path, size: int) -> None:
    """Removes the least recently used files of ``folder``, and leftovers of killed runs, until
    ``size`` more bytes fit.
    """
    files = []
    for file in (*folder.glob("*.safetensors"), *folder.glob(".*.safetensors.new")):
        with suppress(FileNotFoundError):  # removed by another process
            status = file.stat()
            files.append((status.st_mtime_ns, status.st_size, file))
    total = size + sum(file_size for _, file_size, _ in files)
    for _, file_size, file in sorted(files):
        if total <= MOST_BYTES:
            return
        file.unlink(missing_ok=True)
        total -= file_size
