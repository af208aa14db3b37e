"""A small model folder of each family, damage to it, and what comes of loading it."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from msattn.trainer.commands.answers import Clock, generate_greedily
from msattn.trainer.config import ModelConfig
from msattn.trainer.models import Loaded, load
from msattn.trainer.models.chat import encode_prompt
from tests.adversary.damage import BYTES, REMOVED, damage_bytes, with_value
from tests.adversary.tries import Tries
from tests.factory import embedded_tokenizer, random_tokens, save_tokenizer, tiny_model

WEIGHTS, CONFIG, GENERATION = "model.safetensors", "config.json", "generation_config.json"
VOCABULARY = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEXT = "t3 t5 t7"
TEMPLATE = (
    "{% for m in messages %}t1 {{ m.content }} t2 {% endfor %}{% if add_generation_prompt "
    "%}t4{% endif %}"
)
Damage = Callable[[Path], object]

HOSTILE: dict[str, Any] = {
    "removed": REMOVED,
    "null": None,
    "true": True,
    "a word": "hostile",
    "no text": "",
    "digits": "4",
    "long text": "x" * 100_000,
    "kernels of the Hub": "kernels-community/flash-attn",
    "path": "../../../../etc/passwd",
    "code": "__import__('os').system('touch ran')",
    "-1": -1,
    "0": 0,
    "3": 3,
    "2**31": 2**31,
    "10**400": 10**400,
    "half": 0.5,
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


@dataclass(frozen=True)
class Outcome:
    """Results of a loaded model: logits, a text as tokens, alone and as a message, the text of
    tokens, and greedy tokens.
    """

    logits: Tensor
    text: list[int]
    message: list[int]
    decoded: str
    greedy: list[int]

    def equals(self, other: "Outcome") -> bool:
        same = torch.equal(self.logits, other.logits)
        return same and all(
            getattr(self, name) == getattr(other, name)
            for name in ("text", "message", "decoded", "greedy")
        )


class Models:
    """Folders of small models, and one damaged copy at a time."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._expected: dict[str, Outcome] = {}

    def base(self, family: str = "llama") -> Path:
        """Returns the undamaged folder: two layers, a tokenizer, a chat template and a generation
        configuration.
        """
        folder = self._place / family
        if not folder.exists():
            # transformers' class for its tokenizers needs a byte-level vocabulary
            qwen = family.startswith("qwen")
            tiny_model(family, vocab_size=4096 if qwen else 128).save_pretrained(folder)
            if qwen:
                embedded_tokenizer().save_pretrained(folder)
            else:
                save_tokenizer(folder)
            edit(folder / SETTINGS, ("chat_template",), TEMPLATE)
            edit(folder / GENERATION, ("eos_token_id",), 0)
        return folder

    def expected(self, family: str = "llama") -> Outcome:
        """Returns the outcome of the undamaged folder."""
        if family not in self._expected:
            self._expected[family] = load_folder(self.base(family))
        return self._expected[family]

    def damaged(self, *damages: Damage, family: str = "llama") -> Path:
        """Returns a copy of the folder after ``damages``; the previous copy is removed."""
        copy = self._place / "damaged" / "model"
        shutil.rmtree(copy.parent, ignore_errors=True)
        shutil.copytree(self.base(family), copy)
        for damage in damages:
            damage(copy)
        return copy


def load_folder(folder: Path | str) -> Outcome:
    """Loads a model and uses it."""
    return outcome(load(ModelConfig(name="hostile", path=str(folder)), device="cpu"))


def outcome(loaded: Loaded) -> Outcome:
    tokens, clock = random_tokens(1, 9), Clock()
    text = encode_prompt(loaded.tokenizer, TEXT, False)
    message = encode_prompt(loaded.tokenizer, [{"role": "user", "content": TEXT}], None)
    generate_greedily(loaded, tokens, 4, clock)
    decoded = str(loaded.tokenizer.decode(tokens[0].tolist()))
    return Outcome(
        loaded.model(tokens).logits, text[0].tolist(), message[0].tolist(), decoded, clock.tokens
    )


def right(folder: Path, found: Outcome, expected: Outcome) -> bool:
    """Returns True if an outcome is that of the undamaged folder, or what the libraries make of
    each damaged file directly.
    """
    if found.equals(expected):
        return True
    try:
        return found.equals(direct_outcome(folder))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError):
        return False


