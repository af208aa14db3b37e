"""Requests that are refused: one sentence in OpenAI's form, and the server goes on."""

import json
import socket
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from msattn.trainer.models import Loaded
from tests.serving.http.running import KEY, SECONDS, Running, eventually

GOOD: dict[str, Any] = {"model": "tiny", "prompt": "def", "max_tokens": 2, "temperature": 0}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "def"}], "max_tokens": 2}


@pytest.fixture(autouse=True)
def serves_on(served: Running):
    """After each refusal the server answers."""
    yield
    assert served.post(json=GOOD).status_code == 200


def problem(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, whose form is checked."""
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    return body["error"]


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"prompt": ""}, "prompt", "it is empty"),
        ({"prompt": []}, "prompt", "it is empty"),
        ({"prompt": [""]}, "prompt", "it is empty"),
        ({"prompt": ["a", "b"]}, "prompt", "accepted is one text"),
        ({"prompt": None}, "prompt", "prompt=null: accepted is one text"),
        ({"prompt": [1.5]}, "prompt", "accepted is one text"),
        ({"prompt": [-1]}, "prompt", "accepted is one text"),
        ({"prompt": [4096]}, "prompt", "token 4096 is none of the 4096 of the model"),
        ({"prompt": [10**30]}, "prompt", "is none of the 4096"),
        ({"prompt": "a b " * 4000}, "prompt", "exceed the 4096 tokens of a request"),
        ({"max_tokens": 4096}, "prompt", "exceed the 4096 tokens of a request; shorten the prompt or lower max_tokens"),
        ({"prompt": "\ud800"}, None, "half of a surrogate pair"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0: input should be greater"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"max_tokens": "2"}, "max_tokens", "valid integer"),
        ({"max_tokens": 10**40}, "prompt", "exceed"),
        ({"temperature": -0.1}, "temperature", "temperature=-0.1"),
        ({"temperature": 10**400}, "temperature", "temperature"),
        ({"temperature": float("nan")}, "temperature", "temperature"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 2}, "n", "n=2"),
        ({"best_of": 3}, "best_of", "best_of=3"),
        ({"echo": True}, "echo", "echo=true"),
        ({"seed": 1, "temperature": 1}, "seed", "temperature=0"),
        ({"stop": [""]}, "stop.0", "at least 1 character"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stream": 1}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream=true"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "frequency_penalty=0.5"),
        ({"logprobs": 1}, "logprobs", "this parameter is not supported"),
        ({"suffix": "x"}, "suffix", "this parameter is not supported"),
        ({"logit_bias": {}}, "logit_bias", "this parameter is not supported"),
        ({"promt": "x"}, "promt", "this parameter is not supported"),
        ({"model": 5}, "model", "valid string"),
    ],
)
def test_a_parameter_that_is_not_accepted_is_named(served: Running, change: dict, param: str | None, says: str) -> None:
    answer = served.post(content=json.dumps(GOOD | change))
    assert answer.status_code == 400, answer.text
    error = problem(answer)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user", "content": ""}, "x"]}, "messages.1", "valid dictionary"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "'system', 'developer', 'user' or 'assistant'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "'text'"),
        ({"messages": [{"role": "user", "content": "a", "name": "x"}]}, "messages.0.name", "not supported"),
        ({"messages": [*CHAT["messages"], {"role": "system", "content": "a"}]}, "messages", "system comes first"),
        ({"tools": [{}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"max_completion_tokens": 3}, "max_tokens", "give one of the two"),
        ({"prompt": "x"}, "prompt", "not supported"),
    ],
)
def test_messages_that_are_not_accepted_are_named(served: Running, change: dict, param: str, says: str) -> None:
    answer = served.post("/v1/chat/completions", json=CHAT | change)
    assert answer.status_code == 400, answer.text
    error = problem(answer)
    assert error["param"] == param
    assert says in error["message"]


def test_a_model_without_a_template_has_no_chat(
    served: Running, embedded: Loaded, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded.tokenizer, "chat_template", None)
    with pytest.raises(openai.BadRequestError, match="no chat template; send a prompt to /v1/completions"):
        client.chat.completions.create(**CHAT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON"),
        (b'{"model": ', "not JSON"),
        (b"[" * 50000, "nested too deeply"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"model": "tiny", "prompt": "\xe9"}', "not UTF-8"),
        (b'{"model": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"{}", "model: this parameter is missing"),
    ],
)
def test_a_body_that_is_no_request(served: Running, body: bytes, says: str) -> None:
    answer = served.post(content=body)
    assert answer.status_code == 400
    assert says in problem(answer)["message"]


@pytest.mark.parametrize("depth", [300, 600, 900])
def test_nesting_is_refused_at_any_depth(served: Running, depth: int) -> None:
    """At some, the JSON can be read, but not searched for surrogates."""
    answer = served.post(content=b'{"user": ' + b"[" * depth + b"]" * depth + b"}")
    assert answer.status_code == 400
    assert problem(answer)["type"] == "invalid_request_error"


def test_other_statuses(served: Running, client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="model=gpt-4: no such model; this server has tiny") as caught:
        client.completions.create(model="gpt-4", prompt="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    answers = {
        404: served.post("/v1/embeddings", json=GOOD),
        405: served.get("/v1/completions"),
        413: served.post(json=GOOD | {"prompt": "a" * 200_000}),
        415: served.post(json=GOOD, headers={"Content-Type": "text/plain"}),
    }
    for status, answer in answers.items():
        assert answer.status_code == status
        assert problem(answer)["type"] == "invalid_request_error"


def test_a_body_of_unknown_length_is_bounded(served: Running) -> None:
    answer = served.post(content=iter([b" " * 50_000] * 5))  # in chunks, without Content-Length
    assert answer.status_code == 413
    assert "exceeds 104857 bytes" in problem(answer)["message"]


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, "x", "sk-wrong", f"{KEY}x", KEY[:-1], "sk-\u00fc"])
def test_a_wrong_key_opens_health_alone(served: Running, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
    for path in ("/v1/models", "/metrics", "/nowhere"):
        answer = httpx.get(served.url + path, headers=headers, timeout=SECONDS)
        assert answer.status_code == 401
        assert problem(answer)["code"] == "invalid_api_key"
        assert KEY not in answer.text
    assert httpx.post(f"{served.url}/v1/completions", headers=headers, json=GOOD, timeout=SECONDS).status_code == 401
    assert httpx.get(f"{served.url}/health", headers=headers, timeout=SECONDS).status_code == 200


def test_bytes_that_are_no_request(served: Running) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    assert b" 400 " in served.raw(b"\x00\xff\x16\x03\x01nonsense\r\n\r\n").split(b"\r\n")[0]
    assert b" 413 " in served.raw(f"{head}Content-Length: 99999999999\r\n\r\n".encode()).split(b"\r\n")[0]
    assert b" 200 " not in served.raw(f"{head}Content-Length: {'9' * 5000}\r\n\r\n".encode()).split(b"\r\n")[0]
    assert b" 400 " in served.raw(f"{head}Content-Length: -5\r\n\r\n".encode()).split(b"\r\n")[0]
    assert b" 400 " in served.raw(f"{head}Content-Length: 5\r\nContent-Length: 6\r\n\r\n".encode()).split(b"\r\n")[0]
    assert b" 200 " not in served.raw(f"{head}Content-Length: 100\r\n\r\n{{".encode())  # the client leaves amid its body
    assert b" 40" in served.raw(b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n").split(b"\r\n")[0]
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=SECONDS)
    connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\nffffffff\r\n".encode())
    connection.close()


def written(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the lines of the server's log."""
    return [record.getMessage() for record in caplog.records if record.name == "msattn.serve"]


def test_the_log_has_one_line_without_the_text(served: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "msattn.serve"):
        served.post(json=GOOD | {"prompt": "a secret word", "max_tokens": 11})
        served.post("/v1/completions%1b%5b2J", json=GOOD | {"prompt": 5})
        served.get("/health")

        def own() -> list[str]:
            """The lines of these requests: a line is written after its answer, so that of the test before may be among them."""
            return sorted(line for line in written(caplog) if "+ 11 tokens" in line or "[2J" in line)

        eventually(lambda: len(own()) >= 2)
    second, first = own()
    assert not any("/health" in line for line in written(caplog))
    assert first.startswith("POST /v1/completions 200, ")
    assert second.startswith("POST '/v1/completions\\x1b[2J' 404")
    assert not any(hidden in line for line in (first, second) for hidden in ("secret", KEY, "\x1b"))


@pytest.mark.slow
def test_a_fault_of_the_server_has_no_details(served: Running, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served.engine, "submit", lambda *arguments: 1 / 0)
        answer = served.post(json=GOOD)
    assert (answer.status_code, problem(answer)["message"]) == (500, "the server failed")
    eventually(lambda: "POST /v1/completions: ZeroDivisionError: division by zero" in caplog.text)
