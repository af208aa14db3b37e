"""A small model folder, ways to damage it, and the outcome of loading it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msattn.trainer.commands.greedy import Clock, generate_greedily
from msattn.trainer.config import ModelConfig
from msattn.trainer.models import Loaded, load
from msattn.trainer.models.chat import encode_prompt
from tests.factory import random_tokens, save_tokenizer, tiny_model

TEXT = "t3 t5 t7"
TEMPLATE = "{% for m in messages %}t1 {{ m.content }} t2 {% endfor %}{% if add_generation_prompt %}t4{% endif %}"
REMOVED = object()  # instead of a value: the key is removed
HOSTILE: dict[str, Any] = {
    "removed": REMOVED,
    "null": None,
    "true": True,
    "false": False,
    "a word": "hostile",
    "no text": "",
    "digits": "4",
    "long text": "x" * 100_000,
    "kernels of the Hub": "kernels-community/flash-attn",
    "path": "../../../../etc/passwd",
    "code": "__import__('os').system('touch ran')",
    "-1": -1,
    "0": 0,
    "1": 1,
    "3": 3,
    "a million": 10**6,
    "2**31": 2**31,
    "2**63": 2**63,
    "10**400": 10**400,
    "half": 0.5,
    "-0.5": -0.5,
    "1e308": 1e308,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "empty list": [],
    "list": [1, 2],
    "list of null": [None],
    "empty object": {},
    "object": {"a": {"b": 1}},
    "deep": json.loads("[" * 200 + "]" * 200),
}


def save_base(folder: Path, family: str = "llama") -> Path:
    """Saves a model of two layers with a tokenizer, a chat template and a generation configuration; returns ``folder``."""
    tiny_model(family).save_pretrained(folder)
    save_tokenizer(folder)
    edit(folder, "tokenizer_config.json", "chat_template", TEMPLATE)
    edit(folder, "generation_config.json", "eos_token_id", 0)
    return folder


def edit(folder: Path, file: str, key: str, value: Any) -> None:
    """Sets a key of a JSON file in ``folder``; dots in ``key`` separate levels, and :data:`REMOVED` removes it."""
    path = folder / file
    document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    *parents, last = key.split(".")
    place = document
    for parent in parents:
        place = place[int(parent)] if isinstance(place, list) else place.setdefault(parent, {})
    last = int(last) if isinstance(place, list) else last
    if value is REMOVED:
        if last in place or isinstance(place, list):
            del place[last]
    else:
        place[last] = value
    path.write_text(json.dumps(document), encoding="utf-8")


@dataclass(frozen=True)
class Outcome:
    """Results of a loaded model: logits, a text as tokens, alone and as a message, the text of tokens, and greedy tokens."""

    logits: Tensor
    text: list[int]
    message: list[int]
    decoded: str
    greedy: list[int]

    def equals(self, other: "Outcome") -> bool:
        """Returns whether all results are equal."""
        return torch.equal(self.logits, other.logits) and self.greedy == other.greedy and self.tokens_equal(other)

    def with_greedy(self, greedy: list[int]) -> "Outcome":
        return replace(self, greedy=greedy)

    def with_message(self, message: list[int]) -> "Outcome":
        return replace(self, message=message)

    def tokens_equal(self, other: "Outcome") -> bool:
        """Returns whether texts and tokens are equal."""
        return all(getattr(self, each) == getattr(other, each) for each in ("text", "message", "decoded"))


def outcome(loaded: Loaded) -> Outcome:
    tokens = random_tokens(1, 9)
    text = encode_prompt(loaded.tokenizer, TEXT, False)
    message = encode_prompt(loaded.tokenizer, [{"role": "user", "content": TEXT}], None)
    clock = Clock()
    generate_greedily(loaded, tokens, 4, clock)
    decoded = str(loaded.tokenizer.decode(tokens[0].tolist()))
    return Outcome(loaded.model(tokens).logits, text[0].tolist(), message[0].tolist(), decoded, clock.tokens)


def load_folder(folder: Path | str, **options: Any) -> Outcome:
    return outcome(load(ModelConfig(name="hostile", path=str(folder), **options), device="cpu"))


class Copies:
    """Damaged copies of a folder, one at a time."""

    def __init__(self, base: Path, place: Path) -> None:
        self.base, self.place = base, place

    def damaged(self, damage: Callable[[Path], object]) -> Path:
        """Returns a copy of the folder after ``damage(copy)``; the previous copy is removed."""
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.base, self.place)
        damage(self.place)
        return self.place
