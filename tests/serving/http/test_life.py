"""The life of a server: queue, bodies, memory, shutdown, a thread that dies."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from msattn.trainer.config import TrackerConfig
from msattn.trainer.errors import Fault
from msattn.trainer.models import Loaded
from msattn.trainer.serving.engines.http import connections, metrics, supervisor, text
from msattn.trainer.training.tracker import Tracker
from tests.running import metrics_lines
from tests.serving.http.running import (
    SECONDS,
    WORDS,
    Running,
    beside,
    configuration,
    eventually,
    expected,
    running,
)


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
    with (
        running(small, configuration("server.max_running=1", "server.max_waiting=2")) as served,
        served.client() as client,
    ):
        stream, ask = endless(client), partial(served.post, json=WORDS | {"max_tokens": 1})
        with beside(ask, ask):
            eventually(lambda: served.engine.waiting == 2)
            with pytest.raises(
                openai.RateLimitError, match="2 requests are waiting already"
            ) as caught:
                client.completions.create(**WORDS)
            assert caught.value.response.headers["retry-after"] == "1"
            stream.close()
        assert client.completions.create(**WORDS, max_tokens=1).usage.completion_tokens == 1
        assert served.metric('requests_total{outcome="refused"}') == 1


GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: "
    b"application/json\r\nContent-Length: 100000\r\n\r\n"
)


@pytest.mark.slow
def test_bodies_that_arrive_have_a_limit_together(small: Loaded) -> None:
    """Four of the greatest size. Short ones are read beside them, and take no place in the queue
    before they have arrived.
    """
    with running(small, configuration("server.max_waiting=2", "server.max_body_mb=0.1")) as served:

        def post(length: int = 0) -> httpx.Response:
            return served.post(json=WORDS | {"max_tokens": 1, "user": "x" * length})

        with ExitStack() as stack:
            for _ in range(5):
                connection = stack.enter_context(
                    socket.create_connection(("127.0.0.1", served.port), timeout=SECONDS)
                )
                connection.sendall(HEAD + b" " * 99_000)
            eventually(lambda: post(50_000).status_code == 503)
            assert post(50_000).headers["retry-after"] == "1"
            assert post().status_code == 200
        eventually(lambda: post(50_000).status_code == 200)


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "later"), [(b"", b""), (HEAD[:20], b""), (GET, b"GET /he")])
def test_a_connection_without_a_head_is_closed(
    small: Loaded, monkeypatch: pytest.MonkeyPatch, sent: bytes, later: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with running(small, configuration()) as served, served.client() as client:
        stream = endless(client)
        with socket.create_connection(("127.0.0.1", served.port), timeout=SECONDS) as connection:
            connection.sendall(sent)
            if later:
                assert connection.recv(1000)
                connection.sendall(later)
            began = time.monotonic()
            with suppress(ConnectionResetError):
                while connection.recv(1000):
                    pass
            assert 0.3 < time.monotonic() - began < 4  # uvicorn closes silent ones after 5 s
        assert next(iter(stream)).choices[0].text


@contextmanager
def unread(served: Running, **change: Any) -> Iterator[socket.socket]:
    """The connection of a client that asks for a stream of long events and reads nothing, with
    small buffers.
    """
    body = json.dumps(WORDS | {"stream": True, "logprobs": 20} | change)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", served.port))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nHost: "
            f"x\r\nContent-Length: {len(body)}"
        )
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        yield connection


@pytest.mark.slow
def test_a_stream_that_is_not_read_is_closed(
    small: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.5)
    with running(small, configuration()) as served, unread(served, max_tokens=4000):
        eventually(lambda: served.metric('requests_total{outcome="cancelled"}') == 1)
        assert served.metric("generated_tokens_total") < 4000
        assert served.metric("cache_pages_used") == 0


@pytest.mark.slow
def test_an_answer_ends_where_it_ends_for_a_client_that_does_not_read(small: Loaded) -> None:
    """The stop string comes after the buffers are full."""
    text = expected(small, [1, 2, 3], 300)
    stop = text.split(" ")[250]
    before = text[: text.index(stop)]
    with running(small, configuration()) as served, served.client() as client:
        read = client.completions.create(**WORDS, max_tokens=300, stop=stop)
        assert read.choices[0].text == before
        with unread(served, max_tokens=300, stop=stop):
            eventually(
                lambda: served.metric("requests_running") == served.metric("requests_waiting") == 0
            )
        eventually(lambda: served.metric('requests_total{outcome="stop"}') == 2)
        assert served.metric("generated_tokens_total") == 2 * read.usage.completion_tokens


@pytest.mark.slow
def test_a_client_that_closes_its_side_has_left(small: Loaded) -> None:
    """TCP does not tell a half-closed connection from a closed one, whose answer must not be
    generated.
    """
    with running(small, configuration()) as served:
        with unread(served, max_tokens=4000) as connection:
            assert connection.recv(10)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(10_000):
                pass
            eventually(lambda: served.metric('requests_total{outcome="cancelled"}') == 1)
        assert served.metric("cache_pages_used") == 0


@pytest.mark.slow
def test_requests_before_the_answer_to_the_one_before_are_not_answered(small: Loaded) -> None:
    with running(small, configuration()) as served:
        answer = served.raw(GET * 3)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert answer.endswith(b"}")


def held_encoder(
    monkeypatch: pytest.MonkeyPatch, least: int = 0
) -> tuple[threading.Event, threading.Event, list[str]]:
    """Lets prompts of ``least`` characters wait; returns the events of their beginning and of their
    end, and all prompts.
    """
    encode = text.PromptEncoder.encode
    began = threading.Event()
    end = threading.Event()
    encoded = list[str]()

    def slow(self: text.PromptEncoder, body: Any) -> tuple[list[int], int]:
        encoded.append(body.prompt)
        if len(body.prompt) >= least:
            began.set()
            assert end.wait(SECONDS)
        return encode(self, body)

    monkeypatch.setattr(text.PromptEncoder, "encode", slow)
    return began, end, encoded


@pytest.mark.slow
def test_long_texts_are_encoded_apart(small: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    began, end, _ = held_encoder(monkeypatch, least=1000)
    with running(small, configuration()) as served:
        long = {"prompt": "t1 " * 30_000, "max_tokens": 1}
        with beside(partial(served.post, json=WORDS | long)):
            assert began.wait(SECONDS)
            assert served.post(json=WORDS | {"max_tokens": 1}).status_code == 200
            end.set()


@pytest.mark.slow
def test_readers_of_metrics_share_what_they_read(
    small: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine stands still while it is asked."""
    with running(small, configuration()) as served:
        asked = list[float]()
        monkeypatch.setattr(
            served.engine,
            "attention_stats",
            lambda: asked.append(time.monotonic()) or {"sparsity": len(asked)},
        )
        eventually(lambda: served.metric("sparsity") == 2)
    assert asked[1] - asked[0] >= metrics.STATS_SECONDS


