"""Requests on transformers' continuous batching: submission, delivery of tokens, cancellation."""

import asyncio
import itertools
import logging
import queue
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from msattn.trainer.config import ServeConfig
from msattn.trainer.errors import Fault, UserError, first_line
from msattn.trainer.models.ends import end_tokens
from msattn.trainer.models.families import text_config
from msattn.trainer.models.loading import Loaded
from msattn.trainer.serving.engines.generate_batch import unbatched, unpaged_layers
from msattn.trainer.serving.engines.http.answers import ApiError, Logprobs
from msattn.trainer.serving.engines.http.bodies import Body
from msattn.trainer.serving.engines.http.cache_size import (
    longest_request,
    paged_cache_config,
    pages_of,
    too_small,
)
from msattn.trainer.serving.engines.http.grammar import Grammars
from msattn.trainer.serving.engines.http.sampling import Sampler, Sampling
from msattn.trainer.serving.engines.http.text import AnswerText

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.generation.continuous_batching.requests import GenerationOutput

    from msattn.trainer.serving.attend import Sparse

FAILED = ApiError(500, "the server failed while generating the answer")
STOPPED = ApiError(
    503, "the server is shutting down; the answer is not complete", code="unavailable"
)
NO_WAY_ON = ApiError(
    400,
    "response_format: no token can continue the answer under this schema",
    param="response_format",
)
STOP_SECONDS = 10.0  # for the model's current pass when the manager is stopped


class Pages(NamedTuple):
    """Pages of the cache: in use by requests, kept for prompts that begin with the same tokens, and
    all of them.
    """

    used: int
    cached: int
    total: int


class Piece(NamedTuple):
    """A part of an answer: text and log-probabilities, whose tokens need not match the text
    exactly.
    """

    text: str
    logprobs: list[Logprobs]


class Generation:
    """A request that the manager runs; all methods belong to the event loop.

    Puts itself into ``arrived`` with each piece of its text up to a stop string, with an error, and
    with None at its end. The answers to one request share this queue. Its end does not depend on
    when the queue is read.
    """

    def __init__(
        self,
        engine: "Engine",
        name: str,
        prompt_tokens: int,
        sampling: Sampling,
        arrived: "Arrived",
    ) -> None:
        self.name, self.prompt_tokens, self.tokens = name, prompt_tokens, list[int]()
        self.sampling, self._text = sampling, AnswerText(engine.loaded.tokenizer, sampling.stop)
        self.outcome: str | None = None  # stop, length, failed or cancelled; None while it runs
        self.started = time.monotonic()
        self.first_token: float | None = None
        self.ended: float | None = None
        self._engine, self._arrived = engine, arrived

    def deliver(self, output: "GenerationOutput") -> None:
        """Takes what the manager has generated."""
        if self.outcome is not None:
            return
        try:
            self._take(output)
        except (
            Exception
        ) as error:  # a fault of this server, which is raised where the answer is written
            self.fail(error, "failed")

    def _take(self, output: "GenerationOutput") -> None:
        known, running = len(self.tokens), not output.is_finished()
        # [] if none are asked for
        new, logprobs = output.generated_tokens[known:], cast("Any", output.logprobs)[known:]
        piece, ends = Piece("", []), False
        for token, logprob in zip_longest(new, logprobs):
            self.first_token = self.first_token or time.monotonic()
            self.tokens.append(token)
            ends = token in self.sampling.ends
            if not ends:
                piece = Piece(
                    piece.text + self._text.push(token),
                    piece.logprobs + [logprob] * (logprob is not None),
                )
            if self._text.stopped:
                break
        if not running:
            piece = piece._replace(text=piece.text + self._text.finish())
        if any(piece):
            self._arrived.put_nowait((self, piece))
        if output.error is not None:
            self.fail(FAILED, "failed", running=False)
        elif not running and self.sampling.grammar is not None and self.sampling.grammar.failed:
            self.fail(NO_WAY_ON, "failed", running=False)
        elif self._text.stopped or not running:
            self.end("stop" if self._text.stopped or ends else "length", running=running)

    def fail(self, error: Exception, outcome: str, *, running: bool = True) -> None:
        """Ends the request with an error."""
        if self.outcome is None:
            self._arrived.put_nowait((self, error))
            self.end(outcome, running=running)

    def end(self, outcome: str, *, running: bool = True) -> None:
        """Ends the request; a second call has no effect. If it is ``running`` in the manager, the
        next pass frees its pages.
        """
        if self.outcome is None:
            self.outcome, self.ended = outcome, time.monotonic()
            self._arrived.put_nowait((self, None))
            self._engine.close(self, running=running)


