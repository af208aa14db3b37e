"""The routes of the server, as an ASGI application. Needs the extra ``serve``."""

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from copy import deepcopy
from functools import cache, partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from msattn.trainer.config import ServeConfig
from msattn.trainer.config.values import shown
from msattn.trainer.errors import first_line
from msattn.trainer.models.families import text_config
from msattn.trainer.serving.engines.http.answers import AnswerForm, ApiError, Logprobs, event
from msattn.trainer.serving.engines.http.bodies import Body, ChatBody, CompletionBody, read_body
from msattn.trainer.serving.engines.http.connections import Few
from msattn.trainer.serving.engines.http.engine import Arrived, Engine, Generation, Piece, usage_of
from msattn.trainer.serving.engines.http.metrics import Metrics
from msattn.trainer.serving.engines.http.text import PromptEncoder, token_text

LOG = logging.getLogger("msattn.serve")
BODY_SECONDS = 60  # for a body to arrive
# bodies of the greatest size; all that arrive or wait to be encoded may have so many bytes together
WAITING_BODIES = 4
SHORT_BODY = 2**14  # bytes; bodies up to this size are read beyond that limit
LONG_BODY = 2**16  # bytes; longer bodies are encoded apart from shorter ones
OPEN = ("/health",)  # paths that need no key
# paths that are asked for again and again, without a line in the log
QUIET = ("/health", "/metrics")
LINES = 100  # in the log in a minute, of requests that the model does not answer


