"""Reading of untrusted JSON and YAML, bounded in size and depth, with checked types; conversion to
values that JSON has.
"""

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from msattn.trainer.errors import UserError, first_line

MAX_DEPTH = 32  # nested lists and objects
Schema = TypeVar("Schema")


def read_json(path: Path, where: str, max_bytes: int) -> dict[str, Any]:
    """Returns the object in a JSON file of at most ``max_bytes``; ``where`` begins error messages.

    Raises UserError like :func:`read_text`, and for documents that are not objects, contain NaN or
    infinity, or nest too deeply.
    """
    try:
        document = json.loads(read_text(path, where, max_bytes), parse_constant=_refuse_constant)
    except RecursionError as error:
        raise UserError(f"{where} nests deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{where} is not valid JSON ({first_line(error)})") from error
    return _plain_object(document, where)


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Returns the mapping in a YAML text; ``where`` begins error messages.

    Raises UserError for invalid YAML, deep nesting, a tag, an alias, and values that JSON lacks,
    such as NaN or a date.
    """
    import yaml

    try:
        marks = (yaml.TagToken, yaml.AnchorToken, yaml.AliasToken)
        marked = next((token for token in yaml.scan(text) if isinstance(token, marks)), None)
        if marked is not None:
            line = marked.start_mark.line + 1
            raise UserError(
                f"{where} has a tag, an anchor or an alias in line {line}; expected plain values"
            )
        document = yaml.safe_load(text)
    except RecursionError as error:
        raise UserError(f"{where} nests deeper than {MAX_DEPTH} levels") from error
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{where} is not valid YAML ({' '.join(str(error).split())})") from error
    return _plain_object({} if document is None else document, where)


def read_text(path: Path, where: str, max_bytes: int) -> str:
    """Returns the text of a regular UTF-8 file of at most ``max_bytes``; raises UserError for other
    files.
    """
    check_regular(path, where)
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise UserError(f"{where} cannot be read ({error.strerror})") from error
    if len(content) > max_bytes:
        raise UserError(f"{where} is larger than {max_bytes / 1e6:g} MB")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 at byte {error.start}") from error


def check_regular(path: Path, where: str) -> None:
    """Raises UserError if ``path`` is missing, unreachable, or not a regular file (for example a
    folder or a pipe).
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{where} is missing") from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"{where} cannot be read ({getattr(error, 'strerror', None) or first_line(error)})"
        ) from error
    if not stat.S_ISREG(mode):
        raise UserError(f"{where} is not a regular file")


def check_contained(path: Path, root: Path, where: str) -> None:
    """Raises UserError if ``path`` is a link to a file outside ``root``."""
    if not path.resolve().is_relative_to(root.resolve()):
        raise UserError(f"{where} links to a file outside its folder")


def root_of_links(folder: Path) -> Path:
    """Returns the folder that links in ``folder`` must not leave: files of the Hub's cache link to
    its ``blobs``.

    A repository in that cache is ``models--<id>/snapshots/<commit>`` beside ``models--<id>/blobs``.
    """
    folder = folder.resolve()
    for snapshots in (folder.parent, folder.parent.parent):
        repository = snapshots.parent
        of_hub = snapshots.name == "snapshots" and repository.name.startswith(
            ("models--", "datasets--")
        )
        if of_hub and os.path.isdir(repository / "blobs"):
            return repository
    return folder


def checked(document: Mapping[str, Any], schema: type[Schema], where: str) -> Schema:
    """Returns ``document`` as an instance of the dataclass ``schema``; raises UserError for missing
    keys and wrong types.

    Additional keys are ignored, or refused if the schema's ``__pydantic_config__`` forbids them.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(schema).validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise UserError(f"{where} has no key {key}") from error
        # an object has too much to show
        value = "" if isinstance(first["input"], dict) else f"={first['input']!r:.60}"
        parts = where, f"{key}{value}", re.sub(r"^Value error, ", "", first["msg"])
        raise UserError(": ".join(filter(None, parts))) from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _plain_object(document: Any, where: str) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise UserError(f"{where} holds a {type(document).__name__}, expected an object")
    _check_plain(document, where, 0)
    return document


def _check_plain(value: Any, where: str, depth: int) -> None:
    """Raises UserError for values that JSON lacks, such as dates and infinity, and for deep
    nesting.
    """
    if depth > MAX_DEPTH:
        raise UserError(f"{where} nests deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UserError(f"{where} has the key {key!r:.40}, expected strings")
            _check_plain(item, where, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item, where, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        # JSON's 1e999 is infinite
        raise UserError(f"{where} has the value {value}, expected finite numbers")
    elif value is not None and not isinstance(value, str | int | float | bool):
        raise UserError(
            f"{where} has the value {value!r:.40}, expected a string, a number, true, false or null"
        )


def finite(value: Any) -> Any:
    """Returns ``value`` with None for infinity and NaN, which JSON lacks, and strings as keys."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
