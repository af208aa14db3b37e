"""Answers through the official client: the tokens of greedy ``generate``, stop strings, sampling,
many clients.
"""

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from msattn.trainer.models import Loaded
from tests.serving.http.running import (
    CHAT,
    NEW,
    PROMPT,
    SECONDS,
    Running,
    encoded,
    eventually,
    expected,
)
from tests.serving.paged.batches import alone


def test_a_completion_has_the_tokens_of_greedy_generate(embedded: Loaded, client: OpenAI) -> None:
    tokens = encoded(embedded, PROMPT)
    text = expected(embedded, tokens)
    for prompt in (PROMPT, [PROMPT], tokens, [tokens]):
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=NEW, temperature=0
        )
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "length")
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(tokens), NEW)
        assert answer.usage.total_tokens == len(tokens) + NEW


def test_a_stream_has_the_same_text_in_pieces(embedded: Loaded, client: OpenAI) -> None:
    tokens = encoded(embedded, PROMPT)
    options: Any = {"stream_options": {"include_usage": True}}
    *pieces, last, numbers = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=NEW, temperature=0, seed=3, stream=True, **options
    )
    assert "".join(piece.choices[0].text for piece in pieces) == expected(embedded, tokens)
    assert 2 < len(pieces) <= NEW
    assert {piece.choices[0].finish_reason for piece in pieces} == {None}
    assert (last.choices[0].text, last.choices[0].finish_reason) == ("", "length")
    assert (numbers.choices, numbers.usage and numbers.usage.total_tokens) == (
        [],
        len(tokens) + NEW,
    )
    assert len({piece.id for piece in (*pieces, last, numbers)}) == 1


def test_a_chat_renders_the_template(embedded: Loaded, client: OpenAI) -> None:
    tokens = encoded(embedded, "# system\nBe brief.\n# user\ndef main(\n# answer\n")
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_completion_tokens=NEW, temperature=0
    )
    text = expected(embedded, tokens)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokens)
    first, *pieces, last = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=NEW, temperature=0, stream=True
    )
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    assert (last.choices[0].delta.content, last.choices[0].finish_reason) == (None, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_an_answer_before_it(
    embedded: Loaded, served: Running, client: OpenAI, stream: bool
) -> None:
    whole = expected(embedded, encoded(embedded, PROMPT), 40)
    stop = whole[20:26]  # begins and ends inside tokens
    options: Any = {"stop": ["never in it", stop], "stream": stream}
    answer: Any = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1000, temperature=0, **options
    )
    choices = [piece.choices[0] for piece in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"
    eventually(lambda: served.metric("cache_pages_used") == 0)


def test_a_stop_string_in_the_last_token_is_the_reason(embedded: Loaded, client: OpenAI) -> None:
    """The answer ends by itself with the same token."""
    tokens = encoded(embedded, PROMPT)
    for new in range(2, 8):
        text = expected(embedded, tokens, new)
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=new, temperature=0, stop=text[-3:]
        )
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (
            text[: text.index(text[-3:])],
            "stop",
        )
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=new, temperature=0, stop=text[-3:] + "?"
        )
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "length")


def test_tokens_of_a_request_end_its_answer(embedded: Loaded, client: OpenAI) -> None:
    tokens = encoded(embedded, PROMPT)
    third = alone(embedded.model, tokens, 3)[2]
    options: Any = {"extra_body": {"stop_token_ids": [third]}}
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=NEW, temperature=0, **options
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (
        expected(embedded, tokens, 2),
        "stop",
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_messages_of_answers_can_be_sent_back(client: OpenAI) -> None:
    """The client writes their absent parts as null; other clients write what they do not use as
    null or empty.
    """
    ask: Any = {"model": "tiny", "max_tokens": 2, "temperature": 0}
    first = client.chat.completions.create(messages=CHAT, **ask).choices[0].message
    returned = first.model_dump()
    assert "refusal" in returned
    plain: Any = {"role": "assistant", "content": first.content}
    unused: Any = {
        "tools": None,
        "metadata": None,
        "store": False,
        "tool_choice": None,
        "functions": [],
        "suffix": "",
    }
    again = client.chat.completions.create(
        messages=[*CHAT, returned, *CHAT[1:]], extra_body=unused, **ask
    )
    assert (
        again.usage
        == client.chat.completions.create(messages=[*CHAT, plain, *CHAT[1:]], **ask).usage
    )
    silent: Any = [
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "annotations": []},
    ]
    assert client.chat.completions.create(messages=[*CHAT, *silent, *CHAT[1:]], **ask).choices