class Service:
    """The routes, which answer requests with one engine."""

    def __init__(self, engine: Engine, cfg: ServeConfig) -> None:
        self.metrics = Metrics(engine)
        self._engine = engine
        self._model = cfg.model.name
        self._max_body = int(cfg.server.max_body_mb * 2**20)
        self._about = {
            "id": self._model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "msattn",
        }
        self._held = 0  # bytes of bodies
        vocabulary = text_config(engine.loaded.model.config).vocab_size

        def encoder(tokenizer: Any) -> tuple[asyncio.Lock, PromptEncoder]:
            encode = PromptEncoder(
                tokenizer,
                longest=engine.longest,
                vocabulary=vocabulary,
                new_tokens=cfg.max_new_tokens,
            )
            return asyncio.Lock(), encode  # tokenizers are not for several threads at once

        # short, long bodies
        self._encoders = (
            encoder(engine.loaded.tokenizer),
            encoder(deepcopy(engine.loaded.tokenizer)),
        )

    def app(self, api_key: str | None) -> "Guard":
        """Returns the routes as an application that asks for a key, in which each error is an
        object of OpenAI's form.
        """
        app = Starlette(
            routes=[
                Route(
                    "/v1/completions", partial(self.complete, kind=CompletionBody), methods=["POST"]
                ),
                Route(
                    "/v1/chat/completions", partial(self.complete, kind=ChatBody), methods=["POST"]
                ),
                Route("/v1/models", self.list_models),
                Route("/v1/models/{name:path}", self.show_model),
                Route("/health", self.show_health),
                Route("/metrics", self.show_metrics),
            ],
            exception_handlers={ApiError: _refuse, HTTPException: _refuse_path, Exception: _fail},
        )
        app.router.redirect_slashes = False  # redirects would go to a host that the client names
        return Guard(app, self.metrics, api_key)

    async def list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._about]})

    async def show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._model:
            raise ApiError(
                404,
                f"{shown(name)}: no such model; this server has {self._model}",
                code="model_not_found",
            )
        return JSONResponse(self._about)

    async def show_health(self, request: Request) -> Response:
        """Answers 200 while requests are accepted."""
        state = (
            "failed"
            if self._engine.fault is not None
            else "draining"
            if self._engine.draining
            else "ok"
        )
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    async def show_metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(self.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def complete(self, request: Request, kind: type[Body]) -> Response:
        """Answers a completion request, at once or as a stream; raises ApiError only before the
        stream begins.
        """
        data = bytearray()
        try:
            await self._receive(request, data)
            # the event loop keeps weak references alone
            gone = request.state.gone = asyncio.create_task(_until_gone(request))
            lock, encoder = self._encoders[len(data) > LONG_BODY]
            with self._engine.arrival():
                async with lock:
                    if gone.done():
                        raise ApiError(400, "the client disconnected before its prompt was encoded")
                    body = await asyncio.to_thread(
                        read_body, data, kind, self._model, self._engine.longest
                    )
                    prompt, new_tokens = await asyncio.to_thread(encoder.encode, body)
                    samplings = await asyncio.to_thread(self._engine.samplings, body)
                self._engine.check_places(len(samplings) - 1)
                generations, arrived = list[Generation](), Arrived()
                request.state.generations = generations
                for sampling in samplings:
                    generations.append(self._engine.submit(prompt, new_tokens, sampling, arrived))
        finally:
            self._held -= len(data)
        # without effect after their end
        gone.add_done_callback(lambda _: [each.end("cancelled") for each in generations])
        tokenizer = self._engine.loaded.tokenizer
        form = AnswerForm(self._model, cache(partial(token_text, tokenizer)), chat=kind is ChatBody)
        pieces = _pieces(generations, arrived)
        if body.stream:
            return StreamingResponse(
                self._events(form, body, generations, pieces), media_type="text/event-stream"
            )
        texts = [list[str]() for _ in generations]
        logprobs = [list[Logprobs]() for _ in generations]
        async for number, piece in pieces:
            if piece is not None:
                texts[number].append(piece.text)
                logprobs[number] += piece.logprobs
        outcomes = [str(each.outcome) for each in generations]
        whole = zip(map("".join, texts), logprobs, outcomes, strict=True)
        return JSONResponse(form.whole(whole, usage_of(generations)))

    async def _receive(self, request: Request, body: bytearray) -> None:
        """Reads the body of a request into ``body`` and counts its bytes among those held.

        Raises ApiError if the header does not say JSON, if the body is too large, too slow or
        incomplete, or if other requests hold too many bytes.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # browsers send other types from any page without asking the server
        if kind != "application/json":
            raise ApiError(415, f"Content-Type: {shown(kind)}: expected application/json")
        too_large = ApiError(
            413,
            f"the body exceeds {self._max_body} bytes (server.max_body_mb)",
            code="body_too_large",
        )
        # the HTTP parser has checked the number
        if int(request.headers.get("content-length", "0")) > self._max_body:
            raise too_large
        try:
            async with asyncio.timeout(BODY_SECONDS), aclosing(request.stream()) as parts:
                async for part in parts:
                    body += part
                    self._held += len(part)
                    if len(body) > self._max_body:
                        raise too_large
                    if len(body) > SHORT_BODY and self._held > WAITING_BODIES * self._max_body:
                        raise ApiError(
                            503,
                            "the server already holds too many bytes of requests; try again later",
                            code="unavailable",
                        )
        except ClientDisconnect as error:
            raise ApiError(400, "the client disconnected before its body was complete") from error
        except TimeoutError as error:
            raise ApiError(408, f"the body has not arrived within {BODY_SECONDS} s") from error

    async def _events(
        self,
        form: AnswerForm,
        body: Body,
        generations: list[Generation],
        pieces: AsyncIterator[tuple[int, Piece | None]],
    ) -> AsyncIterator[bytes]:
        """Yields the events of a stream. A failure is also an event, because the status was already
        sent.
        """
        try:
            for number in range(len(generations) if isinstance(body, ChatBody) else 0):
                yield event(form.piece(number, None))
            async for number, piece in pieces:
                if piece is None:
                    yield event(form.piece(number, None, reason=str(generations[number].outcome)))
                else:
                    yield event(form.piece(number, *piece))
            if body.include_usage:
                yield event(form.usage(usage_of(generations)))
            yield event("[DONE]")
        except ApiError as error:
            yield event(error.body)


async def _pieces(
    generations: list[Generation], arrived: Arrived
) -> AsyncIterator[tuple[int, Piece | None]]:
    """Yields the pieces of all answers, each with the number of its answer; None ends an answer."""
    running = len(generations)
    while running:
        generation, item = await arrived.get()
        if isinstance(item, Exception):
            raise item
        running -= item is None
        yield generations.index(generation), item


async def _until_gone(request: Request) -> None:
    """Returns when the client has disconnected, or its answer is sent."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refuse(request: Request, error: Any) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def _refuse_path(request: Request, error: Any) -> Response:
    problem = ApiError(
        error.status_code, f"{request.method} {shown(request.url.path)}: {error.detail}"
    )
    return JSONResponse(problem.body, error.status_code, error.headers)


async def _fail(request: Request, error: Exception) -> Response:
    """Answers after a fault of this server, without details; it is raised once more, and logged by
    Guard.
    """
    return await _refuse(request, ApiError(500, "the server failed"))


class Guard:
    """Checks the key of each request (None accepts all), counts it, and writes its line to the
    log.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, api_key: str | None) -> None:
        self._app, self._metrics, self._api_key = app, metrics, api_key
        self._may_log = Few(LINES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.monotonic(), 0
        where = f"{shown(scope['method'])} {shown(scope['path'])}"

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if scope["path"] in OPEN or self._is_authorized(scope):
                await self._app(scope, receive, note)
            else:
                message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
                error = ApiError(401, message, code="invalid_api_key")
                await JSONResponse(error.body, error.status)(scope, receive, note)
        except Exception as error:  # a fault of this server, which has been answered
            LOG.error("%s: %s: %s", where, type(error).__name__, first_line(error))
        finally:
            about = self._count(scope, status)
            if about or (scope["path"] not in QUIET and self._may_log()):
                LOG.info(
                    "%s %s, %.3f s%s",
                    where,
                    status or "disconnected",
                    time.monotonic() - began,
                    about,
                )

    def _is_authorized(self, scope: Scope) -> bool:
        if self._api_key is None:
            return True
        scheme, _, token = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return (
            hmac.compare_digest(token.strip(), self._api_key.encode())
            and scheme.lower() == b"bearer"
        )

    def _count(self, scope: Scope, status: int) -> str:
        """Counts a request that has been answered, and returns its numbers for the log."""
        generations: list[Generation] = scope.get("state", {}).get("generations", [])
        if not generations:
            if status >= 400 and scope["method"] == "POST":
                self._metrics.refused()
            return ""
        for generation in generations:
            generation.end("cancelled")  # without effect unless the answer was cut short
            self._metrics.ended(generation)
        times = [
            each.first_token - each.started for each in generations if each.first_token is not None
        ]
        first = f"{min(times):.3f} s" if times else "none"
        outcomes = ", ".join(dict.fromkeys(str(each.outcome) for each in generations))
        new = sum(len(each.tokens) for each in generations)
        return f", {generations[0].prompt_tokens} + {new} tokens, first {first}, {outcomes}"
