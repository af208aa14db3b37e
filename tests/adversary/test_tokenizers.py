"""Hostile tokenizers and chat templates of model folders."""

from pathlib import Path
from typing import Any

import pytest

from msattn.trainer.models import limited
from tests.adversary.damage import REMOVED
from tests.adversary.model_folders import (
    SETTINGS,
    TEMPLATE_FILE,
    VOCABULARY,
    Damage,
    Models,
    attempt,
    edit,
    edited,
)
from tests.adversary.tries import Tries, spread

WORDS = {"type": "WordLevel", "unk_token": "t0"}
PAIRS = {"type": "BPE", "vocab": {"t": 0, "3": 1, "t3": 2}, "merges": ["t 3"]}
TOKEN = {
    "content": "t7",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
FIRST = {
    "single": [
        {"SpecialToken": {"id": "x", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [],
    "special_tokens": {"x": {"id": "x", "ids": [10**6], "tokens": ["x"]}},
}
PAD = {
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "t0",
}


def replaced(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


# name, key of tokenizer.json, and a value that takes long, or fails for some texts
TOKENIZERS: list[tuple[str, str, Any]] = [
    (
        "doubles",
        "normalizer",
        {"type": "Sequence", "normalizers": [replaced("tt", String="t")] * 60},
    ),
    ("grows", "normalizer", replaced("t " * 10**6, String="t")),
    ("backtracks", "normalizer", replaced("", Regex="(t+)+$|(.*)*x")),
    (
        "allocates",
        "normalizer",
        {"type": "Precompiled", "precompiled_charsmap": "/////////////////w=="},
    ),
    ("panics", "normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    ("splits slowly a long text", "pre_tokenizer", split("(?:(?: [a-z]{1,9}){1,9})+\u0001")),
    ("splits by nothing", "pre_tokenizer", split("(((")),
    ("pads", "padding", {"strategy": {"Fixed": 10**9}, **PAD}),
    (
        "truncates",
        "truncation",
        {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
    ),
    ("has no unknown token", "model", WORDS | {"vocab": {"t0": 0}, "unk_token": "none"}),
    ("has a high id", "model", WORDS | {"vocab": {"t0": 0, "t3": 10**6}}),
    ("has an id twice", "model", WORDS | {"vocab": {"t0": 0, "t3": 1, "t5": 1, "t7": 1}}),
    ("has a high added id", "added_tokens", [TOKEN | {"id": 10**6}]),
    ("begins with a high id", "post_processor", {"type": "TemplateProcessing", **FIRST}),
    (
        "ends with a high id",
        "post_processor",
        {"type": "BertProcessing", "sep": ["x", 10**6], "cls": ["y", 2**32 - 1]},
    ),
    ("has no merges", "model", PAIRS | {"vocab": {"t": 0}}),
    ("draws", "model", PAIRS | {"dropout": 0.5}),
    (
        "has a wrong unknown id",
        "model",
        {"type": "Unigram", "vocab": [["t0", 0.0], ["t", -1e308]], "unk_id": 7},
    ),
    ("decodes by backtracking", "decoder", replaced("", Regex="(t+)+$|(.*)*x")),
]
LOOP = "{% for i in range(100000) %}"
TEMPLATES = {
    "loops": LOOP * 3 + "{% endfor %}" * 3,
    "power": "{{ 10 ** (10 ** 10) }}",
    "doubling": "{% set n = namespace(x='tttttttt') %}{% for i in range(60) %}{% set n.x = n.x ~ "
    "n.x %}{% endfor %}{{ n.x }}",
    "width": "{{ '%99999999999d' % 1 }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "nesting": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "date": "{{ strftime_now('%Y' * 10 ** 9) }}",
    "syntax": "{% for %}",
    "undefined": "{{ hostile.attribute }}",
    "division": "{{ 1 / 0 }}",
    "raises lines": "{{ raise_exception('no\nTraceback\nmore') }}",
    "includes": "{% include '/etc/passwd' %}",
    "attribute": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "surrogate": "{{ '\\ud800' }}",
    "nothing": "",
    "sort": "{{ ['t3', 't1'] | sort | join(' ') }}",
    "content": "{{ messages[0].content }}",
    "control characters": "\x00\x1b[2J{{ messages[0].content }}",
}

SERVED = ("content", "sort")


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "SECONDS", 4)


@pytest.mark.slow
def test_tokenizers(tries: Tries, models: Models) -> None:
    for name, key, value in TOKENIZERS:
        attempt(tries, models, f"tokenizer {name}", edited(VOCABULARY, key, value=value))


@pytest.mark.slow
def test_chat_templates(tries: Tries, models: Models) -> None:
    places = (lambda text: edited(SETTINGS, "chat_template", value=text), in_a_file)
    for (name, template), placed in spread(TEMPLATES.items(), places):
        attempt(
            tries,
            models,
            f"template {name}",
            placed(template),
            accepted=True if name in SERVED else None,
        )


def in_a_file(template: str) -> Damage:
    """Writes the template beside the settings, which keep another one."""

    def damage(at: Path) -> None:
        (at / TEMPLATE_FILE).write_text(template)
        edit(at / SETTINGS, ("chat_template",), REMOVED)

    return damage
