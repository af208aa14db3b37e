"""Parameters of sampling, log-probabilities and forms of answers, against the model's own
logits.
"""

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from msattn.trainer.models import Loaded
from msattn.trainer.serving.engines.http import grammar
from msattn.trainer.serving.engines.http.sampling import Sampler, Sampling
from tests.serving.http.running import (
    CHAT,
    NEW,
    PROMPT,
    Running,
    beside,
    configuration,
    encoded,
    running,
)

ASK: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": NEW}
SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["x", "y"]},
    },
    "required": ["count", "kind"],
    "additionalProperties": False,
}


def by_hand(
    loaded: Loaded, tokens: list[int], *, presence: float = 0, frequency: float = 0
) -> tuple[list[int], list[Tensor]]:
    """Greedy tokens under penalties, and the log-probabilities at each of them."""
    model: Any = loaded.model
    counts: Counter[int] = Counter()
    new, logprobs = list[int](), list[Tensor]()
    with torch.no_grad():
        for _ in range(NEW):
            logits = model(torch.tensor([[*tokens, *new]])).logits[0, -1].float()
            logprobs.append(logits.log_softmax(-1))
            for token, count in counts.items():
                logits[token] -= presence + frequency * count
            new.append(int(logits.argmax()))
            counts[new[-1]] += 1
    return new, logprobs


def text_of(loaded: Loaded, tokens: list[int]) -> Any:
    return loaded.tokenizer.decode(tokens, skip_special_tokens=True)


def test_log_probabilities_are_those_of_the_model(embedded: Loaded, client: OpenAI) -> None:
    tokens, expected = by_hand(embedded, encoded(embedded, PROMPT))
    options: Any = ASK | {"temperature": 0, "logprobs": 3}
    found: Any = client.completions.create(**options).choices[0]
    torch.testing.assert_close(
        torch.tensor(found.logprobs.token_logprobs),
        torch.stack([e[t] for e, t in zip(expected, tokens, strict=True)]),
        rtol=0, atol=1e-3,
    )  # fmt: skip
    assert "".join(found.logprobs.tokens) == found.text
    assert [
        found.text[at:][: len(token)]
        for at, token in zip(found.logprobs.text_offset, found.logprobs.tokens, strict=True)
    ] == (found.logprobs.tokens)
    for best, logprobs in zip(found.logprobs.top_logprobs, expected, strict=True):
        assert sorted(best.values(), reverse=True) == pytest.approx(
            logprobs.topk(3).values.tolist(), abs=1e-3
        )
    pieces: Any = client.completions.create(stream=True, **options)
    streamed = [piece.choices[0].logprobs for piece in pieces if piece.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [each for piece in streamed for each in getattr(piece, name)] == getattr(
            found.logprobs, name
        )


def test_log_probabilities_of_a_chat(client: OpenAI) -> None:
    options: Any = {
        "model": "tiny",
        "messages": CHAT,
        "max_tokens": NEW,
        "temperature": 0,
        "logprobs": True,
    }
    found: Any = client.chat.completions.create(top_logprobs=2, **options).choices[0]
    content = found.logprobs.content
    assert "".join(each.token for each in content) == found.message.content
    assert all(bytes(each.bytes).decode() == each.token for each in content)
    assert all(
        each.top_logprobs[0].logprob == each.logprob > each.top_logprobs[1].logprob
        for each in content
    )
    plain: Any = client.chat.completions.create(**options).choices[0]
    assert [(each.token, each.top_logprobs) for each in plain.logprobs.content] == [
        (each.token, []) for each in content
    ]


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_answers_have_seeds_of_their_own(served: Running, client: OpenAI, stream: bool) -> None:
    def ask(**options: Any) -> list[str]:
        answer: Any = client.completions.create(
            **ASK | {"temperature": 1.5, "stream": stream} | options
        )
        if not stream:
            assert answer.usage.completion_tokens == NEW * options.get("n", 1)
            return [choice.text for choice in answer.choices]
        texts: Counter[int] = Counter()
        parts: dict[int, list[str]] = {}
        for piece in answer:
            parts.setdefault(piece.choices[0].index, []).append(piece.choices[0].text)
            texts[piece.choices[0].index] += piece.choices[0].finish_reason == "length"
        assert set(texts.values()) == {1}
        return ["".join(parts[index]) for index in sorted(parts)]

    three = ask(n=3, seed=5)
    assert len(set(three)) == 3
    with beside(*[lambda: client.completions.create(**ASK, temperature=2)] * 3):
        assert ask(n=3, seed=5) == three
    assert ask(seed=5) == three[:1] != ask(seed=6)
    assert ask(seed=-5) != three[:1]
    assert ask() != ask()


@pytest.mark.parametrize(
    "penalties", [{"presence": 2.0}, {"frequency": 0.7}, {"presence": -1.0, "frequency": 1.5}]
)
def test_penalties_count_the_tokens_of_the_answer(
    embedded: Loaded, client: OpenAI, penalties: dict[str, float]
) -> None:
    tokens = by_hand(embedded, encoded(embedded, PROMPT), **penalties)[0]
    assert tokens != by_hand(embedded, encoded(embedded, PROMPT))[0]
    given: Any = {f"{name}_penalty": value for name, value in penalties.items()}
    answer = client.completions.create(**ASK, temperature=0, **given)
    assert answer.choices[0].text == text_of(embedded, tokens)


def test_a_bias_forces_and_forbids_tokens(embedded: Loaded, client: OpenAI) -> None:
    greedy = by_hand(embedded, encoded(embedded, PROMPT))[0]
    answer: Any = client.completions.create(**ASK, temperature=1, logit_bias={"300": 100}).choices[
        0
    ]
    assert answer.text == text_of(embedded, [300] * NEW)
    answer = client.completions.create(
        **ASK, temperature=0, logit_bias={str(greedy[0]): -100}
    ).choices[0]
    assert not answer.text.startswith(text_of(embedded, greedy[:1]))
    assert client.completions.create(**ASK, temperature=0).choices[0].text == text_of(
        embedded, greedy
    ), "no bias is left over"


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    ],
)
def test_answers_follow_a_schema(client: OpenAI, form: Any) -> None:
    pytest.importorskip("llguidance")
    options: Any = {"model": "tiny", "messages": CHAT, "max_tokens": 300, "response_format": form}
    whole = "json_schema" in form
    for seed, temperature in enumerate((0, 1, 2)):
        answer: Any = client.chat.completions.create(
            **options, temperature=temperature, seed=seed, n=2
        )
        for choice in answer.choices:
            assert choice.message.content.startswith("{")
            if whole or choice.finish_reason == "stop":
                found = json.loads(choice.message.content)
                assert not whole or (
                    0 <= found["count"] <= 99 and found["kind"] in "xy" and len(found) == 2
                )
            assert choice.finish_reason == "stop" or not whole


