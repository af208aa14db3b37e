"""Streams the rows of a Hugging Face dataset. Code in a dataset is never run."""

import itertools
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from msattn.trainer.config import DataConfig
from msattn.trainer.config.values import shown
from msattn.trainer.errors import UserError, first_line

PARQUET_BRANCH = "refs/convert/parquet"  # where the Hub keeps a copy of many datasets
PARQUET = (
    f"data.revision={PARQUET_BRANCH} reads the Hub's parquet copy of data.path=OWNER/NAME, if "
    "there is one, and data=text reads local parquet files"
)


def hub_rows(cfg: DataConfig, split: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a split of the dataset ``cfg.path``, in order; refuses datasets that need
    a script.
    """
    builder = _builder(cfg)
    with _refused(cfg):
        rows = iter(builder.as_streaming_dataset(split=split))
    for number in itertools.count():
        with _refused(cfg, f", row {number}"):
            row = next(rows, None)
        if row is None:
            return
        yield row


def hub_identity(cfg: DataConfig) -> Any:
    """Returns the files of the dataset ``cfg.path`` and their commit, or None if they are unknown
    before reading.
    """
    builder = _builder(cfg)
    files = builder.config.data_files
    if not files:
        return None
    return {
        str(split): [[str(file) for file in of_split], of_split.origin_metadata]
        for split, of_split in files.items()
    }


def _builder(cfg: DataConfig) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UserError(f"data=hub: {error}; pip install datasets, or data=text") from error
    with _refused(cfg):
        return datasets.load_dataset_builder(str(cfg.path), cfg.subset, revision=cfg.revision)


def _refused(cfg: DataConfig, where: str = "") -> AbstractContextManager[None]:
    return load_failures(f"data.path={shown(cfg.path)}{where}", PARQUET)


@contextmanager
def load_failures(where: str, parquet: str) -> Iterator[None]:
    """Turns what ``datasets`` and the code that calls it raise into a UserError; their errors have
    no common class.

    ``parquet`` tells how to read the dataset without its script.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        script = re.search(r"trust_remote_code|(?i:loading script|dataset scripts?)\b", str(error))
        reason = (
            f"this dataset is a script, which is never run; {parquet}"
            if script
            else first_line(error)
        )
        raise UserError(f"{where}: {reason}") from error
