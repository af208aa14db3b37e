"""Requests that are refused: one sentence in OpenAI's form, and the server goes on."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from msattn.trainer.models import Loaded
from msattn.trainer.serving.engines.http.bodies import CompletionBody, read_body
from msattn.trainer.serving.engines.http.text import TokenText
from tests.serving.http.running import KEY, SECONDS, Running, eventually

GOOD: dict[str, Any] = {"model": "tiny", "prompt": "def", "max_tokens": 2, "temperature": 0}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "def"}],
    "max_tokens": 2,
}


@pytest.fixture(autouse=True, scope="module")
def serves_on(served: Running) -> Iterator[None]:
    """After all refusals the server answers."""
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
        ({"prompt": [""]}, "prompt", "it is empty"),
        ({"prompt": ["a", "b"]}, "prompt", "expected one text"),
        ({"prompt": None}, "prompt", "prompt=null: expected one text"),
        ({"prompt": [-1]}, "prompt", "expected one text"),
        ({"prompt": [4096]}, "prompt", "token 4096 is outside the vocabulary (4096 tokens)"),
        ({"prompt": "a b " * 4000}, "prompt", "exceed the 4096 tokens of a request"),
        (
            {"prompt": "a" * 140_000},
            "prompt",
            "140000 characters exceed the 4096 tokens of a request; shorten",
        ),
        (
            {"prompt": [1] * 6000},
            None,
            "the body: more than 5096 values exceed the 4096 tokens of a request",
        ),
        (
            {"max_tokens": 4096},
            "prompt",
            "exceed the 4096 tokens of a request; shorten the prompt or lower max_tokens",
        ),
        ({"max_tokens": 10**40}, "prompt", "exceed"),
        ({"max_tokens": True}, "max_tokens", "max_tokens=true: input should be a valid integer"),
        ({"max_tokens": "2"}, "max_tokens", "valid integer"),
        ({"temperature": 10**400}, "temperature", "finite"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"top_p": 0}, "top_p", "top_p=0: input should be greater than 0"),
        ({"n": 17}, "n", "n=17: input should be less than or equal to 16"),
        ({"echo": True}, "echo", "echo=true"),
        (
            {"ignore_eos": True, "response_format": {"type": "json_object"}},
            "ignore_eos",
            "an answer ends where its response_f",
        ),
        ({"seed": 1.5}, "seed", "seed=1.5: input should be a valid integer"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"top_k": 10**310}, "top_k", "less than 2147483648"),
        ({"min_p": 1.1}, "min_p", "less than or equal to 1"),
        ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
        (
            {"logit_bias": {"4096": 1}},
            "logit_bias",
            "token 4096 is outside the vocabulary (4096 tokens)",
        ),
        (
            {"logit_bias": {"5": 101}},
            "logit_bias.5",
            "logit_bias.5=101: input should be less than or equal to 100",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "json_schema is for type=json_schema, which needs it",
        ),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "'text', 'json_object' or 'json_schema'",
        ),
        (
            {"stop_token_ids": [4096]},
            "stop_token_ids",
            "token 4096 is outside the vocabulary (4096 tokens)",
        ),
        ({"store": True}, "store", "store=true"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"stop": [""]}, "stop.0", "at least 1 character"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream=true"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ],
)
def test_a_parameter_that_is_not_accepted_is_named(
    served: Running, change: dict, param: str | None, says: str
) -> None:
    check(served.post(content=json.dumps(GOOD | change)), param, says)


@pytest.mark.parametrize(
    "empty",
    [
        {"stop": ""},
        {"stream_options": {}},
        {"stream_options": {"include_usage": False}},
        {"response_format": {}},
        {"response_format": {"type": "text", "json_schema": {}}},
    ],
)
def test_empty_parameters_count_as_left_out(empty: dict) -> None:
    body = read_body(json.dumps(GOOD | empty).encode(), CompletionBody, "tiny", 4096)
    assert (body.stop, body.include_usage, body.schema_of_answer) == ([], False, None)


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        (
            {"messages": [{"role": "user", "content": [{}] * 900}] * 2},
            "messages.0.content.0.type",
            "missing",
        ),
        ({"messages": []}, "messages", "at least 1 item"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages.0.role",
            "'system', 'developer', 'user' or 'assistant'",
        ),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "missing"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "missing"),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
            "messages.0.tool_calls",
            "not supported",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type",
            "'text'",
        ),
        (
            {"messages": [{"role": "user", "content": "a" * 140_000}]},
            "messages",
            "characters exceed",
        ),
        (
            {"messages": [*CHAT["messages"], {"role": "system", "content": "a"}]},
            "messages",
            "system comes first",
        ),
        ({"top_logprobs": 1}, "top_logprobs", "accepted only with logprobs=true"),
        ({"tools": [{}]}, "tools", "not supported"),
        ({"max_completion_tokens": 3}, "max_completion_tokens", "give one of the two"),
    ],
)
def test_messages_that_are_not_accepted_are_named(
    served: Running, change: dict, param: str, says: str
) -> None:
    check(served.post("/v1/chat/completions", json=CHAT | change), param, says)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (b"", None, "the body: invalid JSON"),
        (b"[]", None, "the body: input should be an object"),
        (b'{"model": "tiny", "prompt": "\xe9"}', None, "invalid unicode"),
        # half of a surrogate pair, which is no text
        (b'{"model": "tiny", "prompt": "\\ud800"}', None, "invalid JSON"),
        (b'{"model": ' + b"9" * 5000 + b"}", None, "number out of range"),
        *(
            (b'{"user": ' + b"[" * depth + b"]" * depth + b"}", None, "recursion limit")
            for depth in (300, 900, 5000)
        ),
        (b'{"user": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", None, "more than 5096 values"),
        (b"{}", "model", "model: this parameter is missing"),
    ],
)
def test_a_body_that_is_no_request(
    served: Running, body: bytes, param: str | None, says: str
) -> None:
    check(served.post(content=body), param, says)


def check(answer: httpx.Response, param: str | None, says: str) -> None:
    assert answer.status_code == 400, answer.text
    error = problem(answer)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]


def test_a_model_without_a_template_has_no_chat(
    embedded: Loaded, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded.tokenizer, "chat_template", None)
    with pytest.raises(
        openai.BadRequestError, match="no chat template; send a prompt to /v1/completions"
    ):
        client.chat.completions.create(**CHAT)


def test_other_statuses(served: Running, client: OpenAI) -> None:
    with pytest.raises(
        openai.NotFoundError, match="model=gpt-4: no such model; this server has tiny"
    ) as caught:
        client.completions.create(model="gpt-4", prompt="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    answers = [
        (404, served.post("/v1/embeddings", json=GOOD)),
        # no redirection to the host that the client names
        (404, served.post("/v1/completions/", json=GOOD)),
        (405, served.get("/v1/completions")),
        (413, served.post(json=GOOD | {"prompt": "a" * 200_000})),
        (413, served.post(content=iter([b" " * 50_000] * 5))),  # in chunks, without Content-Length
        (415, served.post(json=GOOD, headers={"Content-Type": "text/plain"})),
    ]
    for status, answer in answers:
        assert answer.status_code == status
        assert problem(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize("key", [None, f"{KEY}x", KEY[:-1], "sk-\u00fc"])
def test_a_wrong_key_opens_health_alone(served: Running, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
    with httpx.Client(base_url=served.url, headers=headers, timeout=SECONDS) as client:
        for path in ("/v1/models", "/metrics", "/nowhere"):
            answer = client.get(path)
            assert answer.status_code == 401
            assert problem(answer)["code"] == "invalid_api_key"
            assert KEY not in answer.text
        assert client.post("/v1/completions", json=GOOD).status_code == 401
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("scheme", ["bearer", "BEARER "])
def test_the_scheme_of_a_key_has_no_case(served: Running, scheme: str) -> None:
    assert served.post(json=GOOD, headers={"Authorization": f"{scheme} {KEY}"}).status_code == 200
    assert served.post(json=GOOD, headers={"Authorization": f"Basic {KEY}"}).status_code == 401


def test_bytes_that_are_no_request(served: Running) -> None:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
        f"{KEY}\r\nContent-Type: application/json\r\n"
    )
    assert b" 400 " in served.raw(b"\x00\xff\x16\x03\x01nonsense\r\n\r\n").split(b"\r\n")[0]
    assert (
        b" 413 "
        in served.raw(f"{head}Content-Length: 99999999999\r\n\r\n".encode()).split(b"\r\n")[0]
    )
    assert (
        b" 200 "
        not in served.raw(f"{head}Content-Length: {'9' * 5000}\r\n\r\n".encode()).split(b"\r\n")[0]
    )
    assert b" 400 " in served.raw(f"{head}Content-Length: -5\r\n\r\n".encode()).split(b"\r\n")[0]
    # the client leaves amid its body
    assert b" 200 " not in served.raw(f"{head}Content-Length: 100\r\n\r\n{{".encode())
    assert b" 40" in served.raw(b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n").split(b"\r\n")[0]


def test_the_log_has_one_line_without_the_text(
    served: Running, caplog: pytest.LogCaptureFixture
) -> None:
    def own() -> list[str]:
        """The lines of these requests: a line is written after its answer, so that of the test
        before may be among them.
        """
        lines = [record.getMessage() for record in caplog.records if record.name == "msattn.serve"]
        return sorted(
            line for line in lines if "+ 11 tokens" in line or "[2J" in line or "/health" in line
        )

    with caplog.at_level("INFO", "msattn.serve"):
        served.get("/health")
        served.post(json=GOOD | {"prompt": "a secret word", "max_tokens": 11})
        served.post("/v1/completions%1b%5b2J", json=GOOD | {"prompt": 5})
        eventually(lambda: len(own()) >= 2)
    second, first = own()
    assert first.startswith("POST /v1/completions 200, ")
    assert second.startswith("POST '/v1/completions\\x1b[2J' 404")
    assert not any(hidden in line for line in (first, second) for hidden in ("secret", KEY, "\x1b"))


@pytest.mark.parametrize("when", ["before the answer", "in the answer"])
def test_a_fault_of_the_server_has_no_details(
    served: Running, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        owner, name = (
            (served.engine, "submit") if when == "before the answer" else (TokenText, "push")
        )
        patch.setattr(owner, name, lambda *arguments, **options: 1 / 0)
        answer = served.post(json=GOOD)
    assert (answer.status_code, problem(answer)["message"]) == (500, "the server failed")
    eventually(lambda: "POST /v1/completions: ZeroDivisionError: division by zero" in caplog.text)
