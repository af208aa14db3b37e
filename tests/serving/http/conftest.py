"""A server of the embedded model in this process, and the official client."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from msattn.trainer.models import Loaded, load
from tests.serving.http.running import KEY, Running, configuration, running, small_loaded

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% "
    "endif %}"
    "# {{ m.role }}\n{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}# answer\n{% "
    "endif %}"
)


@pytest.fixture(scope="package")
def embedded() -> Loaded:
    """The embedded model, with a chat template."""
    loaded = load(configuration().model, device="cpu")
    loaded.tokenizer.chat_template = TEMPLATE
    return loaded


@pytest.fixture
def small(tmp_path: Path) -> Loaded:
    """A small random model."""
    return small_loaded(tmp_path)


@pytest.fixture(scope="module")
def served(embedded: Loaded) -> Iterator[Running]:
    with running(embedded, configuration("server.max_body_mb=0.15"), api_key=KEY) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Running) -> Iterator[OpenAI]:
    with served.client() as found:
        yield found
