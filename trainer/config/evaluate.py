"""Configuration of the evaluation tasks."""

import os
from dataclasses import dataclass, field

from msattn.trainer.config.select import BASELINES, ROUTERS
from msattn.trainer.config.values import check, choices, require, within

TASKS = (
    "perplexity",
    "recall",
    "needle",
    "documents",
    "ruler",
    "harness",
    "prompts",
    "analysis",
    "latency",
    "decoding",
    "throughput",
)
RULER_TASKS = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"),
)
QUALITY = TASKS[:3]  # the default


@dataclass(frozen=True)
class PerplexityConfig:
    """Perplexity of ``num_chunks`` held-out chunks of ``length`` tokens, at each of ``sparsities``."""

    length: int = field(default=4096, metadata=within("[2, 1e9]"))
    num_chunks: int = field(default=16, metadata=within("[1, 1e6]"))
    sparsities: list[float] = field(default_factory=lambda: [0.5, 0.8, 0.9], metadata=within("[0, 1)"))

    def __post_init__(self) -> None:
        check(self, "eval.perplexity.")


@dataclass(frozen=True)
class RecallConfig:
    """Attention mass in the keys that are read, on ``num_chunks`` held-out chunks of ``length`` tokens.

    Block selections are measured at each of ``sparsities``, routing with each number of ``probes`` for ``num_queries`` decoding
    queries of a chunk, and query classifiers also at each share of the ``keys``. ``independent`` adds routing with separate
    probes for each query head; serving shares probes within a query group.
    """

    length: int = field(default=4096, metadata=within("[1, 1e9]"))
    num_chunks: int = field(default=2, metadata=within("[1, 1e6]"))
    num_queries: int = field(default=64, metadata=within("[1, 1e6]"))
    sparsities: list[float] = field(default_factory=lambda: [0.5, 0.8, 0.9], metadata=within("[0, 1)"))
    probes: list[int] = field(default_factory=lambda: [0, 1, 2, 4], metadata=within("[0, 1e6]"))
    keys: list[float] = field(default_factory=list, metadata=within("[0.001, 0.5]"))
    independent: bool = False

    def __post_init__(self) -> None:
        check(self, "eval.recall.")


@dataclass(frozen=True)
class NeedleConfig:
    """Retrieval of needles from text: ``samples`` prompts of each of ``lengths`` and ``depths``.

    ``haystack`` is a text file or folder (None: the held-out documents of ``data``). ``needles`` are hidden in a prompt and one
    of them is asked for. Block selections are measured at ``sparsities``, routing with ``probes``, and query classifiers also
    at shares of the ``keys``; ``independent`` adds routing with separate buckets for each query head. ``question`` is ``dense``
    or ``sparse``, the attention of the question's tokens in routing; the answer is always decoded with sparse attention.
    """

    lengths: list[int] = field(default_factory=lambda: [4096], metadata=within("[1, 1e9]"))
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0], metadata=within("[0, 1]"))
    samples: int = field(default=8, metadata=within("[1, 10000]"))
    needles: int = field(default=1, metadata=within("[1, 1000]"))
    haystack: str | None = None
    question: str = field(default="sparse", metadata=choices(("dense", "sparse")))
    sparsities: list[float] = field(default_factory=lambda: [0.8, 0.9], metadata=within("[0, 1)"))
    probes: list[int] = field(default_factory=lambda: [0, 1, 2, 4], metadata=within("[0, 1e6]"))
    keys: list[float] = field(default_factory=list, metadata=within("[0.001, 0.5]"))
    independent: bool = False

    def __post_init__(self) -> None:
        check(self, "eval.needle.")
        for key in ("lengths", "depths"):
            require(bool(getattr(self, key)), f"eval.needle.{key}", getattr(self, key), "one or more")


@dataclass(frozen=True)
class DocumentsConfig:
    """Perplexity of the first tokens of ``num_documents`` held-out documents, at each of ``lengths`` and ``sparsities``."""

    lengths: list[int] = field(default_factory=lambda: [4096], metadata=within("[2, 1e9]"))
    num_documents: int = field(default=16, metadata=within("[1, 1e6]"))
    sparsities: list[float] = field(default_factory=lambda: [0.5, 0.8, 0.9], metadata=within("[0, 1)"))

    def __post_init__(self) -> None:
        check(self, "eval.documents.")
        require(bool(self.lengths), "eval.documents.lengths", self.lengths, "one or more")