def test_schemas_that_are_not_served_are_refused(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def problem(schema: dict[str, Any]) -> str:
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        answer = served.post(json=ASK | {"response_format": form})
        assert answer.status_code == 400
        return answer.json()["error"]["message"]

    with monkeypatch.context() as patch:
        patch.setattr(grammar, "find_spec", lambda name: None)
        patch.setattr(served.engine, "_grammars", grammar.Grammars(None, 4096, {0}))
        assert (
            problem(SCHEMA)
            == "response_format: this server lacks llguidance; pip install 'msattn[grammar]'"
        )
    pytest.importorskip("llguidance")
    assert "response_format.json_schema.schema: Invalid type: nope" in problem({"type": "nope"})
    assert "Unknown format: zzz" in problem({"type": "string", "format": "zzz"})


def test_an_answer_without_a_way_on_fails_alone(
    served: Running, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    with monkeypatch.context() as patch:
        patch.setattr(grammar.JsonGrammar, "failed", True)
        with pytest.raises(
            openai.BadRequestError, match="no token can continue the answer under this schema"
        ):
            client.completions.create(**ASK, extra_body={"response_format": form})
    assert served.post(json=ASK).status_code == 200


@pytest.mark.slow
def test_requests_that_are_set_back_go_on_with_their_numbers(small: Loaded) -> None:
    """There are pages for two of four answers at a time."""
    asked: list[Any] = [
        {
            "model": "tiny",
            "prompt": "t1 t2 t3",
            "max_tokens": 90,
            "temperature": 1,
            "seed": seed,
            "logprobs": 1,
        }
        | {"frequency_penalty": 1.0}
        for seed in range(4)
    ]
    limits = ("server.page_size=16", "server.pages=16", "server.max_length=128")
    with running(small, configuration(*limits)) as server, server.client() as client:
        alone = [client.completions.create(**each).choices[0] for each in asked]
        together: list[Any] = [None] * 4

        def ask(number: int) -> None:
            together[number] = client.completions.create(**asked[number]).choices[0]

        with beside(*(lambda number=number: ask(number) for number in range(4))):
            pass
    assert [each.text for each in together] == [each.text for each in alone]
    assert all(len(each.logprobs.tokens) == 90 for each in together)


@pytest.mark.parametrize(
    "ways",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.7, "temperature": 1.7, "min_p": 0.1},
    ],
)
def test_the_sampler_draws_from_the_distribution_of_transformers(ways: dict[str, Any]) -> None:
    rows, vocabulary = 4000, 30
    logits = torch.randn(1, vocabulary) * 2
    warpers = {
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    processors = LogitsProcessorList(
        [warper(ways[name]) for name, warper in warpers.items() if name in ways]
    )
    expected = processors(None, logits.clone()).softmax(-1)[0]  # pyrefly: ignore[bad-argument-type]

    class Even(Sampling):
        """Draws the numbers (row + 0.5) / rows."""

        def numbers(self, vocabulary: int) -> tuple[float, ...]:
            return *super().numbers(vocabulary)[:-1], (float(self.seed) + 0.5) / rows

    sampler = Sampler(rows, vocabulary, torch.device("cpu"))
    states = [
        SimpleNamespace(logit_processor_kwargs={"sampling": Even(str(row), **ways)})
        for row in range(rows)
    ]
    sampler.prepare_tensor_args(
        [SimpleNamespace(state=each, has_new_token=True) for each in states], torch.empty(0)
    )
    drawn = sampler(torch.empty(0), logits.repeat(rows, 1), torch.empty(0)).argmax(-1)
    torch.testing.assert_close(
        drawn.bincount(minlength=vocabulary) / rows, expected, rtol=0, atol=1.1 / rows
    )
