"""CSV files that are written whole, since later rows may have additional columns."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msattn.trainer.errors import write_error
from msattn.trainer.storage.replace import replace_file


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replaces a CSV file; its columns are the keys of all rows, in the order of their first appearance.

    Raises
    ------
    UserError : the file cannot be written.
    """
    try:
        with replace_file(path) as new, new.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise write_error(path, error, resumes=False) from error
