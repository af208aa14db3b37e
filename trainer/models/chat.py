"""Prompts as tokens, with the chat template of instruct models."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from msattn.trainer.errors import UserError, library_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, str]]  # each with the keys role and content
# stands for a message whose surroundings are wanted; invisible separators occur in no template
MARK = "\u2063msattn\u2063"


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase", prompt: str | Messages, chat: bool | None
) -> Tensor:
    """Returns the tokens of a prompt, int64 ``[1, N]``: a text, or messages, which always need a
    chat template.

    ``chat`` makes a text a user message; None does so if the tokenizer has a chat template. Raises
    UserError if there is no chat template, if the template or the tokenizer refuses the messages,
    or if no tokens result.
    """
    if isinstance(prompt, str):
        if not uses_chat(tokenizer, chat):
            return torch.tensor([_tokens(tokenizer, prompt)])
        prompt = [{"role": "user", "content": prompt}]
    elif tokenizer.chat_template is None:
        raise UserError(
            "messages: the tokenizer has no chat template; give a prompt as text instead"
        )
    return torch.tensor([_tokens(tokenizer, _render(tokenizer, prompt), add_special_tokens=False)])


def encode_conversation(
    tokenizer: "PreTrainedTokenizerBase", messages: Messages, chat: bool | None
) -> Tensor:
    """Returns the tokens of a conversation that ends with a user message, int64 ``[1, N]``, like
    :func:`encode_prompt`.

    Without a chat template the model continues text: answers directly follow messages, and blank
    lines separate turns.
    """
    if uses_chat(tokenizer, chat):
        return encode_prompt(tokenizer, messages, chat)
    turns: list[str] = []
    for message in messages:
        if message["role"] == "user":
            turns.append("")
        turns[-1] += message["content"]
    return encode_prompt(tokenizer, "\n\n".join(turns), chat)


def around_prompt(
    tokenizer: "PreTrainedTokenizerBase", chat: bool | None
) -> tuple[list[int], list[int]]:
    """Returns the tokens before and after the text of a prompt; without a chat template there are
    none after it.
    """
    if not uses_chat(tokenizer, chat):
        return list(tokenizer("").input_ids), []
    before, _, after = _render(tokenizer, [{"role": "user", "content": MARK}]).partition(MARK)
    first, last = (
        list(tokenizer(part, add_special_tokens=False).input_ids) for part in (before, after)
    )
    return first, last


def answer_end(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Returns the token that the chat template writes after an answer; none without one that is no
    ordinary text.
    """
    if tokenizer.chat_template is None:
        return []
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]

    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # a template without answers; for other messages it is refused where they are
        return []
    if MARK not in text:
        return []
    after = text.rpartition(MARK)[2].lstrip()
    tokens = tokenizer(after, add_special_tokens=False).input_ids[:1]
    return [token for token in tokens if token in tokenizer.added_tokens_decoder]


def common_prefix(a: list[int], b: list[int]) -> int:
    """Returns the number of first tokens that are equal."""
    return next(
        (i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other),
        min(len(a), len(b)),
    )


def uses_chat(tokenizer: "PreTrainedTokenizerBase", chat: bool | None) -> bool:
    """Returns True if prompts become messages; ``chat=None`` leaves that to the tokenizer."""
    return tokenizer.chat_template is not None if chat is None else chat


def _render(tokenizer: "PreTrainedTokenizerBase", messages: Messages) -> str:
    if tokenizer.chat_template is None:
        raise UserError(
            "chat: the tokenizer has no chat template; chat=false sends prompts unchanged"
        )
    with library_errors("messages: the model's chat template refuses them"):
        return str(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )


def _tokens(tokenizer: "PreTrainedTokenizerBase", text: str, **options: bool) -> list[int]:
    with library_errors("prompt: the model's tokenizer refuses it"):
        tokens = list(tokenizer(text, **options).input_ids)
    if not tokens:
        raise UserError("prompt: the model's tokenizer returns no token for it")
    return tokens
