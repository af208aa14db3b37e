"""``msattn generate --chat``: turns over one cache, commands, interrupts and the end of input."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.streamers import TextStreamer

from msattn.trainer import models
from msattn.trainer.commands.answers import describe, find_served
from msattn.trainer.commands.chat import Conversation, StopOnInterrupt
from msattn.trainer.commands.compose import compose
from msattn.trainer.errors import Terminated, UserError
from msattn.trainer.models.chat import encode_conversation
from tests.ending import ENDING_WITH, saved
from tests.factory import embedded_tokenizer
from tests.running import exit_code

# reads every block; no router, so decoding is dense
DENSE = ["device=cpu", "name=none", "select=quest", "select.sparsity=0"]
# caches buckets and reads every key
ROUTED = ["device=cpu", "select=topk", "select.sparsity=0", "probes=0", "recent=4096"]
REWRITING = (  # earlier messages are cut after their third character
    "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else m.content[:3] }}\n{% "
    "endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NUMBERS = re.compile(r"(\d+) new prompt tokens, (\d+) in the cache, first token after \S+ s, .*")
FIRST, SECOND = "Once upon a time", "class Reader(object):"


@pytest.fixture
def chat(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple]:
    """Runs ``msattn generate --chat`` in an empty folder on ``lines``; returns (exit code, answers,
    statistics, stderr).
    """

    def run(lines: str | bytes, *arguments: str) -> tuple[int, list[str], list[str], str]:
        file = io.BytesIO(lines if isinstance(lines, bytes) else lines.encode())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file, encoding="utf-8"))
        code = exit_code("generate", "--chat", "max_new_tokens=8", *arguments)
        out, err = capsys.readouterr()
        assert "\x1b" not in out, "control codes are for terminals"
        statistics = [match[0] for match in NUMBERS.finditer(out)]
        return code, NUMBERS.split(out.partition("\n")[2])[::3], statistics, err

    return run


def conversation(*overrides: str) -> Conversation:
    cfg = compose("generate", ["max_new_tokens=8", *overrides])
    served = find_served(cfg)
    return Conversation(cfg, served.model.load(), served.options)


def answer_at_once(messages: list[dict[str, str]], tokenizer: Any = None) -> tuple[str, int]:
    """Returns the dense answer to the whole conversation without a cache of earlier turns, and the
    number of its tokens.
    """
    cfg = compose("generate", DENSE)
    loaded = models.load(cfg.model, device="cpu")
    tokenizer = tokenizer or loaded.tokenizer
    ids = encode_conversation(tokenizer, messages, None)
    model: Any = loaded.model
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
    )
    return str(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)), ids.shape[1]


def test_a_selection_without_training_decodes_with_a_named_router_alone() -> None:
    """The classifiers of the same model and name were trained; whoever asks for Quest has not asked
    for them.
    """
    assert not any(find_served(compose("generate", ["select=quest"])).chosen.values())
    served = find_served(cfg := compose("generate", ["select=quest", "artifacts.qmodel=embedded"]))
    assert (
        describe(cfg, served)
        == "tiny: prompts by quest, topk, sparsity=0.5; new tokens by the embedded qmodel"
    )
    served = find_served(cfg := compose("generate", ["select=quest", "artifacts.qmodel=quest"]))
    assert (
        describe(cfg, served) == "tiny: prompts by quest, topk, sparsity=0.5; new tokens by quest"
    )
    with pytest.raises(UserError, match=r"artifact \./quest: no such folder"):
        find_served(compose("generate", ["artifacts.kmeans=quest"]))
    assert find_served(compose("generate", [])).chosen["qmodel"]


@pytest.mark.parametrize("overrides", [DENSE, ROUTED])
def test_the_second_turn_computes_only_its_tokens(
    chat: Callable[..., tuple], overrides: list[str]
) -> None:
    code, (first, second, rest), statistics, err = chat(f"{FIRST}\n\n  \n{SECOND}\n", *overrides)
    assert (code, err, rest.strip()) == (0, "", "")
    (new, cached), (new_again, cached_again) = (
        tuple(map(int, re.findall(r"^\d+|\d+ (?=in)", line))) for line in statistics
    )
    messages = [{"role": "user", "content": FIRST}]
    expected, tokens = answer_at_once(messages)
    assert (first, new, cached) == (f"{expected}\n", tokens, tokens + 7)
    messages += [{"role": "assistant", "content": expected}, {"role": "user", "content": SECOND}]
    expected, tokens = answer_at_once(messages)
    assert (second.removeprefix("\n"), new_again, cached_again) == (
        f"{expected}\n",
        tokens - cached,
        tokens + 7,
    )
    assert new_again < tokens // 2
    assert not any("dense" in line for line in statistics)
    # With a router, a few tokens after cached ones are decoded, each over its own buckets.
    assert ["sparsity 0" in line for line in statistics] == [True, overrides is DENSE]
    assert all(("selectivity 1" in line) == (overrides is ROUTED) for line in statistics)


def test_an_answer_ends_at_the_token_of_the_template(
    chat: Callable[..., tuple], here: Path
) -> None:
    """``config.json`` and the tokenizer name others; the token is not marked as special, and not
    printed.
    """
    arguments = [
        "--model",
        str(here / "small"),
        "dtype=float32",
        "device=cpu",
        "select=quest",
        "select.sparsity=0",
    ]
    saved(here / "small", template=ENDING_WITH % "t1")
    whole = chat("t3 t5", *arguments)[1][0].split()
    assert len(whole) == 8
    end = next(word for place, word in enumerate(whole) if place and word not in whole[:place])
    saved(here / "small", template=ENDING_WITH % end, added=end, config=127, eos="t126")
    answer = chat("t3 t5", *arguments)[1][0]
    assert answer.split() == whole[: whole.index(end)]


def test_commands(chat: Callable[..., tuple]) -> None:
    """Unknown ones are refused, and a path is a message."""
    lines = (
        f"{FIRST}\n/reset\n{FIRST}\n/quit\n/reset now\n/usr/bin/python\n/help\n/exit\n{SECOND}\n"
    )
    code, (first, second, third, rest), statistics, _ = chat(lines, *DENSE)
    accepted = "the commands are /reset, /help, /exit\n"
    assert (code, second) == (0, f"\n{first}")
    assert third.startswith(f"\n/quit: {accepted}/reset: {accepted}")
    new = f"{len(embedded_tokenizer().encode(FIRST))} new prompt tokens"
    assert [line.partition(",")[0] for line in statistics[:2]] == [new, new]
    assert all(command in rest for command in ("/reset", "/help", "/exit", "Ctrl-C"))


@pytest.mark.slow
def test_a_prompt_is_the_first_message(chat: Callable[..., tuple]) -> None:
    Path("p.txt").write_text(FIRST, encoding="utf-8")
    assert chat("", *DENSE, "--prompt-file", "p.txt")[1] == chat(FIRST, *DENSE)[1]


@pytest.mark.slow
def test_a_turn_that_does_not_fit_is_refused(chat: Callable[..., tuple]) -> None:
    code, _, statistics, err = chat(f"{FIRST}\n{'word ' * 5000}\n{SECOND}\n", *DENSE)
    assert (code, len(statistics)) == (0, 2)
    assert re.fullmatch(
        r"msattn: the conversation's \d+ tokens and max_new_tokens=8: the model has positions for "
        r"4096.*\n",
        err,
    )
    assert int(statistics[1].split()[0]) < 20, "the refused message is not part of the conversation"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "arguments", "says"),
    [
        ("", ["device=cpu", "chat=true"], "chat: the tokenizer has no chat template"),
        (b"\xff\n", DENSE, "standard input: not UTF-8"),
    ],
)
def test_bad_input(
    chat: Callable[..., tuple], lines: str | bytes, arguments: list[str], says: str
) -> None:
    code, _, _, err = chat(lines, *arguments)
    assert code == 2
    assert err.startswith("msattn: ")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_template_that_rewrites_earlier_turns() -> None:
    """The cache keeps the common prefix, and answers are those of a run without it."""
    talk = conversation(*ROUTED)
    tokenizer: Any = talk.loaded.tokenizer
    tokenizer.chat_template = REWRITING
    for message in (FIRST, SECOND, "import os"):
        messages = [*talk.messages, {"role": "user", "content": message}]
        before = talk.cached
        ids = encode_conversation(tokenizer, messages, None)[0].tolist()
        turn = talk.answer(message)
        known = len(ids) - turn.new_tokens
        assert turn.text == answer_at_once(messages, tokenizer)[0]
        assert ids[:known] == before[:known]
        assert known == len(before) == 0 or 0 < known < len(before)
        assert talk.cached[: len(ids)] == ids
        layers: Any = talk.cache.layers
        assert (
            {layer.get_seq_length() for layer in layers}
            == {len(talk.cached)}
            == {turn.cached_tokens}
        )


@pytest.mark.slow
def test_the_same_prompt_again_computes_one_token() -> None:
    talk = conversation(*DENSE)
    first = talk.answer(FIRST)
    talk.messages = []
    again = talk.answer(FIRST)
    assert (again.text, again.new_tokens) == (first.text, 1)


def press_ctrl_c(monkeypatch: pytest.MonkeyPatch, *, at: int, times: int) -> None:
    """Presses Ctrl-C while the token number ``at`` is printed; 0 is the prompt."""
    put, count = TextStreamer.put, iter(range(100))

    def pressed(self: TextStreamer, value: torch.Tensor) -> None:
        put(self, value)
        if next(count) == at:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TextStreamer, "put", pressed)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_stops_the_answer_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], times: int
) -> None:
    talk = conversation(*ROUTED)
    press_ctrl_c(monkeypatch, at=3, times=times)
    turn = talk.answer(FIRST)
    assert turn.interrupted
    assert str(turn).endswith("interrupted")
    count = len(turn.clock.tokens)
    assert count in (3, 4) if times == 1 else count == 3
    assert capsys.readouterr().out == f"{turn.text}\n"
    assert (
        len(talk.cached)
        == talk.cache.get_seq_length()
        == (turn.new_tokens + count - 1 if times == 1 else 0)
    )
    messages = [*talk.messages, {"role": "user", "content": SECOND}]
    assert [message["content"] for message in messages] == [FIRST, turn.text, SECOND]
    assert talk.answer(SECOND).text == answer_at_once(messages)[0]


@pytest.mark.slow
def test_ctrl_c_before_the_first_token_forgets_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = conversation(*DENSE)
    press_ctrl_c(monkeypatch, at=0, times=2)
    turn = talk.answer(FIRST)
    assert (turn.text, talk.messages, turn.cached_tokens) == ("", [], 0)
    assert talk.answer(FIRST).text == answer_at_once([{"role": "user", "content": FIRST}])[0]


def test_a_termination_is_not_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def terminate(self: StopOnInterrupt, *arguments: Any, **options: Any) -> torch.Tensor:
        raise Terminated

    monkeypatch.setattr(StopOnInterrupt, "__call__", terminate)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(Terminated):
        conversation(*DENSE).answer(FIRST)
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_template_may_refuse_a_message() -> None:
    talk = conversation(*DENSE)
    talk.loaded.tokenizer.chat_template = "{{ raise_exception('no more') }}"
    with pytest.raises(UserError, match=r"refuses them \(no more\)"):
        talk.answer(FIRST)
    assert (talk.messages, talk.cached) == ([], [])


@pytest.mark.slow
def test_on_a_terminal(tmp_path: Path) -> None:
    """A prompt, an answer that Ctrl-C stops, another one, and the end by Ctrl-C."""
    master, slave = pty.openpty()
    command = [
        sys.executable,
        "-c",
        "from msattn.cli import main; main()",
        "generate",
        "--chat",
        "max_new_tokens=3000",
        *DENSE,
    ]
    running = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=tmp_path,
        preexec_fn=own_terminal,
        start_new_session=True,
    )
    os.close(slave)
    seen, began = "", time.monotonic()

    def wait_for(text: str, since: int) -> int:
        nonlocal seen
        while text not in seen[since:]:
            ready, _, _ = select.select([master], [], [], max(0, began + 120 - time.monotonic()))
            assert ready, seen
            seen += os.read(master, 1000).decode(errors="replace")
        return seen.index(text, since) + len(text)

    try:
        position = wait_for("> ", wait_for("commands.", 0))
        for message in (FIRST, SECOND):
            os.write(master, f"{message}\n".encode())
            # the echo, and a first line of the answer
            position = wait_for("\n", wait_for("\n", position))
            os.write(master, b"\x03")
            position = wait_for("> ", wait_for("interrupted", position))
        time.sleep(1)
        # readline misses a signal between printing the prompt and waiting for a key
        for _ in range(4):
            os.write(master, b"\x03")
            with suppress(subprocess.TimeoutExpired):
                running.wait(20)
                break
        assert running.returncode == 0, seen
    finally:
        running.kill()
        os.close(master)


def own_terminal() -> None:
    """Makes standard input the terminal of the process, so that it receives Ctrl-C."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell ignore it