@pytest.mark.slow
def test_parameters_at_the_ends_of_their_ranges(embedded: Loaded, served: Running) -> None:
    """In float32, the manager would divide by a temperature of zero, and its thread would end."""
    request = {"model": "tiny", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0}
    greedy: list[dict[str, Any]] = [
        *({"temperature": temperature} for temperature in (-0.0, 5e-324, 1e-40, 1e-37, 9e-6)),
        {"temperature": 2, "top_p": 5e-324},
        {"temperature": 1e-40, "top_p": 5e-324},
        *(
            {"temperature": 2} | narrow
            for narrow in ({"top_k": 1}, {"min_p": 1, "top_k": -1}, {"top_k": 10**9, "top_p": 1e-9})
        ),
        {"top_p": 1},
        {"seed": -(10**400)},
        {"stop": ["x" * 1000] * 16},
        {"presence_penalty": -0.0, "frequency_penalty": 0},
    ]
    text = expected(embedded, encoded(embedded, PROMPT))
    for change in greedy:
        answer = served.post(json=request | change)
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, text), change
    assert served.post(json=request | {"temperature": 2, "top_p": 1}).status_code == 200


def test_the_text_ends_where_the_model_ends_it(
    embedded: Loaded, served: Running, client: OpenAI
) -> None:
    """The token that ends a text counts, and is no text, whether or not the tokenizer marks it as
    special.
    """
    tokens = encoded(embedded, PROMPT)
    first, second, third = alone(embedded.model, tokens, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served.engine, "ends", [third])
        answer, whole = (
            client.completions.create(
                model="tiny",
                prompt=PROMPT,
                max_tokens=NEW,
                temperature=0,
                logprobs=0,
                extra_body={"ignore_eos": ignored},
            )
            for ignored in (None, True)
        )
    assert answer.choices[0].text == embedded.tokenizer.decode([first, second])
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (
        expected(embedded, tokens),
        "length",
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    tokens_of = [each.choices[0].logprobs for each in (answer, whole)]
    assert [each is not None and len(each.tokens or []) for each in tokens_of] == [2, NEW]


@pytest.mark.slow
def test_64_clients_at_a_time_get_their_own_answers(
    embedded: Loaded, served: Running, client: OpenAI
) -> None:
    prompts = [f"def f{i}(x):\n    return x[{i}]\n" * (1 + i) for i in range(8)]
    texts = [expected(embedded, encoded(embedded, prompt), 6) for prompt in prompts]

    async def ask() -> list[str]:
        async with AsyncOpenAI(
            base_url=client.base_url, api_key=client.api_key, timeout=SECONDS
        ) as many:

            async def one(i: int) -> str:
                options: Any = {
                    "model": "tiny",
                    "prompt": prompts[i % 8],
                    "max_tokens": 6,
                    "temperature": 0,
                }
                if i % 2:
                    return "".join(
                        [
                            p.choices[0].text
                            async for p in await many.completions.create(stream=True, **options)
                        ]
                    )
                return (await many.completions.create(**options)).choices[0].text

            return await asyncio.gather(*map(one, range(64)))

    assert asyncio.run(ask()) == texts * 8
    assert served.metric("requests_running") == served.metric("requests_waiting") == 0


def test_a_client_that_leaves_frees_its_pages(served: Running, client: OpenAI) -> None:
    before = served.metric('requests_total{outcome="cancelled"}')
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=3000, temperature=0, stream=True
    )
    next(iter(stream))
    assert served.metric("cache_pages_used") > 0
    assert served.metric("requests_running") == 1
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(
            model="tiny", prompt=PROMPT, max_tokens=3000, temperature=0
        )
    eventually(lambda: served.metric('requests_total{outcome="cancelled"}') == before + 2)
    eventually(lambda: served.metric("cache_pages_used") == 0)
    assert served.metric("cache_pages_total") == served.engine.pages().total


def test_models_and_health(served: Running, client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("tiny", "msattn")
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="this server has tiny"):
        client.models.retrieve("big/one")
    assert served.get("/health").json() == {"status": "ok"}