@dataclass(frozen=True)
class RulerConfig:
    """RULER's synthetic ``tasks``: ``samples`` prompts of each, of each of ``lengths`` with the tokens of the answer.

    ``haystack`` is a text file or folder (None: the held-out documents of ``data``). Prompts are answered together, in batches
    of up to ``batch_tokens`` tokens. Block selections are measured at ``sparsities``, routing with ``probes``, and query
    classifiers at shares of the ``keys``; ``independent`` adds routing with separate buckets for each query head.
    """

    lengths: list[int] = field(default_factory=lambda: [4096], metadata=within("[1, 1e9]"))
    tasks: list[str] = field(default_factory=lambda: list(RULER_TASKS), metadata=choices(RULER_TASKS))
    samples: int = field(default=20, metadata=within("[1, 10000]"))
    haystack: str | None = None
    batch_tokens: int = field(default=32768, metadata=within("[0, 1e9]"))
    sparsities: list[float] = field(default_factory=lambda: [0.8, 0.9], metadata=within("[0, 1)"))
    probes: list[int] = field(default_factory=lambda: [1, 2, 4], metadata=within("[0, 1e6]"))
    keys: list[float] = field(default_factory=list, metadata=within("[0.001, 0.5]"))
    independent: bool = False

    def __post_init__(self) -> None:
        check(self, "eval.ruler.")
        for key in ("lengths", "tasks"):
            require(bool(getattr(self, key)), f"eval.ruler.{key}", getattr(self, key), "one or more")


@dataclass(frozen=True)
class HarnessConfig:
    """``tasks`` of lm_eval, also of the YAML files in ``include_path``, with at most ``limit`` samples of each (None: all).

    Tasks that make their prompts, such as RULER's, make them of ``lengths`` tokens (none: the tasks' own lengths). Block
    selections are measured at ``sparsities``, routings with the number of probes that their artifacts record.
    """

    tasks: list[str] = field(default_factory=list)
    include_path: str | None = None
    lengths: list[int] = field(default_factory=list, metadata=within("[1, 1e9]"))
    limit: int | None = field(default=None, metadata=within("[1, 1e9]"))
    sparsities: list[float] = field(default_factory=lambda: [0.9], metadata=within("[0, 1)"))

    def __post_init__(self) -> None:
        check(self, "eval.harness.")

    def check_paths(self) -> None:
        """Raises UserError if there are no tasks, or no such folder."""
        require(bool(self.tasks), "eval.harness.tasks", self.tasks, "one or more tasks of lm_eval")
        found = self.include_path is None or os.path.isdir(os.path.expanduser(self.include_path))
        require(found, "eval.harness.include_path", self.include_path, "a folder with YAML files of tasks")


@dataclass(frozen=True)
class PromptsConfig:
    """The user's own prompts in the jsonl file ``path``, answered with up to ``max_new_tokens`` greedy tokens.

    Block selections are measured at ``sparsities``, routings with the number of probes that their artifacts record;
    ``independent`` adds routing with separate buckets for each query head.
    """

    path: str | None = None
    max_new_tokens: int = field(default=64, metadata=within("[1, 1e6]"))
    sparsities: list[float] = field(default_factory=lambda: [0.9], metadata=within("[0, 1)"))
    independent: bool = False

    def __post_init__(self) -> None:
        check(self, "eval.prompts.")


@dataclass(frozen=True)
class AnalysisConfig:
    """Queries, keys and attention mass of ``num_chunks`` held-out chunks of ``length`` tokens.

    Attributes
    ----------
    length, num_chunks : held-out chunks.
    num_queries : decoding queries of a chunk.
    layers : layers to measure (None: four, evenly spaced).
    heads : key/value heads to measure, with their query heads (None: all).
    buckets : numbers of buckets of further k-means partitions, fitted on training text (None: a quarter of the router's).
    """

    length: int = field(default=4096, metadata=within("[2, 1e9]"))
    num_chunks: int = field(default=4, metadata=within("[1, 1e6]"))
    num_queries: int = field(default=32, metadata=within("[1, 1e6]"))
    layers: list[int] | None = field(default=None, metadata=within("[0, 10000)"))
    heads: list[int] | None = field(default=None, metadata=within("[0, 10000)"))
    buckets: list[int] | None = field(default=None, metadata=within("[1, 1e6]"))

    def __post_init__(self) -> None:
        check(self, "eval.analysis.")
        for key in ("layers", "heads"):
            require(getattr(self, key) != [], f"eval.analysis.{key}", [], "one or more, or null")


