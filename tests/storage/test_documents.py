"""Documents that cannot be reached, numbers that are not finite, and links of the Hub's cache."""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from msattn.trainer.artifacts import find
from msattn.trainer.errors import UserError, free_space
from msattn.trainer.storage.documents import (
    check_contained,
    check_regular,
    finite,
    parse_yaml,
    read_json,
    root_of_links,
)
from msattn.trainer.storage.model_files import ModelFiles


def test_numbers_that_json_lacks_are_null() -> None:
    assert finite({"a": [float("inf"), 1.0], "b": (float("nan"),)}) == {
        "a": [None, 1.0],
        "b": [None],
    }


@pytest.mark.parametrize("number", ["1e999", "NaN", '[1, {"a": 1e999}]'])
def test_numbers_of_json_are_finite(tmp_path: Path, number: str) -> None:
    (tmp_path / "a.json").write_text(f'{{"key": {number}}}')
    with pytest.raises(UserError, match=r"finite|not valid JSON"):
        read_json(tmp_path / "a.json", "a.json", 1000)


@pytest.mark.parametrize("number", [".nan", "[-.inf]"])
def test_numbers_of_yaml_are_finite(number: str) -> None:
    with pytest.raises(UserError, match="expected finite numbers"):
        parse_yaml(f"key: {number}", "a.yaml")


@pytest.mark.parametrize("path", ["a" * 300, "a/" * 2500, "a\0b"])
def test_paths_that_the_system_refuses(path: str) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        check_regular(Path(path), "file")
    with pytest.raises(UserError, match="artifact"):
        find(Path(path), "gate")
    if "\0" not in path:
        assert "GB are free" in free_space(Path(path))


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users may enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_a_folder_without_the_right_to_enter(public: Path) -> None:
    """As another user than root, whose rights have no limits."""
    closed = public / "closed"
    (closed / "gate").mkdir(parents=True)
    (closed / "gate/manifest.json").write_text("{}")
    closed.chmod(0)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def refusals() -> None:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        calls = [
            lambda: check_regular(closed / "gate/manifest.json", "manifest.json"),
            lambda: find(closed / "gate", "gate"),
            lambda: find(str(closed), "gate") / "manifest.json",
            lambda: free_space(closed / "gate/manifest.json"),
            lambda: ModelFiles("model.path=closed", closed).locate("tokenizer.json"),
        ]
        ends = []
        for call in calls:
            try:
                ends.append(str(call()))
            except BaseException as error:
                ends.append(f"{type(error).__name__}: {error}")
        sender.send(ends)

    process = context.Process(target=refusals)
    process.start()
    process.join()
    closed.chmod(0o755)
    regular, inside, folder, space, file = receiver.recv()
    assert regular == "UserError: manifest.json cannot be read (Permission denied)"
    assert inside == f"UserError: artifact {closed / 'gate'}: no such folder"
    assert folder == str(closed / "manifest.json")  # reading it is refused, as above
    assert "GB are free" in space
    assert file == "UserError: model.path=closed: tokenizer.json cannot be read (Permission denied)"


@pytest.mark.parametrize(
    ("name", "blobs", "accepted"),
    [("models--a--b", True, True), ("models--a--b", False, False), ("mine", True, False)],
)
def test_only_the_cache_of_the_hub_links_out_of_a_folder(
    tmp_path: Path, name: str, blobs: bool, accepted: bool
) -> None:
    repository = tmp_path / name
    commit = repository / "snapshots/abc"
    commit.mkdir(parents=True)
    store = repository / ("blobs" if blobs else "secret")
    store.mkdir()
    (store / "123").write_text("{}")
    (commit / "config.json").symlink_to("../../" + store.name + "/123")
    (tmp_path / "link").symlink_to(commit)
    for folder in (commit, tmp_path / "link"):
        if accepted:
            check_contained(folder / "config.json", root_of_links(folder), "config.json")
        else:
            with pytest.raises(UserError, match="outside its folder"):
                check_contained(folder / "config.json", root_of_links(folder), "config.json")
