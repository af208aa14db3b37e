"""``msattn generate --chat``: several turns with sparse attention, over one KV cache."""

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import TextStreamer

from msattn.trainer.commands.answers import (
    Answer,
    Clock,
    check_fits,
    describe,
    find_served,
    format_number,
    generate_greedily,
    tracked,
)
from msattn.trainer.config import GenerateConfig
from msattn.trainer.errors import Terminated, UserError, print_once
from msattn.trainer.models import Described, Loaded
from msattn.trainer.models.chat import Messages, around_prompt, common_prefix, encode_conversation
from msattn.trainer.models.ends import end_tokens
from msattn.trainer.models.tap import CACHE
from msattn.trainer.progress import report
from msattn.trainer.serving.attach import attach
from msattn.trainer.serving.contiguous.install import can_crop

HELP = """\
/reset   forgets the conversation
/help    prints this list
/exit    quits, as does Ctrl-D
Ctrl-C   stops an answer at its next token, or at once if pressed twice; at the prompt it quits"""


@dataclass(frozen=True)
class Turn(Answer):
    """An answer, and the numbers that are printed below it."""

    new_tokens: int  # tokens of the prompt that were not in the cache
    cached_tokens: int  # tokens in the cache after the answer
    interrupted: bool  # the answer was stopped by Ctrl-C

    @property
    def figures(self) -> dict[str, float]:
        return {
            "new_prompt_tokens": self.new_tokens,
            "cached_tokens": self.cached_tokens,
        } | super().figures

    def __str__(self) -> str:
        parts = [f"{self.new_tokens} new prompt tokens", f"{self.cached_tokens} in the cache"]
        if self.clock.tokens:
            parts.append(f"first token after {format_number(self.clock.first_token_s)} s")
        if len(self.clock.tokens) > 1:
            parts.append(f"{format_number(self.clock.tokens_per_s)} tokens/s")
        read = {name: self.stats[name] for name in ("sparsity", "selectivity")}
        parts += [
            f"{name} {format_number(value)}" for name, value in read.items() if value is not None
        ]
        if self.stats["dense_by_choice"]:
            parts.append("dense where that is faster (dense_below=0: sparse everywhere)")
        if self.stats["dense_fallbacks"]:
            parts.append(f"{self.stats['dense_fallbacks']} dense layer passes, not supported")
        return ", ".join([*parts, "interrupted"] if self.interrupted else parts)


