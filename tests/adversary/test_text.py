"""Hostile text: damaged and compressed files, bombs, and special files."""

import gzip
import io
import json
import lzma
import os
import random
import socket
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from msattn.trainer.commands.own import read_prompt
from msattn.trainer.config import DataConfig
from msattn.trainer.config import text_files as reading
from msattn.trainer.data import documents
from msattn.trainer.data.prompts import read_prompts
from tests.adversary.tries import Tries
from tests.data.texts import COMPRESSORS, parquet, zstd

TEXTS = [f"Document {number}: déjà vu, “quoted”,\nnext line.\n" for number in range(20)]


def texts_of(path: Path | str) -> list[str]:
    """Returns the texts of all documents under ``path``, none held out."""
    cfg = DataConfig("text", path=str(path), heldout_path=str(path))
    return [document.text for document in documents(cfg, heldout=False)]


CONTENTS: dict[str, bytes] = {
    ".txt": "".join(TEXTS).encode(),
    ".jsonl": "\n".join(json.dumps({"text": text}) for text in TEXTS).encode(),
    ".parquet": parquet(text=TEXTS),
}
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "without its end": lambda content: content[:-5],
    "twice": lambda content: content + content,
    "with more behind": lambda content: content + b"\xff\xfe\0more",
    "zeros": lambda content: bytes(len(content)),
    "random": lambda content: random.Random(0).randbytes(len(content)),
    "flipped in many places": lambda content: flipped(content, 20),
    "UTF-16": lambda content: content.decode("latin1").encode("utf-16"),
    "surrogates": lambda content: content + b"\xed\xa0\x80",
    "compressed twice": lambda content: gzip.compress(gzip.compress(content)),
    "other compression": lambda content: zstd(gzip.compress(content)),
}


def flipped(content: bytes, bits: int) -> bytes:
    found = bytearray(content)
    for place in random.Random(bits).choices(range(len(content)), k=bits):
        found[place] ^= 1 << place % 8
    return bytes(found)


def independently(path: Path) -> list[str]:
    """Returns the texts that a file holds, read by other means; an error if it is damaged."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    elif path.suffix == ".xz":
        content = lzma.decompress(content)
    elif path.suffix == ".zst":
        content = pyarrow.input_stream(io.BytesIO(content), compression="zstd").read()
    if ".parquet" in path.name:
        found = pyarrow.parquet.read_table(io.BytesIO(content))["text"].to_pylist()
    elif ".jsonl" in path.name:
        found = [json.loads(line)["text"] for line in content.decode().split("\n") if line.strip()]
    else:
        found = [content.decode().removeprefix("\ufeff").replace("\r\n", "\n")]
    return [text for text in found if text]


def test_damaged_files(tries: Tries, tmp_path: Path) -> None:
    for kind, compression, damage in product(CONTENTS, COMPRESSORS, DAMAGES):
        path = tmp_path / f"{damage}{kind}{compression}"
        path.write_bytes(DAMAGES[damage](COMPRESSORS[compression](CONTENTS[kind])))
        tries.python(
            path.name,
            lambda path=path: texts_of(path),
            lambda found, path=path: found == independently(path),
        )


def dictionary(*texts: str, repeat: int = 1) -> pyarrow.DictionaryArray:
    return pyarrow.DictionaryArray.from_arrays(
        pyarrow.array(list(range(len(texts))) * repeat, pyarrow.int32()), list(texts)
    )


BOMBS: dict[str, Callable[[], bytes]] = {
    ".txt.gz": lambda: gzip.compress(bytes(2**25)),
    ".txt.zst": lambda: zstd(bytes(2**28)),
    ".jsonl.zst": lambda: zstd(b'{"text": "a"}\n' * 2**23),
    "-line.jsonl.zst": lambda: zstd(b'{"text": "' + b"a" * 2**26 + b'"}'),
    ".parquet": lambda: parquet(text=dictionary("a" * 2**19, repeat=2**11)),
    "-text.parquet": lambda: parquet(text=["a" * 2**26]),
}


@pytest.mark.slow
def test_bombs(tries: Tries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 256 MB of free memory, files of a few kilobytes that hold more text than that."""
    monkeypatch.setattr(reading, "free_memory", lambda: 2**28)
    for name in BOMBS:
        path = tmp_path / f"bomb{name}"
        path.write_bytes(BOMBS[name]())
        tries.python(path.name, lambda path=path: sum(map(len, texts_of(path))))
    with (tmp_path / "sparse.txt").open("wb") as file:
        file.truncate(2**40)
    for name, read in READERS.items():
        tries.python(f"sparse, {name}", lambda read=read: read(tmp_path / "sparse.txt"))


READERS: dict[str, Callable[[Path], Any]] = {
    "data.path": texts_of,
    "eval.prompts.path": lambda path: read_prompts(str(path)),
    "--prompt-file": lambda path: read_prompt(None, path),
}


def special_files(folder: Path) -> Iterable[Path]:
    """Creates and yields files that are no regular files, or cannot be opened."""
    os.mkfifo(folder / "pipe.txt")
    socket.socket(socket.AF_UNIX).bind(str(folder / "socket.txt"))
    (folder / "zero.txt").symlink_to("/dev/zero")
    (folder / "broken.txt").symlink_to(folder / "nowhere")
    (folder / "itself.txt").symlink_to(folder / "itself.txt")
    (folder / "a.txt").symlink_to(folder / "b.txt")
    (folder / "b.txt").symlink_to(folder / "a.txt")
    (folder / "folder.txt").mkdir()
    yield from sorted(folder.iterdir())
    yield from map(Path, ("/dev/zero", "/dev/null", "/proc/self/mem"))
    yield from (
        Path(name)
        for name in (
            "",
            " ",
            "a\0b",
            "a\nb",
            "x" * 300,
            "x/" * 3000,
            "~nobody/x.txt",
            "a.txt/",
            "\udcff.txt",
        )
    )


def test_special_files(tries: Tries, here: Path) -> None:
    (here / "files").mkdir()
    files = list(special_files(here / "files"))
    for (name, read), file in product(READERS.items(), files):
        tries.python(f"{name}={str(file)[:60]!r}", lambda read=read, file=file: read(file))
    for name, read in READERS.items():
        (here / "good.txt").write_text('{"prompt": "a", "answer": "b"}')
        (here / "link.txt").symlink_to(here / "good.txt") if not (
            here / "link.txt"
        ).exists() else None
        tries.python(
            f"{name}, link", lambda read=read: read(here / "link.txt"), lambda found: bool(found)
        )