Arrived = asyncio.Queue[tuple[Generation, Piece | Exception | None]]


def usage_of(generations: list[Generation]) -> dict[str, int]:
    """Returns the numbers of tokens of a request's answers, as OpenAI's API counts them."""
    prompt, new = generations[0].prompt_tokens, sum(len(each.tokens) for each in generations)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class Engine:
    """A model, attached or dense, with its manager, whose thread runs between :meth:`start` and
    :meth:`stop`.
    """

    def __init__(self, loaded: Loaded, cfg: ServeConfig, sparse: "Sparse | None" = None) -> None:
        self.loaded, self.sparse, self._cfg = loaded, sparse, cfg
        self.longest = longest_request(loaded.config, cfg.server)
        self.draining = False  # no new request is accepted
        self._open: dict[str, Generation] = {}
        self._arriving = 0  # requests without a Generation, whose prompt is encoded
        self._names = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lost: BaseException | None = None
        own: Any = loaded.model.generation_config
        sampled = own is not None and own.do_sample
        self._temperature, self._top_p = (
            (own.temperature or 1, own.top_p or 1) if sampled else (1, 1)
        )
        self._seeds = random.Random(cfg.seed)  # seeds for requests without one
        self._manager = self._create_manager()
        vocabulary = text_config(loaded.model.config).vocab_size
        self._sampler = self._manager.logit_processor = Sampler(
            cfg.server.max_running, vocabulary, loaded.model.device
        )
        self._grammars = Grammars(loaded.tokenizer, vocabulary, self.ends)

    def _create_manager(self) -> Any:
        from transformers import GenerationConfig

        model: Any = self.loaded.model
        # Errors of the manager's thread are reported once, by the server.
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
        self.ends = end_tokens(model)
        generation = GenerationConfig(do_sample=False, eos_token_id=self.ends or -1)
        config = paged_cache_config(model, self._cfg.server, self.sparse)
        with _served(model, self.sparse):
            return model.init_continuous_batching(
                generation_config=generation, continuous_batching_config=config
            )

    def start(self) -> None:
        """Allocates the cache, captures CUDA graphs where the manager uses them, and starts its
        thread.

        Raises UserError if memory is too small for the cache, or its layers are of a kind that the
        manager does not serve.
        """
        server, model = self._cfg.server, self.loaded.model
        try:
            with _served(model, self.sparse):
                self._manager.warmup()
        except MemoryError as error:
            raise UserError(
                f"memory is too small for the KV cache ({first_line(error)}); lower server.pages "
                f"or server.batch_tokens, "
                "or leave out server.pages"
            ) from error
        batches = self._manager.batch_processor.inputs_and_outputs
        batches.prepare_batch_update = partial(self._sampler.collect, batches.prepare_batch_update)
        if self._cache.num_blocks < pages_of(self.longest, server):
            raise too_small(model, server, self._cache.num_sectors * self._cache.bytes_per_sector)
        self._other_threads, threading.excepthook = threading.excepthook, self._on_lost_thread
        self._manager.start()

    def stop(self) -> None:
        """Stops the manager's thread after the pass of the model that runs."""
        self._manager.stop(block=True, timeout=STOP_SECONDS, hard_stop=True)
        threading.excepthook = self._other_threads

    def _on_lost_thread(self, lost: threading.ExceptHookArgs) -> None:
        """Records what ended the manager's thread. The manager itself records only subclasses of
        Exception.
        """
        if lost.thread is self._manager._generation_thread:
            self._lost = lost.exc_value
        else:
            self._other_threads(lost)

    @property
    def fault(self) -> Fault | None:
        """The reason why the manager's thread has ended; None while it runs."""
        error = self._manager.background_thread_status.fatal_error or self._lost
        if error is not None:
            return Fault(
                f"the thread that generates has ended ({type(error).__name__}: {first_line(error)})"
            )
        return None if self._manager.is_running() else Fault("the thread that generates has ended")

    @property
    def running(self) -> int:
        """The number of requests with a first token."""
        return sum(each.first_token is not None for each in list(self._open.values()))

    @property
    def waiting(self) -> int:
        """The number of submitted requests without a token."""
        return sum(each.first_token is None for each in list(self._open.values()))

    @contextmanager
    def arrival(self) -> Iterator[None]:
        """Reserves a place in the queue for a request that is read in the block; ApiError if the
        queue is full.
        """
        self._check_runs()
        self.check_places(1)
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    def check_places(self, more: int) -> None:
        """Raises ApiError if the queue of waiting answers has no room for ``more``."""
        most = self._cfg.server.max_waiting
        if self._arriving + self.waiting + more > most:
            raise ApiError(
                429, f"{most} requests are waiting already; try again later", code="queue_full"
            )

    def _check_runs(self) -> None:
        """Raises ApiError if the server stops or has failed."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="unavailable")
        if self.fault is not None:
            raise ApiError(503, "the server has failed and is shutting down", code="unavailable")

    def samplings(self, body: Body) -> list[Sampling]:
        """Returns the parameters of each answer that a request asks for; ApiError for a grammar
        that is not valid.

        ``temperature`` and ``top_p`` are by default those of the model's generation_config.json if
        it samples, otherwise 1.
        """
        for name, tokens in (
            ("logit_bias", body.logit_bias or ()),
            ("stop_token_ids", body.stop_token_ids or ()),
        ):
            if unknown := next(
                (token for token in tokens if token >= self._sampler.vocabulary), None
            ):
                message = (
                    f"{name}: token {unknown} is outside the vocabulary "
                    f"({self._sampler.vocabulary} tokens)"
                )
                raise ApiError(400, message, param=name)
        seed = self._seeds.getrandbits(64) if body.seed is None else body.seed
        return [
            Sampling(
                f"{seed} {number}",
                temperature=self._temperature if body.temperature is None else body.temperature,
                top_p=self._top_p if body.top_p is None else body.top_p,
                top_k=max(body.top_k or 0, 0),
                min_p=body.min_p or 0.0,
                presence_penalty=body.presence_penalty or 0.0,
                frequency_penalty=body.frequency_penalty or 0.0,
                logit_bias=body.logit_bias or {},
                grammar=None
                if body.schema_of_answer is None
                else self._grammars.of_schema(body.schema_of_answer),
                logprobs=body.number_of_logprobs,
                stop=body.stop,
                ends={*(() if body.ignore_eos else self.ends), *(body.stop_token_ids or ())},
            )
            for number in range(body.n or 1)
        ]

    def submit(
        self, prompt: list[int], max_tokens: int, sampling: Sampling, arrived: Arrived
    ) -> Generation:
        """Begins an answer, which goes to the queue ``arrived``; ApiError if the server stops or
        has failed.
        """
        self._check_runs()
        self._loop = asyncio.get_running_loop()
        generation = Generation(
            self, f"request-{next(self._names)}", len(prompt), sampling, arrived
        )
        self._open[generation.name] = generation
        self._manager.register_result_handler(generation.name, generation.deliver)
        added = self._manager.add_request(
            prompt,
            request_id=generation.name,
            max_new_tokens=max_tokens,
            streaming=True,
            eos_token_id=sorted(sampling.ends) or -1,
            sampling=sampling,
        )
        if added is None:  # the thread has ended since the check
            generation.end("failed")
            raise ApiError(503, "the server has failed and is shutting down", code="unavailable")
        return generation

    def close(self, generation: Generation, *, running: bool) -> None:
        """Forgets a request that has ended, and cancels it if it is ``running`` in the manager."""
        del self._open[generation.name]
        # the manager forgets the handlers of requests that it finished, but not of those that are
        # cancelled
        if running:
            self._manager.output_router.result_handlers.pop(generation.name, None)
            self._manager.cancel_request(generation.name)

    def fail_all(self) -> None:
        """Ends all requests, after a fault or because the server stops; may be called from any
        thread.
        """
        reason = (STOPPED, "cancelled") if self.fault is None else (FAILED, "failed")
        for generation in list(self._open.values()):
            cast("Any", self._loop).call_soon_threadsafe(generation.fail, *reason)

    def tend(self) -> None:
        """Cleans up after cancelled requests, which the manager of transformers 5.23 does not; to
        be called regularly.

        When memory is short, it begins no request until a running one finishes. If the last one is
        cancelled instead, it would never begin another. And until its next pass, a cancelled
        request adds tokens to a queue that nobody reads.
        """
        scheduler = self._manager.batch_processor.scheduler
        if scheduler.block_new_requests and not scheduler.active_requests:
            scheduler.block_new_requests = False
        with suppress(queue.Empty):
            while True:
                self._manager.output_router.output_queue.get_nowait()

    @property
    def _cache(self) -> Any:
        return self._manager.batch_processor.cache

    def pages(self) -> Pages:
        """Returns how much of the cache is used."""
        cache = self._cache
        allocators = list(cache.cache_allocators.values())
        total = cache.num_sectors * cache.bytes_per_sector
        kept = sum(len(each.ledger.cached_blocks) * each.bytes_per_block for each in allocators)
        used = total - cache.compute_free_capacity(relative=False) - kept
        used, kept = (round(cache.num_blocks * part / total) for part in (used, kept))
        return Pages(used, kept, cache.num_blocks)

    def attention_stats(self) -> dict[str, float]:
        """Returns ``sparsity`` and ``selectivity`` as far as there are any, between two passes of
        the model.
        """
        if self.sparse is None:
            return {}
        with suppress(RuntimeError):  # the thread has ended
            with self._manager.pause():
                stats = self.sparse.stats()
            return {
                name: stats[name] for name in ("sparsity", "selectivity") if stats[name] is not None
            }
        return {}


def check_served(config: "PreTrainedConfig") -> None:
    """Raises the UserError of :class:`Engine` for layers that cannot be sparse over pages, before
    weights are read.
    """
    config = config.get_text_config()
    if reason := unpaged_layers(config):
        raise _refusal(config, reason, attached=True)


@contextmanager
def _served(model: "PreTrainedModel", sparse: "Sparse | None") -> Iterator[None]:
    """Raises a UserError with a remedy for a model that continuous batching does not serve, as it
    is or as it is attached.
    """
    config = model.config.get_text_config()
    capped, reason = getattr(config, "attn_logit_softcapping", None), None
    if sparse is not None:
        reason = unbatched(model, sparse)
    elif capped:  # transformers 5.23 would leave it out
        reason = f"attn_logit_softcapping={capped} is not supported"
    if reason is not None:
        raise _refusal(config, reason, attached=sparse is not None)
    try:
        yield
    except UserError:
        raise
    except (ValueError, AttributeError) as error:
        raise _refusal(config, first_line(error), attached=sparse is not None) from error


def _refusal(config: "PreTrainedConfig", reason: str, *, attached: bool) -> UserError:
    """Returns the error with a remedy."""
    never = {"chunked_attention", "linear_attention"} & {
        *(getattr(config, "layer_types", None) or ())
    }
    remedy = (
        "use msattn generate"
        if not attached or never or getattr(config, "attn_logit_softcapping", None)
        else "give dense=true, or use msattn generate"
    )
    return UserError(f"serve: continuous batching does not serve this model ({reason}); {remedy}")
