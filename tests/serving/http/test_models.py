"""Models and caches that a server takes, and those that it refuses."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import transformers

import msattn
from msattn.trainer.commands import serve
from msattn.trainer.commands.answers import find_served
from msattn.trainer.errors import UserError
from msattn.trainer.models import Loaded
from msattn.trainer.serving.engines.http import cache_size
from msattn.trainer.serving.engines.http.engine import check_served
from tests.ending import ENDING_WITH, first_unique, saved
from tests.factory import save_tokenizer, tiny_model
from tests.serving.http.running import configuration, eventually, running, small_loaded
from tests.serving.paged.batches import alone


def test_sparse_answers_are_those_of_the_attached_model(embedded: Loaded) -> None:
    prompt = "def main(arguments):\n    return arguments.get('x')\n\n" * 20
    tokens = embedded.tokenizer(prompt).input_ids
    options: Any = {
        "gate": "embedded",
        "qmodel": "embedded",
        "select": {"sink_blocks": 0, "local_blocks": 0},
        "sparsity": 0.7,
    }
    options |= {"dense_below": 0}
    model: Any = embedded.model
    with msattn.attach(model, **options) as sparse:
        ends = model.generation_config.eos_token_id
        generation = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=8, eos_token_id=ends
        )
        cfg: Any = configuration("dense=false")
        batching = sparse.batching_config(
            num_blocks=32, max_batch_tokens=512, use_async_batching=False
        )
        (alone,) = model.generate_batch([tokens], generation, batching).values()
        with running(embedded, cfg, sparse) as served, served.client() as client:
            answer = client.completions.create(
                model="tiny", prompt=prompt, max_tokens=8, temperature=0
            )
            assert answer.choices[0].text == embedded.tokenizer.decode(alone.generated_tokens)
            assert 0.3 < served.metric("sparsity") < 0.8
            assert 0 < served.metric("selectivity") < 1
            eventually(lambda: served.metric("cache_pages_used") == 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *((family, {}) for family in ("olmo3", "gemma3_text", "gpt_oss")),
        ("mistral", {"sliding_window": 24}),  # in all layers
    ],
)
def test_layers_with_a_window_are_served_densely(
    tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    """The longest request fits, though layers with a window and others share the pages in
    groups.
    """
    small = small_loaded(tmp_path, family, **overrides)
    prompt = [5 + i % 50 for i in range(100)]
    expected = alone(small.model, prompt, 100)
    cfg = configuration(
        "server.page_size=16", "server.max_length=200", "server.pages=14", "server.batch_tokens=32"
    )
    with running(small, cfg) as served, served.client() as client:
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=100, temperature=0
        )
        tokenizer: Any = small.tokenizer
        assert answer.choices[0].text == tokenizer.decode(expected, skip_special_tokens=True)
        eventually(lambda: served.metric("cache_pages_used") == 0)


def test_a_model_that_cannot_be_batched_needs_no_artifact_to_be_refused(tmp_path: Path) -> None:
    """Otherwise the message would ask for artifacts that cannot be served."""
    tiny_model("gemma3_text").save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    cfg = configuration(f"model.path='{tmp_path}'", f"outputs='{tmp_path / 'none'}'")
    with pytest.raises(UserError, match="continuous batching does not serve this model"):
        find_served(cfg, check_served)


@pytest.mark.parametrize(
    ("family", "select", "says"),
    [
        ("llama4_text", None, r"chunked_attention\); use msattn generate"),
        ("gemma2", None, r"attn_logit_softcapping=2\.0 is not supported\); use msattn generate"),
        (
            "gemma3_text",
            "quest",
            r"layer 0 .* window of 24 tokens\); give dense=true, or use msattn generate",
        ),
        (
            "qwen3_next",
            "quest",
            r"layer 0 .* linear attention, which caches no keys\); use msattn generate",
        ),
        (
            "gpt_oss",
            "quest",
            r"attention sinks are not supported\); give dense=true, or use msattn generate",
        ),
    ],
)
def test_a_model_that_cannot_be_batched_is_refused(
    tmp_path: Path, family: str, select: str | None, says: str
) -> None:
    small = small_loaded(tmp_path, family)
    attached = nullcontext() if select is None else msattn.attach(small.model, select=select)
    with (
        pytest.raises(
            UserError, match=f"serve: continuous batching does not serve this model .*{says}$"
        ),
        attached as sparse,
        serve.server(small, configuration(), sparse),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "server.max_length=5000",
            "server.max_length=5000: the model has positions for 4096 tokens",
        ),
        (
            "server.pages=3",
            "server.pages=3: a request of 4096 tokens takes 17 pages of 256 tokens; raise it, or "
            "lower server.max",
        ),
        (
            "server.pages=100000000",
            "memory is too small for the KV cache .*; lower server.pages or server.batch_tokens",
        ),
        (
            "server.pages=null",
            r"one request of 4096 tokens takes [\d.]+ GB, and 0.00 GB are free for it; lower "
            r"server",
        ),
    ],
)
def test_a_cache_that_is_not_possible_is_refused(
    small: Loaded, override: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_size, "free_memory", lambda: 2**20)
    with pytest.raises(UserError, match=says), serve.server(small, configuration(override)):
        pass


def test_a_chat_ends_at_the_token_of_its_template(tmp_path: Path) -> None:
    """``config.json`` and the tokenizer name others; the token is not marked as special."""
    whole = alone(saved(tmp_path, template=ENDING_WITH % "t1").model, [3, 5], 24)
    end = first_unique(whole)
    loaded = saved(
        tmp_path, template=ENDING_WITH % f"t{end}", added=f"t{end}", config=127, eos="t126"
    )
    with running(loaded, configuration()) as served, served.client() as client:
        messages: Any = [{"role": "user", "content": "t3 t5"}]
        answer = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=24, temperature=0
        )
    tokenizer: Any = loaded.tokenizer
    assert answer.choices[0].message.content == tokenizer.decode(whole[: whole.index(end)])
    assert answer.choices[0].finish_reason == "stop"
