"""The life of a server: queue, memory, shutdown, a thread that dies, errors of its start."""

import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import transformers
from openai import OpenAI

import msattn
from msattn.trainer.commands import serve
from msattn.trainer.config import TrackerConfig
from msattn.trainer.errors import Fault, UserError
from msattn.trainer.models import Loaded
from msattn.trainer.serving.engines.http import cache, connections, metrics, supervisor, text
from msattn.trainer.training.tracker import Tracker
from tests.running import exit_code, metrics_lines
from tests.serving.http.running import KEY, SECONDS, Running, beside, configuration, eventually, greedy, running, small_loaded

WORDS: dict[str, Any] = {"model": "tiny", "prompt": "t1 t2 t3", "temperature": 0}


@pytest.fixture
def small(tmp_path: Path) -> Loaded:
    return small_loaded(tmp_path)


def endless(client: OpenAI, tokens: int = 4000) -> Any:
    """A stream that has begun and goes on for seconds."""
    stream = client.completions.create(**WORDS, max_tokens=tokens, stream=True)
    next(iter(stream))
    return stream


def text_of(stream: Any) -> str:
    return "".join(piece.choices[0].text for piece in stream)


@pytest.mark.slow
def test_a_full_queue_refuses_requests(small: Loaded) -> None:
    """One request runs at a time, so the others wait."""
    with running(small, configuration("server.max_running=1", "server.max_waiting=2")) as served, served.client() as client:
        stream, ask = endless(client), partial(served.post, json=WORDS | {"max_tokens": 1})
        with beside(ask, ask):
            eventually(lambda: served.engine.waiting == 2)
            with pytest.raises(openai.RateLimitError, match="2 requests are waiting already") as caught:
                client.completions.create(**WORDS)
            assert caught.value.response.headers["retry-after"] == "1"
            stream.close()
        assert client.completions.create(**WORDS, max_tokens=1).usage.completion_tokens == 1
        assert served.metric('requests_total{outcome="refused"}') == 1


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n"


@pytest.mark.slow
def test_bodies_that_arrive_have_a_limit_together(small: Loaded) -> None:
    """Four of the greatest size. Short ones are read beside them, and take no place in the queue before they have arrived."""
    with running(small, configuration("server.max_waiting=2", "server.max_body_mb=0.1")) as served:

        def post(length: int = 0) -> httpx.Response:
            return served.post(json=WORDS | {"max_tokens": 1, "user": "x" * length})

        with ExitStack() as stack:
            for _ in range(5):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=SECONDS))
                connection.sendall(HEAD + b" " * 99_000)
            eventually(lambda: post(50_000).status_code == 503)
            assert post(50_000).headers["retry-after"] == "1"
            assert post().status_code == 200
        eventually(lambda: post(50_000).status_code == 200)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", HEAD[:20], b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /he"])
