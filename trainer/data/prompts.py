"""The user's own prompts and their expected answers, from a jsonl file."""

from dataclasses import dataclass
from typing import Any

from msattn.trainer.config.text_files import is_unicode, parse_json, read_text
from msattn.trainer.config.values import shown
from msattn.trainer.data.matching import contains_answer, normalized
from msattn.trainer.errors import UserError

FORMAT = (
    'each line is {"prompt": ..., "answer": ...}, or {"messages": [{"role": ..., "content": '
    '...}], "answer": ...}'
)


@dataclass(frozen=True)
class Prompt:
    """A prompt, as text or as messages with ``role`` and ``content``, and the expected answer."""

    prompt: str | list[dict[str, str]]
    answer: str

    @property
    def text(self) -> str:
        """The prompt for the reader: the text, or the last message."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]

    def is_answered_by(self, text: str) -> bool:
        """Returns True if ``text`` contains the expected answer, like :func:`contains_answer`."""
        return contains_answer(text, self.answer)


def read_prompts(path: str | None) -> list[Prompt]:
    """Reads a jsonl file; an error names the line."""
    if path is None:
        raise UserError(f"eval.prompts.path=null: expected a jsonl file; {FORMAT}")
    key = f"eval.prompts.path={shown(path)}"
    lines = read_text(path, key).split("\n")  # strings may contain other line ends
    prompts = [
        _parse(line, f"{key}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise UserError(f"{key}: the file is empty; {FORMAT}")
    return prompts


def _parse(line: str, where: str) -> Prompt:
    entry = parse_json(line, where)
    entry = entry if isinstance(entry, dict) else {}
    kinds = {"prompt": _is_text, "messages": _are_messages}
    given = [key for key in kinds if key in entry]
    is_answer = _is_text(entry.get("answer")) and normalized(entry["answer"])
    if len(given) != 1 or not kinds[given[0]](entry[given[0]]) or not is_answer:
        raise UserError(f"{where}: {FORMAT}")
    return Prompt(entry[given[0]], entry["answer"])


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and is_unicode(value)


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and all(map(_is_text, value.values()))
    )