def direct_outcome(folder: Path) -> Outcome:
    """Returns the outcome without msattn: by transformers' class of ``config.json``, the library
    tokenizers, and Jinja.
    """
    config, settings, generation = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in (CONFIG, SETTINGS, GENERATION)
    )
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=torch.float32
    ).eval()
    model.load_state_dict(load_file(folder / WEIGHTS))
    tokenizer = Tokenizer.from_file(str(folder / VOCABULARY))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    template = (
        (folder / TEMPLATE_FILE).read_text()
        if (folder / TEMPLATE_FILE).exists()
        else settings["chat_template"]
    )
    messages = [{"role": "user", "content": TEXT}]
    rendered = (
        Environment().from_string(template).render(messages=messages, add_generation_prompt=True)
    )
    text, message = (
        tokenizer.encode(each, add_special_tokens=each is TEXT).ids for each in (TEXT, rendered)
    )
    tokens = random_tokens(1, 9)
    decoded = tokenizer.decode(tokens[0].tolist(), skip_special_tokens=False)
    with torch.no_grad():
        return Outcome(
            model(tokens).logits, text, message, decoded, greedy(model, tokens, generation)
        )


def greedy(model: Any, tokens: Tensor, generation: dict[str, Any]) -> list[int]:
    """Returns up to four new tokens, by forward passes over the whole sequence."""
    ends = generation.get("eos_token_id")
    new: list[int] = []
    while len(new) < 4 and not (new and new[-1] in (ends if isinstance(ends, list) else [ends])):
        scores, penalty = model(tokens).logits[0, -1], generation.get("repetition_penalty", 1.0)
        seen = tokens[0].unique()
        scores[seen] = torch.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
        new.append(int(scores.argmax()))
        tokens = torch.cat([tokens, torch.tensor([new[-1:]])], dim=1)
    return new


def edit(path: Path, keys: Sequence[Any], value: Any) -> None:
    """Sets a value in a JSON file, which may not exist yet; :data:`REMOVED` removes it."""
    document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(with_value(document, keys, value)), encoding="utf-8")


def attempt(
    tries: Tries,
    models: Models,
    case: object,
    *damages: Damage,
    family: str = "llama",
    accepted: bool | None = None,
) -> None:
    """Tries to load a damaged copy: it is refused, or its outcome is :func:`right`; ``accepted``
    says which must be.
    """
    expected, folder = models.expected(family), models.damaged(*damages, family=family)
    tries.python(
        case,
        lambda: load_folder(folder),
        lambda found: right(folder, found, expected),
        accepted=accepted,
    )


NO_JSON = ("NaN", "Infinity", "deep")  # values of HOSTILE that no document may have


def known_end(key: str, name: str, unread: Iterable[str]) -> bool | None:
    """Returns True if a document with the value HOSTILE[name] of ``key`` must be accepted; None if
    that depends on the key.
    """
    if name in NO_JSON:
        return False
    return True if key in unread else None


def edited(file: str, *keys: Any, value: Any) -> Damage:
    """Returns the damage that :func:`edit` does to ``file``."""
    return lambda folder: edit(folder / file, keys, value)


# at times: in a string, or the last line's end
HARMLESS = ("one bit flipped", "a bit flipped near the start", "truncated")


def file_damages(file: str) -> Iterator[tuple[str, Damage]]:
    """Yields ways to damage a JSON file of a folder: its bytes, its nesting, its kind. All but
    HARMLESS have to be refused.
    """
    for kind in BYTES:
        yield kind, lambda at, kind=kind: damage_bytes(at / file, kind, 0)
    for text in (
        b"null",
        b"[]",
        b"NaN",
        b"[" * 10**5,
        b'{"a":' * 10**5,
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
    ):
        yield f"is {text[:9]!r}", lambda at, text=text: (at / file).write_bytes(text)
    for value in (b"-Infinity", b"1" * 10**4, b"[" * 500 + b"]" * 500, b'"\xff"'):
        first = b'{"x": ' + value + b", "
        yield f"has {value[:9]!r}", lambda at, first=first: replace_bytes(at / file, b"{", first)
    for target in ("/dev/zero", "/etc/passwd", "/", "nothing", file):
        yield (
            f"links to {target}",
            lambda at, target=target: ((at / file).unlink(), (at / file).symlink_to(target)),
        )
    yield "is large", lambda at: os.truncate(at / file, 2**30)
    yield "is a folder", lambda at: ((at / file).unlink(), (at / file).mkdir())
    yield "is a pipe", lambda at: ((at / file).unlink(), os.mkfifo(at / file))
    yield "links out", lambda at: linked(at / file, at.parent / file)


def replace_bytes(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(old, new, 1))


def linked(path: Path, target: Path) -> None:
    """Moves a file and leaves a link."""
    target.parent.mkdir(exist_ok=True)
    shutil.move(path, target)
    path.symlink_to(os.path.relpath(target, path.parent))
