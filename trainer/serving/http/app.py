"""The routes of the server, as an ASGI application."""

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from msattn.trainer.config.values import shown
from msattn.trainer.errors import first_line
from msattn.trainer.models.families import text_config
from msattn.trainer.serving.http.answers import AnswerForm, event, usage
from msattn.trainer.serving.http.bodies import Call, read_call
from msattn.trainer.serving.http.engine import Engine, Generation, Sampling
from msattn.trainer.serving.http.errors import ApiError
from msattn.trainer.serving.http.metrics import Metrics
from msattn.trainer.serving.http.prompts import PromptEncoder
from msattn.trainer.serving.http.text import StopStrings, TokenText

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

LOG = logging.getLogger("msattn.serve")
BODY_SECONDS = 60  # for a body to arrive
OPEN = ("/health",)  # paths that need no key
QUIET = ("/health", "/metrics")  # paths that are asked for again and again, without a line in the log
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Service:
    """Answers requests with one engine.

    Parameters
    ----------
    model : the name under which the model is served.
    default_tokens : new tokens of a request that does not give a number.
    max_body : bytes of a request.
    """

    def __init__(self, engine: Engine, *, model: str, default_tokens: int, max_body: int) -> None:
        self.engine, self.model, self.metrics = engine, model, Metrics(engine)
        self._default_tokens, self._max_body = default_tokens, max_body
        self._created = int(time.time())
        loaded = engine.loaded
        vocabulary = text_config(loaded.model.config).vocab_size
        self._encoder = PromptEncoder(loaded.tokenizer, longest=engine.longest, vocabulary=vocabulary)
        self._encoding = ThreadPoolExecutor(1, "msattn-tokenizer")  # tokenizers are not for several threads at once
        self._watchers: set[asyncio.Task[None]] = set()

    async def complete(self, request: "Request", *, chat: bool) -> "Response":
        """Answers a request for a completion, at once or as a stream.

        Raises
        ------
        ApiError : the request is refused, or failed before its stream began.
        """
        from fastapi.responses import JSONResponse, StreamingResponse

        with self.engine.arrival():
            data, loop = await self._body(request), asyncio.get_running_loop()
            call, prompt, max_tokens = await loop.run_in_executor(self._encoding, self._read, data, chat)
            generation = self.engine.submit(prompt, max_tokens, self._sampling(call))
        request.state.generation = generation
        watcher = asyncio.create_task(_end_with_client(request, generation))
        self._watchers.add(watcher)  # the event loop keeps weak references alone
        watcher.add_done_callback(self._watchers.discard)
        form = AnswerForm(self.model, chat=chat)
        if call.stream:
            return StreamingResponse(self._events(form, call, generation), media_type="text/event-stream")
        text = "".join([piece async for piece in self._text(call, generation)])
        return JSONResponse(form.whole(text, str(generation.outcome), _usage(generation)))

    def _read(self, data: bytes, chat: bool) -> tuple[Call, list[int], int]:
        """Returns what a body asks for, its prompt as tokens, and the number of new ones."""
        call = read_call(data, chat=chat, model=self.model)
        return call, *self._encoder.encode(call.prompt, call.max_tokens, self._default_tokens)

    async def _body(self, request: "Request") -> bytes:
        """Returns the body of a request.

        Raises
        ------
        ApiError : it is no JSON by its header, too large, too slow or not complete.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # browsers send other types from any page without asking the server
            raise ApiError(415, f"Content-Type: {shown(kind)}: accepted is application/json")
        too_large = ApiError(413, f"the body exceeds {self._max_body} bytes (server.max_body_mb)", code="body_too_large")
        if int(request.headers.get("content-length", "0")) > self._max_body:  # the HTTP parser has checked the number
            raise too_large
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    part = await request.receive()
                    if part["type"] == "http.disconnect":
                        raise ApiError(400, "the client has left before its body was complete")
                    body += part.get("body", b"")
                    more = part.get("more_body", False)
                    if len(body) > self._max_body:
                        raise too_large
        except TimeoutError as error:
            raise ApiError(408, f"the body has not arrived within {BODY_SECONDS} s") from error
        return bytes(body)

    def _sampling(self, call: Call) -> Sampling:
        default = self.engine.default
        return Sampling(
            temperature=default.temperature if call.temperature is None else call.temperature,
            top_p=default.top_p if call.top_p is None else call.top_p,
        )

    async def _text(self, call: Call, generation: Generation) -> AsyncIterator[str]:
        """Yields the text of an answer piece by piece, up to a stop string, and ends the request."""
        text, stop = TokenText(self.engine.loaded.tokenizer), StopStrings(call.stop)
        try:
            async for tokens in generation.pieces():
                if piece := stop.push(text.push(tokens)):
                    yield piece
                if stop.found:
                    generation.end("stop")
                    return
            if piece := stop.push(text.push([], last=True), last=True):
                yield piece
        finally:
            generation.end("cancelled")

    async def _events(self, form: AnswerForm, call: Call, generation: Generation) -> AsyncIterator[bytes]:
        """Yields the events of a stream. A failure is an event, too, as the status is sent already."""
        try:
            if call.chat:
                yield event(form.piece(None))
            async for piece in self._text(call, generation):
                yield event(form.piece(piece))
            yield event(form.piece(None, str(generation.outcome)))
            if call.include_usage:
                yield event(form.usage(_usage(generation)))
            yield event("[DONE]")
        except ApiError as error:
            yield event(error.body)

    def models(self) -> list[dict[str, Any]]:
        """Returns the objects of the models: there is one."""
        return [{"id": self.model, "object": "model", "created": self._created, "owned_by": "msattn"}]

    def health(self) -> tuple[int, dict[str, str]]:
        """Returns the status and the object of ``/health``."""
        if self.engine.fault is not None:
            return 503, {"status": "failed"}
        return (503, {"status": "draining"}) if self.engine.draining else (200, {"status": "ok"})


def _usage(generation: Generation) -> dict[str, int]:
    return usage(generation.prompt_tokens, len(generation.tokens))


async def _end_with_client(request: "Request", generation: Generation) -> None:
    """Cancels a request when its client disconnects; returns when the answer is sent."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    generation.end("cancelled")