@pytest.mark.slow
def test_the_prompt_of_a_client_that_has_left_is_not_encoded(
    small: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves while another prompt is encoded."""
    began, left, encoded = held_encoder(monkeypatch)
    with running(small, configuration()) as served:
        with beside(partial(served.post, json=WORDS | {"max_tokens": 1})):
            assert began.wait(SECONDS)
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(
                    f"{served.url}/v1/completions", json=WORDS | {"prompt": "t4"}, timeout=0.3
                )
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
        Tracker(TrackerConfig("none"), folder=tmp_path, run_name="serve", config={}) as tracker,
        running(small, configuration(), tracker=tracker) as served,
    ):
        eventually(lambda: len(metrics_lines(tmp_path)) == 1)
        assert served.post(json=WORDS | {"max_tokens": 4}).status_code == 200
        eventually(lambda: metrics_lines(tmp_path)[-1].get("requests_total/length") == 1)
    lines = metrics_lines(tmp_path)
    assert [line["step"] for line in lines] == list(range(len(lines)))
    last = lines[-1]
    assert (last["prompt_tokens_total"], last["generated_tokens_total"]) == (3, 4)
    assert (
        0
        < last["time_to_first_token_seconds_mean"]
        <= last["request_duration_seconds_mean"]
        < SECONDS
    )
    assert not [name for name in last if name.endswith(("_bucket", "_created", "_sum"))]


@pytest.mark.slow
def test_a_model_may_give_its_sampling_in_integers(small: Loaded) -> None:
    """JSON has ``"temperature": 1``, which the manager refuses."""
    small.model.generation_config.update(do_sample=True, temperature=1, top_p=1)
    with running(small, configuration()) as served:
        answer = served.post(json={"model": "tiny", "prompt": "t1 t2 t3", "max_tokens": 2})
        assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_the_longest_request_fits_into_the_smallest_cache(small: Loaded) -> None:
    cfg = configuration(
        "server.page_size=16", "server.pages=5", "server.max_length=64", "server.batch_tokens=32"
    )
    with running(small, cfg) as served, served.client() as client:
        longest = client.completions.create(
            model="tiny", prompt=[5] * 30, max_tokens=34, temperature=0
        )
        assert longest.usage is not None
        assert longest.usage.total_tokens == 64
        with pytest.raises(openai.BadRequestError, match="exceed the 64 tokens"):
            client.completions.create(model="tiny", prompt=[5] * 31, max_tokens=34)


@pytest.mark.slow
def test_waiting_requests_begin_after_the_last_that_ran_was_cancelled(small: Loaded) -> None:
    """The manager begins none while the flag is set, which only a request that ends by itself
    resets.
    """
    with running(small, configuration()) as served, served.client() as client:
        stream = endless(client)
        served.engine._manager.batch_processor.scheduler.block_new_requests = True
        stream.close()
        assert client.completions.create(**WORDS, max_tokens=2).usage.completion_tokens == 2


@pytest.mark.slow
def test_tokens_of_cancelled_requests_are_thrown_away(
    small: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        with pytest.raises(
            openai.APIError, match="the server is shutting down; the answer is not complete"
        ):
            text_of(stream)
        assert served.ended.wait(SECONDS)
        assert time.monotonic() - began < 5
        assert served.error is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_thread_that_dies_ends_the_server(
    small: Loaded,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    kind: type[BaseException],
) -> None:
    """Requests that run get an error, new ones 503, and the command one line."""
    with running(small, configuration()) as served, served.client() as client:
        stream = endless(client)
        monkeypatch.setattr(supervisor, "POLL", 1.0)  # time to see the state between
        time.sleep(0.1)

        def fail(*arguments: Any, **options: Any) -> None:
            raise kind("a kernel failed\nwith details")

        monkeypatch.setattr(small.model, "forward", fail)
        with pytest.raises(openai.APIError, match="the server failed while generating"):
            text_of(stream)
        if kind is RuntimeError and not served.ended.is_set():
            assert httpx.get(f"{served.url}/health").status_code == 503
        assert served.ended.wait(SECONDS)
        assert isinstance(served.error, Fault)
        assert (
            str(served.error)
            == f"the thread that generates has ended ({kind.__name__}: a kernel failed)"
        )
    assert "Traceback" not in "".join(capfd.readouterr())
