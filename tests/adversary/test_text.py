"""Hostile text: damaged and compressed files, lines of jsonl, parquet columns, special files, names
and globs.
"""

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
from msattn.trainer.data.prompts import Prompt, read_prompts
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


VALUES: dict[str, str] = {  # JSON that is a text, or is no text
    "text": '"a"',
    "separators": '"a\u2028b\u0085c\\u0000d\x7f"',
    "surrogate pair": '"\\ud83d\\ude00"',
    "half a surrogate pair": '"\\ud83d"',
    "surrogates in the wrong order": '"a\\ude00\\ud83d"',
    "deep": "[" * 100_000 + "]" * 100_000,
    "open": "[" * 100_000,
    "digits": "1" * 10_000,
    "NaN": "NaN",
    "null": "null",
    "list": '["a"]',
    "mapping": '{"a": "b"}',
    "control character": '"a\tb"',
    "bad escape": '"\\x41"',
    "half an escape": '"\\u12"',
    "no end": '"a',
    "empty": '""',
    "long": f'"{"a b " * 50_000}"',
    "comma": '"a",',
    "nothing": "",
}
LINES: dict[str, str] = {
    "one": '{{"text": {0}, "prompt": {0}, "answer": "a"}}',
    "answer": '{{"text": "a", "prompt": "a", "answer": {0}}}',
    "messages": '{{"text": "a", "messages": [{{"role": "user", "content": {0}}}], "answer": "a"}}',
    "alone": "{0}",
    "second": '{{"text": "a", "prompt": "a", "answer": "a"}}\n{{"text": {0}, "prompt": {0}, '
    '"answer": {0}}}',
}


def is_right(found: list[Any], path: Path) -> bool:
    """Returns True if ``found`` are the texts or the prompts of the jsonl file ``path``, and are
    Unicode.
    """
    rows = [
        json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()
    ]
    expected: list[Any] = [row["text"] for row in rows if row["text"]]
    if found and isinstance(found[0], Prompt):
        expected = [Prompt(row.get("prompt") or row["messages"], row["answer"]) for row in rows]
    return found == expected and bool(
        json.dumps([repr(each) for each in found], ensure_ascii=False).encode()
    )


def test_lines_of_jsonl(tries: Tries, tmp_path: Path) -> None:
    readers: dict[str, Callable[[str], list[Any]]] = {"text": texts_of, "prompts": read_prompts}
    for reader, line, value in product(readers, LINES, VALUES):
        path = tmp_path / f"{line}, {value}.jsonl"
        path.write_text(LINES[line].format(VALUES[value]), encoding="utf-8")
        read = readers[reader]
        tries.python(
            f"{reader}: {path.name}",
            lambda path=path, read=read: read(str(path)),
            lambda found, path=path: is_right(found, path),
        )


def dictionary(*texts: str, repeat: int = 1) -> pyarrow.DictionaryArray:
    return pyarrow.DictionaryArray.from_arrays(
        pyarrow.array(list(range(len(texts))) * repeat, pyarrow.int32()), list(texts)
    )


def named_twice() -> bytes:
    stream = io.BytesIO()
    table = pyarrow.Table.from_arrays(
        [pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"]
    )
    pyarrow.parquet.write_table(table, stream)
    return stream.getvalue()


def not_unicode() -> pyarrow.Array:
    return pyarrow.StringArray.from_buffers(
        2, pyarrow.array([0, 1, 2], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"\xff\xfe")
    )


# a file, and its texts if it is not refused
TABLES: dict[str, tuple[Callable[[], bytes], list[str] | None]] = {
    "names": (named_twice, None),
    "no columns": (lambda: parquet(), None),
    "no rows": (lambda: parquet(text=pyarrow.array([], pyarrow.string())), []),
    "gap": (lambda: parquet(text=["a", None]), None),
    "numbers": (lambda: parquet(text=[1]), None),
    "lists": (lambda: parquet(text=[["a"]]), None),
    "dictionary": (lambda: parquet(text=dictionary("a", "b")), ["a", "b"]),
    "large": (lambda: parquet(text=pyarrow.array(["a", ""], pyarrow.large_string())), ["a"]),
    "view": (lambda: parquet(text=pyarrow.array(["a", "b"], pyarrow.string_view())), ["a", "b"]),
    "not Unicode": (lambda: parquet(text=not_unicode()), None),
    "dotted": (lambda: parquet(**{"text": ["a"], "text.x": ["b"]}), ["a"]),
    "footer": (lambda: b"PAR1" + b"\xff" * 100 + b"PAR1", None),
    "long footer": (lambda: CONTENTS[".parquet"][:-8] + b"\xff\xff\xff\x7fPAR1", None),
}


def test_tables(tries: Tries, tmp_path: Path) -> None:
    for name in TABLES:
        path = tmp_path / f"{name}.parquet"
        path.write_bytes(TABLES[name][0]())
        tries.python(
            path.name,
            lambda path=path: texts_of(path),
            lambda found, name=name: found == TABLES[name][1],
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


NAMES = (
    b"caf\xe9.txt",
    b"new\nline.txt",
    b"[a].txt",
    b"{a,b}.txt",
    b"**.txt",
    b"${x}.txt",
    b"'\".txt",
    b"~.txt",
    b"a=b,c.txt",
)
NAMES += ("\u202e\u200b.txt".encode(), b"\x1b[31m.txt", b"x" * 251 + b".txt", b"\\.txt")


def test_names_of_files(tries: Tries, tmp_path: Path) -> None:
    """Files with hostile names in a folder, and named themselves, are read or refused."""
    for number, name in enumerate(NAMES):
        folder = tmp_path / str(number)
        folder.mkdir()
        for other in (name, b"other.txt"):
            Path(os.fsdecode(os.path.join(os.fsencode(folder), other))).write_text(
                os.fsdecode(other).encode("utf-8", "replace").decode()
            )
        path = folder / os.fsdecode(name)
        tries.python(
            f"in a folder: {name[:30]!r}",
            lambda folder=folder: sorted(texts_of(folder)),
            lambda found, path=path: found == sorted([path.read_text(), "other.txt"]),
        )
        for read in READERS.values():
            tries.python(
                f"itself: {name[:30]!r}",
                lambda path=path, read=read: read(path),
                lambda found, path=path: found in ([path.read_text()], path.read_text()),
            )