def build_app(service: Service) -> "FastAPI":
    """Returns the routes of ``service``."""
    from fastapi import FastAPI, HTTPException, Request, Response
    from fastapi.responses import JSONResponse

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> Response:  # which is raised once more, and logged by Guard
        return JSONResponse(ApiError(500, "the server failed").body, 500)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        problem = ApiError(error.status_code, f"{request.method} {shown(request.url.path)}: {error.detail}")
        return JSONResponse(problem.body, error.status_code, error.headers)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await service.complete(request, chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await service.complete(request, chat=True)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": service.models()})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        found = next((each for each in service.models() if each["id"] == name), None)
        if found is None:
            raise ApiError(404, f"{shown(name)}: no such model; this server has {service.model}", code="model_not_found")
        return JSONResponse(found)

    @app.get("/health")
    async def health() -> Response:
        status, body = service.health()
        return JSONResponse(body, status)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(service.metrics.text), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


class Guard:
    """Checks the key of each request, counts it, writes its line to the log, and answers what no route expects.

    Parameters
    ----------
    app : the application behind it.
    api_key : the key that requests must bring; None accepts all.
    """

    def __init__(self, app: Any, service: Service, api_key: str | None) -> None:
        self._app, self._service, self._api_key = app, service, api_key

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, status = time.monotonic(), 0

        async def note(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._answer(scope, receive, note)
        except Exception as error:  # a fault of this server; the client gets no details
            LOG.error("%s: %s: %s", _where(scope), type(error).__name__, first_line(error))
        finally:
            self._finish(scope, status, time.monotonic() - began)

    async def _answer(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN and not self._has_key(scope):
            problem = ApiError(
                401, "the API key is missing or wrong; send it as Authorization: Bearer KEY", code="invalid_api_key"
            )
            await _send_error(problem, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _has_key(self, scope: dict[str, Any]) -> bool:
        if self._api_key is None:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, b"Bearer " + self._api_key.encode())

    def _finish(self, scope: dict[str, Any], status: int, seconds: float) -> None:
        generation: Generation | None = scope.get("state", {}).get("generation")
        about = ""
        if generation is not None:
            generation.end("cancelled")  # without effect unless the answer was cut short
            self._service.metrics.ended(generation)
            first = "none" if generation.first_token is None else f"{generation.first_token - generation.started:.3f} s"
            about = f", {generation.prompt_tokens} + {len(generation.tokens)} tokens, first {first}, {generation.outcome}"
        elif status >= 400 and scope["method"] == "POST":
            self._service.metrics.refused()
        if scope["path"] not in QUIET:
            LOG.info("%s %s, %.3f s%s", _where(scope), status or "disconnected", seconds, about)


async def _send_error(error: ApiError, scope: dict[str, Any], receive: Receive, send: Send) -> None:
    from fastapi.responses import JSONResponse

    await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)


def _where(scope: dict[str, Any]) -> str:
    return f"{shown(scope['method'])} {shown(scope['path'])}"
