"""Servers in threads of this process, and what tests ask them."""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from transformers import AutoTokenizer

from msattn.trainer.commands.compose import compose
from msattn.trainer.commands.serve import server
from msattn.trainer.config import ServeConfig
from msattn.trainer.models import Loaded
from msattn.trainer.serving.engines.http.engine import Engine
from msattn.trainer.serving.engines.http.supervisor import Supervisor, bind
from msattn.trainer.training.tracker import Tracker
from tests.factory import save_tokenizer, tiny_model
from tests.running import wait_until
from tests.serving.paged.batches import alone

KEY = "sk-of-the-tests"
SECONDS = 60  # for what takes one, on a machine that is busy
WORDS: dict[str, Any] = {"model": "tiny", "prompt": "t1 t2 t3", "temperature": 0}


@cache
def configuration(*overrides: str) -> ServeConfig:
    return compose("serve", ["device=cpu", "dense=true", *overrides])


@dataclass
class Running:
    """A server; ``ended`` is set with what its supervisor raised, once it has returned."""

    engine: Engine
    supervisor: Supervisor
    port: int
    key: str | None
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(
            base_url=f"{self.url}/v1",
            api_key=self.key or "none",
            max_retries=0,
            timeout=SECONDS,
            **options,
        )

    def post(self, path: str = "/v1/completions", **options: Any) -> httpx.Response:
        headers = {
            "Authorization": f"Bearer {self.key}",
            "Content-Type": "application/json",
            **options.pop("headers", {}),
        }
        return httpx.post(self.url + path, headers=headers, timeout=SECONDS, **options)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(
            self.url + path, headers={"Authorization": f"Bearer {self.key}"}, timeout=SECONDS
        )

    def metric(self, name: str) -> float:
        """The value of a metric; 0 if it has none yet."""
        text = self.get("/metrics").text
        found = re.search(rf"^msattn_{re.escape(name)} (\S+)$", text, flags=re.MULTILINE)
        return float(found[1]) if found else 0.0

    def raw(self, data: bytes) -> bytes:
        """Returns the answer to bytes that need not be HTTP. A server that closes before it has
        read them all resets the connection: after its answer on the wire, but perhaps before this
        has sent the rest.
        """
        answer = bytearray()
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS) as connection,
            suppress(ConnectionError),
        ):
            with suppress(ConnectionError):
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
        return bytes(answer)


def eventually(condition: Callable[[], bool]) -> None:
    """Waits for ``condition``; fails after :data:`SECONDS`."""
    assert wait_until(condition, SECONDS)


@contextmanager
def beside(*calls: Callable[[], object]) -> Iterator[None]:
    """Runs ``calls`` in threads beside the block, which ends with the last of them."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(SECONDS)


@contextmanager
def running(
    loaded: Loaded,
    cfg: ServeConfig,
    sparse: Any = None,
    api_key: str | None = None,
    tracker: Tracker | None = None,
) -> Iterator[Running]:
    """A server on a free port, until the context ends."""
    with (
        server(loaded, cfg, sparse, api_key, tracker) as (engine, supervisor),
        bind("127.0.0.1", 0) as bound,
    ):
        found = Running(engine, supervisor, bound.getsockname()[1], api_key)

        def supervise() -> None:
            try:
                supervisor.run(bound)
            except BaseException as error:
                found.error = error
            found.ended.set()

        bound.listen(1024)
        thread = threading.Thread(target=supervise)
        thread.start()
        try:
            yield found
        finally:
            supervisor.stop()
            thread.join(SECONDS)
            assert not thread.is_alive()


def small_loaded(folder: Path, family: str = "llama", **overrides: Any) -> Loaded:
    """A random model of two small layers, whose answers never end by themselves."""
    save_tokenizer(folder)
    model = tiny_model(family, max_position_embeddings=4096, **overrides)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return Loaded(model, AutoTokenizer.from_pretrained(folder), {})


PROMPT = "def main(arguments):\n    return"


CHAT: Any = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "def main("}]},
]


NEW = 12


def expected(loaded: Loaded, tokens: list[int], new: int = NEW) -> str:
    tokenizer: Any = loaded.tokenizer
    return tokenizer.decode(alone(loaded.model, tokens, new), skip_special_tokens=True)


def encoded(loaded: Loaded, text: str) -> list[int]:
    return loaded.tokenizer(text).input_ids
