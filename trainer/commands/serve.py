"""``msattn serve``: loads a model, attaches its artifacts and answers requests until a signal ends
it.
"""

import logging
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING

from msattn.trainer.config import ServeConfig
from msattn.trainer.config.values import shown
from msattn.trainer.errors import UserError, print_once
from msattn.trainer.progress import report
from msattn.trainer.ranks import num_ranks

if TYPE_CHECKING:
    from msattn.trainer.models import Loaded
    from msattn.trainer.serving.attend import Sparse
    from msattn.trainer.serving.engines.http.engine import Engine
    from msattn.trainer.serving.engines.http.supervisor import Supervisor
    from msattn.trainer.training.tracker import Tracker

EXTRA = ("starlette", "uvicorn", "prometheus_client")
WAITING_CONNECTIONS = 1024
PORTS = 65535
LOCAL = ("127.0.0.1", "localhost", "::1")


def serve(cfg: ServeConfig, host: str, port: str, api_key: str | None) -> None:
    """Serves a model over HTTP until Ctrl-C or SIGTERM, after which running requests finish, or
    until a Fault.
    """
    check_libraries()
    check_key(api_key)
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > PORTS:
        raise UserError(
            f"--port {shown(port)}: expected an integer in [0, {PORTS}]; 0 takes a free port"
        )
    from msattn.trainer.serving.engines.http.supervisor import address, bind

    with bind(host, int(port)) as bound:
        if host not in LOCAL and api_key is None:
            print_once(
                f"warning: --host {host} without --api-key: anyone who can reach this address can "
                f"use the model"
            )
        _serve(cfg, api_key, bound, address(bound))


def check_libraries() -> None:
    """Raises UserError if the extra is not installed, transformers is too old, or there are several
    processes.
    """
    if missing := [name for name in EXTRA if find_spec(name) is None]:
        raise UserError(f"serve: {missing[0]} is not installed; pip install 'msattn[serve]'")
    from msattn.trainer.models.families import check_transformers

    check_transformers("serve")
    if num_ranks() > 1:
        raise UserError("serve: runs in one process; start it without torchrun")


def check_key(api_key: str | None) -> None:
    """Raises UserError for a key that cannot be sent in a header. The key is never printed."""
    if api_key is None:
        # an empty one, which the command line takes for none
        api_key = os.environ.get("MSATTN_API_KEY")
    if api_key is not None and not (
        api_key and api_key.isascii() and api_key.isprintable() and " " not in api_key
    ):
        raise UserError(
            "--api-key or MSATTN_API_KEY: expected printable ASCII characters without spaces, at "
            "least one"
        )


def _serve(cfg: ServeConfig, api_key: str | None, bound: socket.socket, where: str) -> None:
    from msattn.trainer import models
    from msattn.trainer.commands.answers import describe, find_served, tracked
    from msattn.trainer.models.chat import around_prompt
    from msattn.trainer.serving.attach import attach
    from msattn.trainer.serving.engines.http.cache_size import check_limits
    from msattn.trainer.serving.engines.http.engine import check_served

    served = None if cfg.dense else find_served(cfg, check_served)
    options = {"device": cfg.device, "dtype": cfg.dtype, "seed": cfg.seed}
    described = served.model if served else models.describe(cfg.model, **options, dense=True)
    # the chat template renders a message, within limits of time and memory
    around_prompt(described.tokenizer, None)
    check_limits(described.config, cfg.server)
    loaded = described.load()
    attached = nullcontext() if served is None else attach(loaded.model, **served.options)
    with (
        report(lambda: ""),  # from here on, no lines about the elapsed time
        tracked(cfg, "serve", served) as tracker,
        attached as sparse,
        server(loaded, cfg, sparse, api_key, tracker) as (engine, supervisor),
    ):
        bound.listen(WAITING_CONNECTIONS)
        pages = f"{engine.pages().total} pages of {cfg.server.page_size} tokens"
        how = f"{cfg.model.name}: dense" if served is None else describe(cfg, served)
        print_once(
            f"serving at {where}/v1, {pages}, requests of up to {engine.longest} tokens. {how}"
        )
        with _log_to_stderr():
            supervisor.run(bound)


@contextmanager
def server(
    loaded: "Loaded",
    cfg: ServeConfig,
    sparse: "Sparse | None" = None,
    api_key: str | None = None,
    tracker: "Tracker | None" = None,
) -> "Iterator[tuple[Engine, Supervisor]]":
    """Starts the engine of a loaded model (``sparse`` None: dense), and yields it with a supervisor
    that has yet to run.
    """
    from msattn.trainer.serving.engines.http.app import Service
    from msattn.trainer.serving.engines.http.engine import Engine
    from msattn.trainer.serving.engines.http.metrics import logged
    from msattn.trainer.serving.engines.http.supervisor import Supervisor

    engine = Engine(loaded, cfg, sparse)
    engine.start()
    try:
        service = Service(engine, cfg)
        with logged(service.metrics, tracker):
            yield engine, Supervisor(service.app(api_key), engine, drain_s=cfg.server.drain_s)
    finally:
        engine.stop()


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("msattn: %(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    log = logging.getLogger("msattn.serve")
    log.addHandler(handler)
    log.propagate = False
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = True