class StopOnInterrupt(StoppingCriteria):
    """Ends an answer at its next token after Ctrl-C, inside the context; a second Ctrl-C raises
    KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.interrupted = False

    def __enter__(self) -> "StopOnInterrupt":
        self._previous = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True

    def __call__(self, input_ids: Tensor, scores: Tensor, **options: Any) -> Tensor:
        return torch.full((len(input_ids),), self.interrupted, device=input_ids.device)


class Conversation:
    """Messages, which end with an answer, and the cache of their tokens (``cached``)."""

    def __init__(self, cfg: GenerateConfig, loaded: Loaded, options: dict[str, Any]) -> None:
        self.cfg, self.loaded, self.options = cfg, loaded, options
        self.reset()

    def reset(self) -> None:
        self.messages: Messages = []
        self._forget_cache()

    def answer(self, message: str) -> Turn:
        """Generates the answer to ``message`` and prints it token by token. Ctrl-C stops it; what
        was printed remains.
        """
        messages: Messages = [*self.messages, {"role": "user", "content": message}]
        tokenizer: Any = self.loaded.tokenizer
        with StopOnInterrupt() as stop:
            ids = _encoded(self.cfg, self.loaded, messages).to(self.loaded.model.device)
            known = self._keep_prefix(ids[0].tolist())
            ends = end_tokens(self.loaded.model)  # not every tokenizer marks these as special
            clock = Clock(
                TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True), hidden=ends
            )
            with attach(self.loaded.model, **self.options) as sparse:
                self._generate(ids, clock, stop)
            text = tokenizer.decode(
                [token for token in clock.tokens if token not in ends], skip_special_tokens=True
            )
            if clock.tokens:  # otherwise the message was not read
                self.messages = [*messages, {"role": "assistant", "content": text}]
            return Turn(
                text,
                clock,
                sparse.stats(),
                ids.shape[1] - known,
                len(self.cached),
                stop.interrupted,
            )

    def _generate(self, ids: Tensor, clock: Clock, stop: StopOnInterrupt) -> None:
        options = {CACHE: self.cache, "stopping_criteria": StoppingCriteriaList([stop])}
        try:
            tokens = generate_greedily(self.loaded, ids, self.cfg.max_new_tokens, clock, **options)[
                0
            ]
        except BaseException as error:
            self._forget_cache()  # a pass that was cut short leaves layers of different lengths
            if not isinstance(error, KeyboardInterrupt) or isinstance(error, Terminated):
                raise
            clock.end()
        else:
            # the last token was not fed to the model
            self.cached = tokens[: self.cache.get_seq_length()].tolist()

    def _keep_prefix(self, ids: list[int]) -> int:
        """Crops the cache to the tokens that ``ids`` begin with, without the last; returns their
        number.

        Templates may rewrite earlier turns (drop reasoning), and an answer's text may have other
        tokens than those generated.
        """
        known = common_prefix(self.cached, ids[:-1])
        if known < len(self.cached) and not can_crop(self.cache):
            known = 0
        if known == 0:
            self._forget_cache()
        elif known < len(self.cached):
            self.cache.crop(known - len(self.cached))
            self.cached = self.cached[:known]
        return known

    def _forget_cache(self) -> None:
        self.cache = DynamicCache(config=self.loaded.model.config)
        self.cached: list[int] = []


def chat(cfg: GenerateConfig, prompt: str = "") -> None:
    """Answers the lines of standard input until it ends; ``prompt`` is the message before them, ""
    for none.
    """
    served = find_served(cfg)
    # refuses chat=true without a template before the first message
    around_prompt(served.model.tokenizer, cfg.chat)
    if prompt:
        _encoded(cfg, served.model, [{"role": "user", "content": prompt}])
    loaded = served.model.load()
    with attach(loaded.model, **served.options):
        pass  # refuses artifacts that do not fit before the first message
    conversation = Conversation(cfg, loaded, served.options)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{describe(cfg, served)}. /help lists the commands.", style="dim", markup=False)
    # No lines about the time that the command has taken.
    with tracked(cfg, "generate", served) as tracker, report(lambda: ""):
        for number, message in enumerate(_messages(prompt, conversation, console)):
            try:
                turn = conversation.answer(message)
            except UserError as error:
                print_once(" ".join(str(error).split()))
                continue
            console.print(str(turn), style="dim", markup=False)
            if tracker is not None:
                tracker.log(turn.figures, number)


def _encoded(cfg: GenerateConfig, model: Described | Loaded, messages: Messages) -> Tensor:
    """Returns the tokens of a conversation, ``[1, N]``, to which the answer fits."""
    ids = encode_conversation(model.tokenizer, messages, cfg.chat)
    check_fits(model.config, ids.shape[1], cfg.max_new_tokens, "conversation")
    return ids


def _messages(prompt: str, conversation: Conversation, console: Console) -> Iterator[str]:
    """Yields ``prompt`` and the lines of standard input that are messages, and carries out those
    that are commands.
    """
    if prompt:
        yield prompt
    while (line := _read_line()) is not None:
        command = line.strip()
        if command == "/exit":
            return
        if command == "/help":
            console.print(HELP, markup=False)
        elif command == "/reset":
            conversation.reset()
        elif re.match(r"/[^\s/]*(\s|$)", command):  # not the path that a message may begin with
            console.print(
                f"{command.split()[0]}: the commands are /reset, /help, /exit",
                style="dim",
                markup=False,
            )
        elif command:
            yield line


def _read_line() -> str | None:
    """Returns the next line of standard input, or None if it has ended or Ctrl-C was pressed."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  # input() then edits lines and keeps a history
    try:
        line = input("> " if terminal else "")
        line.encode()  # raises for bytes that are not UTF-8 and that Python kept as surrogates
    except UnicodeError as error:
        raise UserError("standard input: not UTF-8") from error
    except EOFError:
        line = None
    except KeyboardInterrupt as error:
        if isinstance(error, Terminated):
            raise
        line = None
    if line is None and terminal:
        print()  # the shell's prompt begins a line of its own
    return line
