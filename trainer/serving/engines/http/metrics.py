"""Metrics in the text form of Prometheus, and in a tracker. Needs the extra ``serve``."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from msattn.trainer.serving.engines.http.engine import Engine, Generation
from msattn.trainer.training.tracker import Tracker

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)  # upper ends of the histograms' buckets
LOG_SECONDS = 10.0  # between two logs to a tracker
END_SECONDS = 5.0  # time limit of the last reading, which waits for the model's pass
# what the model has read is cached for this time: asking for it delays the next pass
STATS_SECONDS = 1.0
STATS = {
    "sparsity": "Share of the causally visible blocks that prompts did not read, since startup",
    "selectivity": "Share of the visible keys that new tokens read in routed layers, since startup",
}


class Metrics:
    """Counts requests, and reads the state of the engine whenever the metrics are read."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock, self._stats, self._stats_end = threading.Lock(), dict[str, float](), 0.0
        self._registry = CollectorRegistry()
        kept: Any = {"registry": self._registry}
        self._requests = Counter("msattn_requests", "Requests by outcome", ["outcome"], **kept)
        self._prompt_tokens = Counter(
            "msattn_prompt_tokens", "Prompt tokens of finished requests", **kept
        )
        self._generated_tokens = Counter(
            "msattn_generated_tokens", "New tokens of finished requests", **kept
        )
        first = "Seconds from a request's entry into the queue to its first token"
        self._first_token = Histogram(
            "msattn_time_to_first_token_seconds", first, buckets=SECONDS, **kept
        )
        self._duration = Histogram(
            "msattn_request_duration_seconds", "Seconds of a request", buckets=SECONDS, **kept
        )
        self._registry.register(self)  # pyrefly: ignore[bad-argument-type]

    def refused(self) -> None:
        """Counts a request that is answered with an error before it begins."""
        self._requests.labels("refused").inc()

    def ended(self, generation: Generation) -> None:
        """Counts a request that began."""
        self._requests.labels(generation.outcome).inc()
        self._prompt_tokens.inc(generation.prompt_tokens)
        self._generated_tokens.inc(len(generation.tokens))
        if generation.first_token is not None:
            self._first_token.observe(generation.first_token - generation.started)
        if generation.ended is not None:
            self._duration.observe(generation.ended - generation.started)

    def collect(self) -> Iterator[Any]:
        """Yields the state of the engine, for the registry."""
        pages = self._engine.pages()
        state = {
            "requests_running": ("Unfinished requests with a first token", self._engine.running),
            "requests_waiting": ("Submitted requests without a first token", self._engine.waiting),
            "cache_pages_used": ("Pages of the KV cache that requests use", pages.used),
            "cache_pages_cached": (
                "Unused pages that are kept for prompts with the same prefix",
                pages.cached,
            ),
            "cache_pages_total": ("Pages of the KV cache", pages.total),
            **{name: (STATS[name], value) for name, value in self._latest_stats().items()},
        }
        for name, (meaning, value) in state.items():
            yield GaugeMetricFamily(f"msattn_{name}", meaning, value=value)

    def _latest_stats(self) -> dict[str, float]:
        with self._lock:  # readers that come meanwhile get the same
            if time.monotonic() >= self._stats_end:
                self._stats = self._engine.attention_stats()
                self._stats_end = time.monotonic() + STATS_SECONDS
            return self._stats

    def describe(self) -> list[Any]:
        """Returns no descriptions, so that registering this collector does not collect values."""
        return []

    def text(self) -> bytes:
        """Returns all metrics. It waits for the pass of the model that runs."""
        return generate_latest(self._registry)

    def figures(self) -> dict[str, float]:
        """Returns the metrics as numbers for a tracker, with the means of the histograms. It waits
        for the pass that runs.
        """
        samples = [sample for family in self._registry.collect() for sample in family.samples]
        figures = {
            "/".join((sample.name.removeprefix("msattn_"), *sample.labels.values())): sample.value
            for sample in samples
            if not sample.name.endswith(("_bucket", "_created"))
        }
        for name in [name.removesuffix("_sum") for name in figures if name.endswith("_sum")]:
            total, count = figures.pop(f"{name}_sum"), figures.pop(f"{name}_count")
            if count:
                figures[f"{name}_mean"] = total / count
        return figures


@contextmanager
def logged(metrics: Metrics, tracker: Tracker | None) -> Iterator[None]:
    """Logs ``metrics`` every :data:`LOG_SECONDS` in which they change, and at the end. Does nothing
    without a tracker.
    """
    if tracker is None:
        yield
        return
    ended = threading.Event()

    def log_changes() -> None:
        step, last, is_end = 0, {}, False
        while not is_end:
            is_end = ended.wait(LOG_SECONDS)
            if (figures := metrics.figures()) != last:
                tracker.log(figures, step)
                step, last = step + 1, figures

    thread = threading.Thread(target=log_changes, name="msattn-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(END_SECONDS)