def test_a_connection_without_a_head_is_closed(small: Loaded, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with running(small, configuration()) as served, served.client() as client:
        stream = endless(client)
        with socket.create_connection(("127.0.0.1", served.port), timeout=SECONDS) as connection:
            connection.sendall(sent)
            began = time.monotonic()
            with suppress(ConnectionResetError):
                while connection.recv(1000):
                    pass
            assert 0.3 < time.monotonic() - began < 4  # uvicorn closes silent ones after 5 s
        assert next(iter(stream)).choices[0].text


@pytest.mark.slow
def test_long_texts_are_encoded_apart(small: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, began, end = text.PromptEncoder.encode, threading.Event(), threading.Event()

    def slow(self: text.PromptEncoder, body: Any) -> tuple[list[int], int]:
        if len(body.prompt) > 1000:
            began.set()
            assert end.wait(SECONDS)
        return encode(self, body)

    monkeypatch.setattr(text.PromptEncoder, "encode", slow)
    with running(small, configuration()) as served:
        long = {"prompt": "t1 " * 30_000, "max_tokens": 1}
        with beside(partial(served.post, json=WORDS | long)):
            assert began.wait(SECONDS)
            assert served.post(json=WORDS | {"max_tokens": 1}).status_code == 200
            end.set()


@pytest.mark.slow
def test_readers_of_metrics_share_what_they_read(small: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine stands still while it is asked."""
    with running(small, configuration()) as served:
        asked = list[float]()
        monkeypatch.setattr(served.engine, "reads", lambda: asked.append(time.monotonic()) or {"sparsity": len(asked)})
        eventually(lambda: served.metric("sparsity") == 2)
    assert asked[1] - asked[0] >= metrics.READS_SECONDS


@pytest.mark.slow
def test_the_prompt_of_a_client_that_has_left_is_not_encoded(small: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves while another prompt is encoded."""
    encode, began, encoded = text.PromptEncoder.encode, threading.Event(), list[str]()
    left = threading.Event()

    def slow(self: text.PromptEncoder, body: Any) -> tuple[list[int], int]:
        encoded.append(body.prompt)
        began.set()
        assert left.wait(SECONDS)
        return encode(self, body)

    monkeypatch.setattr(text.PromptEncoder, "encode", slow)
    with running(small, configuration()) as served:
        with beside(partial(served.post, json=WORDS | {"max_tokens": 1})):
            assert began.wait(SECONDS)
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{served.url}/v1/completions", json=WORDS | {"prompt": "t4"}, timeout=0.3)
            served.get("/health")  # by its answer the server has seen the closed connection
            left.set()
        eventually(lambda: served.metric('requests_total{outcome="refused"}') == 1)
    assert encoded == ["t1 t2 t3"]


@pytest.mark.slow
def test_metrics_are_logged_to_a_tracker_when_they_change(
    small: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "LOG_SECONDS", 0.01)
    with (
        Tracker.start(TrackerConfig("none"), folder=tmp_path, run_name="serve", config={}) as tracker,
        running(small, configuration(), tracker=tracker) as served,
    ):
        eventually(lambda: len(metrics_lines(tmp_path)) == 1)
        assert served.post(json=WORDS | {"max_tokens": 4}).status_code == 200
        eventually(lambda: metrics_lines(tmp_path)[-1].get("requests_total/length") == 1)
    lines = metrics_lines(tmp_path)
    assert [line["step"] for line in lines] == list(range(len(lines)))
    last = lines[-1]
    assert (last["prompt_tokens_total"], last["generated_tokens_total"]) == (3, 4)
    assert 0 < last["time_to_first_token_seconds_mean"] <= last["request_duration_seconds_mean"] < SECONDS
    assert not [name for name in last if name.endswith(("_bucket", "_created", "_sum"))]


@pytest.mark.slow
def test_a_model_may_give_its_sampling_in_integers(small: Loaded) -> None:
    """JSON has ``"temperature": 1``, which the manager refuses."""
    small.model.generation_config.update(do_sample=True, temperature=1, top_p=1)
    with running(small, configuration()) as served:
        answer = served.post(json={"model": "tiny", "prompt": "t1 t2 t3", "max_tokens": 2})
        assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_requests_beyond_the_memory_take_turns(small: Loaded) -> None:
    """Nine pages for six requests of up to four pages: some are set back, and all are answered as alone."""
    cfg = configuration("server.page_size=16", "server.pages=9", "server.max_length=64", "server.batch_tokens=32")
    prompts = [[1 + i] * 10 for i in range(6)]
    alone = [greedy(small, prompt, 50) for prompt in prompts]
    with running(small, cfg) as served, served.client() as client:
        answers: dict[int, str] = {}

        def ask(i: int) -> None:
            answer = client.completions.create(model="tiny", prompt=prompts[i], max_tokens=50, temperature=0)
            answers[i] = answer.choices[0].text

        with beside(*(partial(ask, i) for i in range(6))):
            pass
        tokenizer: Any = small.tokenizer
        assert [answers[i] for i in range(6)] == [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in alone]
        longest = client.completions.create(model="tiny", prompt=[5] * 30, max_tokens=34, temperature=0)
        assert longest.usage is not None
        assert longest.usage.total_tokens == 64
        with pytest.raises(openai.BadRequestError, match="exceed the 64 tokens"):
            client.completions.create(model="tiny", prompt=[5] * 31, max_tokens=34)


@pytest.mark.slow
def test_waiting_requests_begin_after_the_last_that_ran_was_cancelled(small: Loaded) -> None:
    """The manager begins none while the flag is set, which only a request that ends by itself resets."""
    with running(small, configuration()) as served, served.client() as client:
        stream = endless(client)
        served.engine._manager.batch_processor.scheduler.block_new_requests = True
        stream.close()
        assert client.completions.create(**WORDS, max_tokens=2).usage.completion_tokens == 2


@pytest.mark.slow
def test_tokens_of_cancelled_requests_are_thrown_away(small: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager keeps those of its last pass over a request for a reader that there is not."""
    with running(small, configuration()) as served, served.client() as client:
        kept = served.engine._manager.output_router.output_queue
        monkeypatch.setattr(served.engine, "tend", lambda: None)
        for _ in range(100):
            endless(client).close()
            if not kept.empty():
                break
        assert not kept.empty()
        monkeypatch.undo()
        eventually(kept.empty)


@pytest.mark.slow
def test_shutdown_takes_a_bounded_time(small: Loaded) -> None:
    with running(small, configuration("server.drain_s=0.2")) as served, served.client() as client:
        stream = endless(client)
        began = time.monotonic()
        served.supervisor.stop()
        with pytest.raises(openai.APIError, match="the server is shutting down; the answer is not complete"):
            text_of(stream)
        assert served.ended.wait(SECONDS)
        assert time.monotonic() - began < 5
        assert served.error is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_thread_that_dies_ends_the_server(
    small: Loaded, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kind: type[BaseException]
) -> None:
    """Requests that run get an error, new ones 503, and the command one line."""
    with running(small, configuration()) as served, served.client() as client:
        stream = endless(client)
        monkeypatch.setattr(supervisor, "POLL", 1.0)  # time to see the state between
        time.sleep(0.1)

        def fail(*arguments: Any, **options: Any) -> None:
            raise kind("a kernel failed\nwith details")

        monkeypatch.setattr(small.model, "forward", fail)
        with pytest.raises(openai.APIError, match="the server failed while it generated"):
            text_of(stream)
        if kind is RuntimeError and not served.ended.is_set():
            assert httpx.get(f"{served.url}/health").status_code == 503
        assert served.ended.wait(SECONDS)
        assert isinstance(served.error, Fault)
        assert str(served.error) == f"the thread that generates has ended ({kind.__name__}: a kernel failed)"
    assert "Traceback" not in "".join(capfd.readouterr())


def test_sparse_answers_are_those_of_the_attached_model(embedded: Loaded) -> None:
    prompt = "def main(arguments):\n    return arguments.get('x')\n\n" * 20
    tokens = embedded.tokenizer(prompt).input_ids
    options: Any = {"gate": "embedded", "qmodel": "embedded", "select": {"sink_blocks": 0, "local_blocks": 0}, "sparsity": 0.7}
    options |= {"dense_below": 0}
    model: Any = embedded.model
    with msattn.attach(model, **options) as sparse:
        ends = model.generation_config.eos_token_id
        generation = transformers.GenerationConfig(do_sample=False, max_new_tokens=8, eos_token_id=ends)
        cfg: Any = configuration("dense=false")
        batching = sparse.batching_config(num_blocks=32, max_batch_tokens=512, use_async_batching=False)
        (alone,) = model.generate_batch([tokens], generation, batching).values()
        with running(embedded, cfg, sparse) as served, served.client() as client:
            answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
            assert answer.choices[0].text == embedded.tokenizer.decode(alone.generated_tokens)
            assert 0.3 < served.metric("sparsity") < 0.8
            assert 0 < served.metric("selectivity") < 1
            eventually(lambda: served.metric("cache_pages_used") == 0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["olmo3", "gemma3_text", "gpt_oss"])
def test_layers_with_a_window_are_served_densely(tmp_path: Path, family: str) -> None:
    """The longest request fits, though layers with a window and others share the pages in groups."""
    small = small_loaded(tmp_path, family)
    prompt = [5 + i % 50 for i in range(100)]
    expected = greedy(small, prompt, 100)
    cfg = configuration("server.page_size=16", "server.max_length=200", "server.pages=14", "server.batch_tokens=32")
    with running(small, cfg) as served, served.client() as client:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=100, temperature=0)
        tokenizer: Any = small.tokenizer
        assert answer.choices[0].text == tokenizer.decode(expected, skip_special_tokens=True)
        eventually(lambda: served.metric("cache_pages_used") == 0)


@pytest.mark.parametrize(
    ("family", "select", "says"),
    [
        ("llama4_text", None, r"chunked_attention\); use msattn generate"),
        ("gemma2", None, r"attn_logit_softcapping=2\.0 is not supported\); use msattn generate"),
        ("gemma3_text", "quest", r"layer 0 .* window of 24 tokens\); give dense=true, or use msattn generate"),
        ("gpt_oss", "quest", r"attention sinks are not supported\); give dense=true, or use msattn generate"),
    ],
)
def test_a_model_that_cannot_be_batched_is_refused(tmp_path: Path, family: str, select: str | None, says: str) -> None:
    small = small_loaded(tmp_path, family)
    attached = nullcontext() if select is None else msattn.attach(small.model, select=select)
    with (
        pytest.raises(UserError, match=f"serve: continuous batching does not serve this model .*{says}$"),
        attached as sparse,
        serve.server(small, configuration(), sparse),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("server.max_length=5000", "server.max_length=5000: the model has positions for 4096 tokens"),
        (
            "server.pages=3",
            "server.pages=3: a request of 4096 tokens takes 17 pages of 256 tokens; raise it, or lower server.max",
        ),
        ("server.pages=100000000", "memory is too small for the KV cache .*; lower server.pages or server.batch_tokens"),
        ("server.pages=null", r"one request of 4096 tokens takes [\d.]+ GB, and 0.00 GB are free for it; lower server"),
    ],
)
def test_a_cache_that_is_not_possible_is_refused(
    small: Loaded, override: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "free_memory", lambda: 2**20)
    with pytest.raises(UserError, match=says), serve.server(small, configuration(override)):
        pass


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs ``msattn serve`` in an empty folder of this process; returns (exit code, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root, "handlers", [])  # Hydra adds one for the stream of this test
    monkeypatch.setattr(supervisor.Supervisor, "run", lambda self, bound: None)  # a server that starts would not end

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
            f"msattn: --host 127.0.0.1 --port {port}: Address already in use; give another one, e.g. --port 0\n",
        )
    cases = {
        ("--host", "no.such.host.invalid"): "--host no.such.host.invalid: ",
        ("--port", "70000"): "--port 70000: accepted is an integer in [0, 65535]",
        ("--port", "many"): "--port many: accepted is an integer in [0, 65535]",
        ("--api-key", "two words"): "--api-key or MSATTN_API_KEY: accepted are printable ASCII characters without spaces",
        ("--api-key", ""): "--api-key or MSATTN_API_KEY: accepted are printable",
        ("server.pages=0",): "server.pages=0: accepted is an integer in [1, 1e9], or null",
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
    monkeypatch.setattr("msattn.trainer.serving.paged.transformers.__version__", "5.22.1")
    assert "serve: needs transformers 5.23 or newer, 5.22.1 is installed; pip install -U 'transformers>=5.23'" in command()[1]
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert command() == (2, "msattn: serve: starlette is not installed; pip install 'msattn[serve]'\n")


def start(folder: Path, *arguments: str, descriptors: int | None = None) -> tuple[subprocess.Popen[str], Running]:
    """A server in a process of its own."""
    program = [sys.executable, "-c", "from msattn.cli import main; main()", "serve", "device=cpu", "--port", "0", *arguments]
    if descriptors is not None:
        program = ["sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh", *program]
    process = subprocess.Popen(program, cwd=folder, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = next(line for line in process.stderr if "serving at" in line)
    port = int(line.split("http://127.0.0.1:")[1].split("/")[0])
    none: Any = None
    return process, Running(none, none, port, KEY)


@pytest.mark.slow
def test_the_command_serves_and_ends_with_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM while a request runs: it finishes, others get 503, exit code 0. The output has neither key nor prompt."""
    monkeypatch.setenv("MSATTN_API_KEY", KEY)
    process, served = start(tmp_path, "dense_below=0")
    with served.client() as client:
        stream = client.completions.create(model="tiny", prompt="def secret(", max_tokens=150, temperature=0, stream=True)
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        eventually(lambda: httpx.get(f"{served.url}/health").json() == {"status": "draining"})
        with pytest.raises(openai.InternalServerError, match="the server is shutting down") as caught:
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
        stream = client.completions.create(model="tiny", prompt="def", max_tokens=4000, temperature=0, stream=True)
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
def test_idle_connections_do_not_lock_the_server_out(tmp_path: Path) -> None:
    """More than there are descriptors: the oldest make room. One line says so."""
    process, served = start(tmp_path, "dense=true", descriptors=200)
    with ExitStack() as stack:
        for _ in range(260):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=SECONDS))
        for _ in range(3):
            assert served.post(json=WORDS | {"max_tokens": 1}).status_code == 200
        err = ended(process)
    (line,) = [line for line in err.splitlines() if "POST" not in line]
    assert re.search(r"msattn: .* connections leave few of the 200 descriptors; those that wait .* make room$", line)


@pytest.mark.slow
def test_a_short_request_beside_clients_with_long_texts(tmp_path: Path) -> None:
    """They leave at once. Encoding one of the texts took 5 s and 2 GB."""
    process, served = start(tmp_path, "dense=true")

    def resident() -> float:
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    def leave() -> None:
        with suppress(httpx.ReadTimeout):
            httpx.post(f"{served.url}/v1/completions", json=WORDS | {"prompt": "a" * 15_900_000}, timeout=0.5)

    assert served.post(json=WORDS | {"max_tokens": 1}).status_code == 200
    before = resident()
    with beside(*[leave] * 5):
        time.sleep(0.5)
        began = time.monotonic()
        assert served.post(json=WORDS | {"max_tokens": 1}).status_code == 200
        assert time.monotonic() - began < 5  # alone 0.3 s on an idle machine
    assert resident() < before + 300
    ended(process)
