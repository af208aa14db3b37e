"""Every file of a model folder that transformers reads is under the rule for links and sizes."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from msattn.trainer.models.tokenizer import OTHERS
from tests.adversary.damage import REMOVED
from tests.adversary.model_folders import (
    CONFIG,
    GENERATION,
    SETTINGS,
    TEMPLATE_FILE,
    VOCABULARY,
    WEIGHTS,
    Models,
    edit,
    edited,
    load_folder,
)
from tests.adversary.tries import Tries

CHECKED = {
    CONFIG,
    GENERATION,
    SETTINGS,
    VOCABULARY,
    TEMPLATE_FILE,
    "special_tokens_map.json",
    "extra.json",
    *OTHERS,
}
TEMPLATES = "additional_chat_templates/other.jinja"
FAMILIES = ("llama", "mistral", "qwen3", "gemma3_text", "glm4", "gpt_oss")


def names_asked(
    folder: Path, load: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> set[str]:
    """Returns the names of the files below ``folder`` that transformers looks for or opens, whether
    they exist or not.
    """
    asked = set[str]()

    def record(path: Any) -> bool:
        if str(path).startswith(f"{folder}/"):
            asked.add(os.path.relpath(path, folder))
        return isfile(path)

    isfile = os.path.isfile
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "isfile", record)
        load(folder)
    return asked


def load_directly(folder: Path) -> None:
    try:
        AutoTokenizer.from_pretrained(folder)
    except (
        OSError,
        ValueError,
        KeyError,
        ImportError,
    ):  # without tokenizer.json it looks for others
        assert not (folder / VOCABULARY).exists()
    AutoModelForCausalLM.from_pretrained(folder)


def test_what_transformers_looks_for_is_checked(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = set[str]()
    for family in FAMILIES:
        folder = models.damaged(edited(SETTINGS, "tokenizer_class", value=REMOVED), family=family)
        asked |= names_asked(folder, load_directly, monkeypatch)
        (folder / VOCABULARY).unlink()
        asked |= names_asked(folder, load_directly, monkeypatch)
    assert {"added_tokens.json", "merges.txt", "vocab.json", "tokenizer.model"} <= asked
    # see trainer/models/checkpoint.py
    others = {WEIGHTS, f"{WEIGHTS}.index.json", "adapter_config.json"}
    assert asked <= CHECKED | others


@pytest.mark.slow
def test_links_of_every_file(tries: Tries, models: Models) -> None:
    """A link that leaves the folder, and a file that is too large, are refused whatever the file is
    called.
    """
    for number, name in enumerate(sorted({*CHECKED, TEMPLATES})):

        def linked(folder: Path, name: str = name, large: bool = number % 2 == 1) -> None:
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            if not path.exists():
                path.write_text("{}")
            if name == "extra.json":  # a name that the settings give
                edit(folder / SETTINGS, ("fast_tokenizer_files",), ["extra.json"])
            if large:
                os.truncate(path, 2**30)
            else:
                shutil.move(path, folder.parent / "elsewhere")
                path.symlink_to("../elsewhere" if path.parent == folder else "../../elsewhere")

        folder = models.damaged(linked)
        tries.python(
            f"{name}, {'too large' if number % 2 else 'a link'}",
            lambda folder=folder: load_folder(folder),
        )
    for value in (["../model/tokenizer.json"], [], ["/etc/passwd"]):
        folder = models.damaged(
            lambda at, value=value: edit(at / SETTINGS, ("fast_tokenizer_files",), value)
        )
        accepted = None if value == [] else False
        tries.python(
            f"fast_tokenizer_files={value}",
            lambda folder=folder: load_folder(folder),
            bool,
            accepted=accepted,
        )