@dataclass(frozen=True)
class LatencyConfig:
    """Time to the first token of prompts of ``lengths`` random tokens, dense and at each of ``sparsities``.

    After a warm-up prompt, prompts are measured for ``seconds``, at least one. One setting of each method is also measured on
    prompts of at least ``2 * chunk`` tokens in passes of ``chunk`` tokens, and on the last ``turn`` tokens of prompts of at
    least ``2 * turn`` tokens, after cached ones. None leaves these out.
    """

    lengths: list[int] = field(default_factory=lambda: [1024, 4096], metadata=within("[1, 1e9]"))
    sparsities: list[float] = field(default_factory=lambda: [0.5, 0.8, 0.9, 0.95], metadata=within("[0, 1)"))
    seconds: float = field(default=1.0, metadata=within("(0, 600]"))
    chunk: int | None = field(default=8192, metadata=within("[1, 1e9]"))
    turn: int | None = field(default=8192, metadata=within("[1, 1e9]"))

    def __post_init__(self) -> None:
        check(self, "eval.latency.")
        require(bool(self.lengths), "eval.latency.lengths", self.lengths, "one or more")


@dataclass(frozen=True)
class DecodingConfig:
    """Tokens per second of ``generate`` after caches of random keys, with dense attention and with bucket routing.

    Each of ``batches`` is measured after each of ``lengths`` cached keys, unless all sequences together have more than
    ``max_keys`` of them (None: no limit). ``tokens`` tokens of each sequence are measured. Up to a batch of
    ``transformers_batch``, transformers alone is measured too.
    """

    lengths: list[int] = field(default_factory=lambda: [4096], metadata=within("[1, 1e9]"))
    batches: list[int] = field(default_factory=lambda: [1], metadata=within("[1, 1e6]"))
    max_keys: int | None = field(default=None, metadata=within("[1, 1e9]"))
    tokens: int = field(default=64, metadata=within("[1, 65536]"))
    transformers_batch: int = field(default=1, metadata=within("[0, 1e6]"))

    def __post_init__(self) -> None:
        check(self, "eval.decoding.")
        for key in ("lengths", "batches"):
            require(bool(getattr(self, key)), f"eval.decoding.{key}", getattr(self, key), "one or more")


@dataclass(frozen=True)
class ThroughputConfig:
    """Requests that are served together: each number of ``requests`` with prompts of each of ``lengths`` random tokens.

    Each is answered with ``tokens`` new tokens. A pass has up to ``batch_tokens`` tokens, of prompts and new ones together. The
    cache has ``pages`` pages of ``page_size`` tokens of all layers (None: enough for all requests at the same time); with
    fewer, requests wait.
    """

    lengths: list[int] = field(default_factory=lambda: [65536], metadata=within("[1, 1e9]"))
    requests: list[int] = field(default_factory=lambda: [16], metadata=within("[1, 1e5]"))
    tokens: int = field(default=256, metadata=within("[1, 65536]"))
    page_size: int = field(default=256, metadata=within("[16, 4096]"))
    pages: int | None = field(default=None, metadata=within("[1, 1e9]"))
    batch_tokens: int = field(default=8192, metadata=within("[16, 1e6]"))

    def __post_init__(self) -> None:
        check(self, "eval.throughput.")
        for key in ("lengths", "requests"):
            require(bool(getattr(self, key)), f"eval.throughput.{key}", getattr(self, key), "one or more")


@dataclass(frozen=True)
class EvalConfig:
    """``tasks`` to run, with a section for each.

    ``baselines`` are block scores that are compared with the gate's, ``routers`` training-free ways to choose the keys that a
    decoded token reads. At each of ``key_shares``, routings have the numbers of probes that read about this share of the keys
    on training text; without any, those that tasks and artifacts name.
    """

    tasks: list[str] = field(default_factory=lambda: list(QUALITY), metadata=choices(TASKS))
    baselines: list[str] = field(default_factory=lambda: list(BASELINES), metadata=choices(BASELINES))
    routers: list[str] = field(default_factory=list, metadata=choices(ROUTERS))
    key_shares: list[float] = field(default_factory=list, metadata=within("(0, 1]"))
    perplexity: PerplexityConfig = field(default_factory=PerplexityConfig)
    recall: RecallConfig = field(default_factory=RecallConfig)
    needle: NeedleConfig = field(default_factory=NeedleConfig)
    documents: DocumentsConfig = field(default_factory=DocumentsConfig)
    ruler: RulerConfig = field(default_factory=RulerConfig)
    harness: HarnessConfig = field(default_factory=HarnessConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    analysis: AnalysisConfig = field(default_factory=AnalysisConfig)
    latency: LatencyConfig = field(default_factory=LatencyConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    throughput: ThroughputConfig = field(default_factory=ThroughputConfig)

    def __post_init__(self) -> None:
        check(self, "eval.")
        for key in ("baselines", "routers", "key_shares"):
            values = [f"{value:.3g}" if isinstance(value, float) else value for value in getattr(self, key)]
            require(len({*values}) == len(values), f"eval.{key}", getattr(self, key), "each value once")
