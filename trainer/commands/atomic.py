"""Atomic replacement of result files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write, which then replaces ``path``.

    Readers see the old file or the new one, never a partial one. If the body fails, ``path`` is unchanged.

    Raises
    ------
    OSError : the folder of ``path`` cannot be written.
    """
    with TemporaryDirectory(dir=path.parent, prefix=".writing-") as folder:
        temporary = Path(folder, path.name)
        yield temporary
        os.replace(temporary, path)
