"""Progress lines on stderr where there is no terminal, and their absence on a terminal."""

import io
import re
import time

import pytest
from rich.console import Console

from msattn.trainer import progress
from msattn.trainer.progress import Progress, activity


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.05)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capsys.readouterr()
    assert out == "", "results alone go to stdout"
    return err.splitlines()


def test_the_innermost_work_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with activity("eval"):
        time.sleep(0.12)
        with Progress(console=Console(file=io.StringIO())) as bars:
            for _ in bars.track(range(4), description="needle, 64 tokens"):
                time.sleep(0.12)
            time.sleep(0.5)  # no task is left: the surrounding work is reported
    found = lines(capsys)
    assert found[0] == "msattn: eval, 0:00 so far"
    assert any(
        re.fullmatch(r"msattn: needle, 64 tokens: \d/4, about 0:0\d left", line) for line in found
    )
    assert found[-1].startswith("msattn: eval")


def test_lines_become_rare_and_count_the_time_of_a_part_that_takes_long(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress(console=Console(file=io.StringIO())) as bars:
        task = bars.add_task("ruler", total=3, completed=1)  # resumed after the first part
        time.sleep(0.02)
        bars.advance(task)
        found = []
        for _ in range(2):
            time.sleep(0.3)
            found.append(str(bars._describe()))
    assert 3 <= len(lines(capsys)) <= 4, "after 0.05, 0.15, 0.35 s"
    assert [line.partition(",")[0] for line in found] == ["ruler: 2/3"] * 2
    assert found[-1].endswith("about 0:01 left"), "as long as the second part, which runs"


def test_a_terminal_shows_bars_and_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    output = io.StringIO()
    with activity("eval"), Progress(console=Console(file=output, force_terminal=True)) as bars:
        bars.add_task("perplexity", total=2)
        time.sleep(0.12)
    assert lines(capsys) == []
    assert "perplexity" in output.getvalue()


def test_other_ranks_and_disabled_progress_are_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Progress(console=Console(file=io.StringIO()), enabled=False) as bars:
        bars.add_task("perplexity", total=2)
        time.sleep(0.12)
    monkeypatch.setenv("RANK", "1")
    with activity("eval"):
        time.sleep(0.12)
    with Progress(console=Console(file=io.StringIO())) as bars:
        bars.add_task("perplexity", total=2)
        time.sleep(0.12)
    assert lines(capsys) == []
