"""``msattn serve`` as a command: errors of its start, signals, floods of connections and of long
texts.
"""

import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from msattn.trainer.commands import serve
from msattn.trainer.serving.engines.http import supervisor
from tests.factory import save_tokenizer, tiny_model
from tests.running import exit_code
from tests.serving.http.running import KEY, SECONDS, WORDS, Running, beside, eventually


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Runs ``msattn serve`` in an empty folder of this process; returns (exit code, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root, "handlers", [])  # Hydra adds one for the stream of this test
    # a server that starts would not end
    monkeypatch.setattr(supervisor.Supervisor, "run", lambda self, bound: None)

    def run(*arguments: str) -> tuple[int, str]:
        code = exit_code("serve", "device=cpu", "--port", "0", *arguments)
        return code, capsys.readouterr().err

    return run


@pytest.mark.slow
def test_errors_of_the_start_are_one_line(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert command("--port", port) == (
            2,
            f"msattn: --host 127.0.0.1 --port {port}: Address already in use; give another one, "
            f"e.g. --port 0\n",
        )
    cases = {
        ("--host", "no.such.host.invalid"): "--host no.such.host.invalid: ",
        ("--port", "70000"): "--port 70000: expected an integer in [0, 65535]",
        ("--port", "many"): "--port many: expected an integer in [0, 65535]",
        (
            "--api-key",
            "two words",
        ): "--api-key or MSATTN_API_KEY: expected printable ASCII characters without spaces",
        ("--api-key", ""): "--api-key or MSATTN_API_KEY: expected printable",
        ("server.pages=0",): "server.pages=0: expected an integer in [1, 1e9], or null",
        ("artifacts.gate=nowhere",): "nowhere",
    }
    for arguments, says in cases.items():
        code, err = command(*arguments)
        assert (code, err.count("\n")) == (2, 1), err
        assert says in err
        assert "two words" not in err
    monkeypatch.setenv("MSATTN_API_KEY", "")
    assert command()[0] == 2
    monkeypatch.delenv("MSATTN_API_KEY")
    monkeypatch.setattr("transformers.__version__", "5.22.1")
    assert (
        "serve: needs transformers 5.23 or newer, 5.22.1 is installed; pip install -U "
        "'transformers>=5.23'" in command()[1]
    )
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert command() == (
        2,
        "msattn: serve: starlette is not installed; pip install 'msattn[serve]'\n",
    )


def test_a_model_whose_layers_all_have_windows_starts_densely(command: Any, tmp_path: Path) -> None:
    tiny_model("mistral", sliding_window=24).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    code, err = command("--model", str(tmp_path), "dense=true")
    assert (code, "serving at" in err) == (0, True), err
    assert command("--model", str(tmp_path), "select=quest")[0] == 2


def start(
    folder: Path, *arguments: str, descriptors: int | None = None
) -> tuple[subprocess.Popen[str], Running]:
    """A server in a process of its own."""
    program = [
        sys.executable,
        "-c",
        "from msattn.cli import main; main()",
        "serve",
        "device=cpu",
        "--port",
        "0",
        *arguments,
    ]
    if descriptors is not None:
        program = ["sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh", *program]
    process = subprocess.Popen(program, cwd=folder, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = next(line for line in process.stderr if "serving at" in line)
    port = int(line.split("http://127.0.0.1:")[1].split("/")[0])
    none: Any = None
    return process, Running(none, none, port, KEY)


@pytest.mark.slow
def test_the_command_serves_and_ends_with_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM while a request runs: it finishes, others get 503, exit code 0. The output has
    neither key nor prompt.
    """
    monkeypatch.setenv("MSATTN_API_KEY", KEY)
    process, served = start(tmp_path, "dense_below=0")
    with served.client() as client:
        stream = client.completions.create(
            model="tiny", prompt="def secret(", max_tokens=150, temperature=0, stream=True
        )
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        eventually(lambda: httpx.get(f"{served.url}/health").json() == {"status": "draining"})
        with pytest.raises(
            openai.InternalServerError, match="the server is shutting down"
        ) as caught:
            client.completions.create(model="tiny", prompt="def")
        assert caught.value.status_code == 503
        assert len(list(stream)) > 50
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    lines = err.splitlines()
    assert "stopping: 1 requests have 30 s to finish" in lines[0]
    assert re.search("POST /v1/completions 503", lines[1])
    assert re.search("POST /v1/completions 200.*length$", lines[2])
    assert len(lines) == 3
    assert not out
    files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(KEY in text or "secret" in text for text in (err, *files))


@pytest.mark.slow
def test_a_second_signal_ends_the_command_at_once(tmp_path: Path) -> None:
    process, served = start(tmp_path, "dense=true")
    with served.client() as client:
        stream = client.completions.create(
            model="tiny", prompt="def", max_tokens=4000, temperature=0, stream=True
        )
        next(iter(stream))
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "a second signal ends them at once" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (130, "msattn: interrupted\n")
    assert not out


def ended(process: subprocess.Popen[str]) -> str:
    """Ends a server and returns the rest of its stderr."""
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    return err


@pytest.mark.slow
def test_idle_connections_lock_the_server_out_for_seconds_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than there are descriptors: they are closed when no head of a request arrives."""
    monkeypatch.setenv("MSATTN_API_KEY", KEY)
    process, served = start(tmp_path, "dense=true", descriptors=96)
    assert process.stderr is not None
    threading.Thread(target=process.stderr.read, daemon=True).start()
    with ExitStack() as stack:
        for _ in range(150):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
        for _ in range(3):
            with suppress(httpx.TransportError):
                httpx.get(f"{served.url}/health", timeout=20)
        assert httpx.get(f"{served.url}/health", timeout=20).status_code == 200
        assert served.post(json=WORDS | {"max_tokens": 1}).status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 0


@pytest.mark.slow
def test_more_connections_than_the_limit_get_503(tmp_path: Path) -> None:
    process, served = start(tmp_path, "dense=true", descriptors=200)
    with ExitStack() as stack:
        assert httpx.get(f"{served.url}/health").status_code == 200
        for _ in range(150):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
        assert httpx.get(f"{served.url}/health", timeout=20).status_code == 503
    ended(process)


@pytest.mark.slow
def test_a_short_request_beside_clients_with_long_texts(tmp_path: Path) -> None:
    """They leave at once. Encoding one of the texts took 5 s and 2 GB."""
    process, served = start(tmp_path, "dense=true")

    def resident() -> float:
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    def leave() -> None:
        with suppress(httpx.ReadTimeout):
            httpx.post(
                f"{served.url}/v1/completions",
                json=WORDS | {"prompt": "a" * 15_900_000},
                timeout=0.5,
            )

    assert served.post(json=WORDS | {"max_tokens": 1}).status_code == 200
    before = resident()
    with beside(*[leave] * 5):
        time.sleep(0.5)
        began = time.monotonic()
        assert served.post(json=WORDS | {"max_tokens": 1}).status_code == 200
        assert time.monotonic() - began < 5  # alone 0.3 s on an idle machine
    assert resident() < before + 300
    ended(process)
