"""Generators of damage: to the bytes of files, and to the values of JSON documents."""

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

Case = TypeVar("Case")

BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "one bit flipped": lambda content, rng: _flip(content, rng.randrange(8 * len(content))),
    "a bit flipped near the start": lambda content, rng: _flip(
        content, rng.randrange(min(8 * len(content), 512))
    ),
    "truncated": lambda content, rng: content[: rng.randrange(len(content))],
    "empty": lambda content, rng: b"",
    "zeros from some point on": lambda content, rng: _zeros(content, rng.randrange(len(content))),
    "all zeros": lambda content, rng: bytes(len(content)),
    "random bytes": lambda content, rng: rng.randbytes(len(content)),
    "bytes appended": lambda content, rng: content + rng.randbytes(7),
    "doubled": lambda content, rng: content + content,
}

REMOVED = object()  # instead of a value: the key is removed
VALUES: list[Any] = [  # hostile values for any place in a JSON document
    None, True, "", "text", "\ud800", -1, 0, 10**30, 0.5, 1e308, [], [[]], {}, {"a": {"b": [1]}},
]  # fmt: skip


def _flip(content: bytes, bit: int) -> bytes:
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def _zeros(content: bytes, start: int) -> bytes:
    return content[:start] + bytes(len(content) - start)


def damage_bytes(path: Path, kind: str, seed: int) -> None:
    """Applies ``BYTES[kind]`` to a file; the result differs from the file."""
    rng, before = random.Random(seed), path.read_bytes()
    after = before
    while after == before and before:
        after = BYTES[kind](before, rng)
    path.write_bytes(after)


def drawn(cases: Iterable[Case], count: int) -> list[Case]:
    """Returns ``count`` of the cases, always the same."""
    return random.Random(0).sample(list(cases), count)


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of all values in a JSON document; of a list only the first and the last."""
    items: Any = ()
    if isinstance(document, dict):
        items = document.items()
    elif isinstance(document, list):
        items = {0: document[0], len(document) - 1: document[-1]}.items() if document else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def with_value(document: Any, path: Sequence[Any], value: Any) -> Any:
    """Returns a copy of ``document`` with ``value`` at ``path``, or without that key or item if it
    is :data:`REMOVED`.
    """
    changed = place = copy.deepcopy(document)
    for key in path[:-1]:
        place = place[key] if isinstance(place, list) else place.setdefault(key, {})
    if value is not REMOVED:
        place[path[-1]] = value
    elif isinstance(place, list) or path[-1] in place:
        del place[path[-1]]
    return changed
