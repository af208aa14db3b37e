"""The header of a GGUF file: its metadata and its table of tensors, read without the tensors and without other packages."""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from msattn.trainer.errors import UserError, first_line
from msattn.trainer.storage.documents import check_regular

SUFFIX = ".gguf"
MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY = 8, 9  # types of values that have no fixed size
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FLOAT32 = 0  # the type of a tensor
ALIGNMENT = 32  # of tensors, unless the metadata has another
MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes
    ----------
    shape : in the order of PyTorch, the last dimension contiguous.
    kind : number of its type, as ``gguf.GGMLQuantizationType`` has it.
    start : its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file: its metadata by their keys, and its tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def positions(self) -> Any:
        """The number of positions that the model has, as the file states it; None if it does not."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.context_length")

    def floats(self, name: str, where: str) -> list[float]:
        """Returns the values of a tensor in single precision; raises UserError if it has another type, or is cut off."""
        tensor = self.tensors[name]
        with self.path.open("rb") as file:
            file.seek(tensor.start)
            content = file.read(4 * tensor.numel)
        if tensor.kind != FLOAT32 or len(content) < 4 * tensor.numel:
            raise UserError(f"{where}: {name} is damaged: accepted are {tensor.numel} numbers in single precision")
        return list(struct.unpack(f"<{tensor.numel}f", content))


def read_gguf(path: Path, where: str) -> GgufFile:
    """Returns the header of a GGUF file.

    Parameters
    ----------
    where : beginning of error messages, such as ``model.path=model.gguf``.

    Raises
    ------
    UserError : the file is missing, not regular, no GGUF file, or damaged.
    """
    check_regular(path, where)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            metadata, tensors = _Reader(content).header()
    except (ValueError, struct.error, OverflowError, MemoryError) as error:  # an empty file raises ValueError too
        raise UserError(f"{where}: no intact GGUF file ({first_line(error)})") from error
    except OSError as error:
        raise UserError(f"{where} cannot be read ({error.strerror})") from error
    return GgufFile(path, metadata, tensors)


class _Reader:
    """Reads values one after another; raises ValueError or struct.error for what is no GGUF file, or ends too early."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.position = 0

    def header(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """Returns the metadata and the tensors."""
        if self._bytes(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, tensors, entries = self._unpack("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"version {version}: accepted are {' and '.join(map(str, VERSIONS))}, in little-endian order")
        metadata = {self._string(): self._value(self._unpack("I")[0]) for _ in range(entries)}
        table = list(self._tensors(tensors))
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ValueError(f"general.alignment={alignment!r:.40}")
        first = -(-self.position // alignment) * alignment
        found = {name: GgufTensor(name, shape, kind, first + offset) for name, shape, kind, offset in table}
        if len(found) < len(table):
            raise ValueError("two tensors have the same name")
        return metadata, found

    def _tensors(self, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        for _ in range(count):
            name, (dimensions,) = self._string(), self._unpack("I")
            if dimensions > MAX_DIMENSIONS:
                raise ValueError(f"{name:.60} has {dimensions} dimensions")
            shape = self._unpack(f"{dimensions}Q")
            kind, offset = self._unpack("IQ")
            yield name, shape[::-1], kind, offset

    def _value(self, kind: int) -> Any:
        if kind in FORMATS:
            return self._unpack(FORMATS[kind])[0]
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise ValueError(f"a value of type {kind}")
        item, count = self._unpack("IQ")
        if item in FORMATS:
            return list(self._unpack(f"{count}{FORMATS[item]}"))
        if item != STRING:
            raise ValueError(f"a list of values of type {item}")
        return [self._string() for _ in range(count)]

    def _string(self) -> str:
        (size,) = self._unpack("Q")
        return self._bytes(size).decode()

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        """Returns the next values, in little-endian order and without padding."""
        values = struct.Struct(f"<{layout}")
        return values.unpack(self._bytes(values.size))

    def _bytes(self, size: int) -> bytes:
        if size > len(self.content) - self.position:
            raise ValueError("it ends too early")
        self.position += size
        return self.content[self.position - size : self.position]
