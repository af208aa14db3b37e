"""Texts of random words, and the files of benchmarks."""

import gzip
import io
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

DRAW = random.Random(0)
WORDS = sorted(
    {"".join(DRAW.choices("abcdefghijklmnop", k=DRAW.randint(4, 9))) for _ in range(3000)}
)
TEXT = " ".join(f"{word}." if place % 9 == 0 else word for place, word in enumerate(WORDS))


def paragraph(context: str, *asked: tuple[str, list[str]]) -> dict[str, Any]:
    return {
        "context": context,
        "qas": [{"question": q, "answers": [{"text": a} for a in answers]} for q, answers in asked],
    }


def write(path: Path, *values: Any) -> str:
    text = "\n".join(json.dumps(value) for value in values).encode()
    path.write_bytes(lzma.compress(text) if path.suffix == ".xz" else text)
    return str(path)


def parquet(encoding: str | None = None, *, checksums: bool = False, **columns: Any) -> bytes:
    """Returns the content of a file, whose columns have ``encoding`` instead of a dictionary if one
    is given.
    """
    options: dict[str, Any] = (
        {"use_dictionary": False, "column_encoding": encoding} if encoding else {}
    )
    stream = io.BytesIO()
    pyarrow.parquet.write_table(
        pyarrow.table(columns),
        stream,
        row_group_size=7,
        write_page_checksum=checksums,
        **options,
    )
    return stream.getvalue()


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}
