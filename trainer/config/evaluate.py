"""Configuration of the evaluation tasks."""

from dataclasses import dataclass, field

from msattn.trainer.config.select import BASELINES
from msattn.trainer.config.values import check_choices, choices, require

TASKS = ("perplexity", "recall", "needle", "prompts", "latency", "decoding")
QUALITY = TASKS[:3]  # the default; the other tasks measure speed


@dataclass(frozen=True)
class PerplexityConfig:
    """Perplexity of ``num_chunks`` held-out chunks of ``length`` tokens, at each of ``sparsities``."""

    length: int = 4096
    num_chunks: int = 16
    sparsities: list[float] = field(default_factory=lambda: [0.5, 0.8, 0.9])

    def __post_init__(self) -> None:
        for sparsity in self.sparsities:
            require(0 <= sparsity < 1, "eval.perplexity.sparsities", self.sparsities, "each in [0, 1)")
        for key in ("length", "num_chunks"):
            require(getattr(self, key) > 0, f"eval.perplexity.{key}", getattr(self, key), "a positive number")


@dataclass(frozen=True)
class RecallConfig:
    """Attention mass in the keys that are read, on ``num_chunks`` held-out chunks of ``length`` tokens.

    Block selections are measured at each of ``sparsities``, routing with each number of ``probes`` for ``num_queries`` decoding
    queries of a chunk. ``independent`` adds routing with separate probes for each query head; serving shares probes within a
    query group.
    """

    length: int = 4096
    num_chunks: int = 2
    num_queries: int = 64
    sparsities: list[float] = field(default_factory=lambda: [0.5, 0.8, 0.9])
    probes: list[int] = field(default_factory=lambda: [0, 1, 2, 4])
    independent: bool = False

    def __post_init__(self) -> None:
        for key in ("length", "num_chunks", "num_queries"):
            require(getattr(self, key) > 0, f"eval.recall.{key}", getattr(self, key), "a positive number")
        for sparsity in self.sparsities:
            require(0 <= sparsity < 1, "eval.recall.sparsities", self.sparsities, "each in [0, 1)")
        for probes in self.probes:
            require(probes >= 0, "eval.recall.probes", self.probes, "each 0 or more buckets")


@dataclass(frozen=True)
class NeedleConfig:
    """Retrieval of needles from text: ``samples`` prompts of each of ``lengths`` and ``depths``.

    ``haystack`` is a text file or folder (None: the held-out documents of ``data``). ``needles`` are hidden in a prompt and one
    of them is asked for. Block selections are measured at ``sparsities``, routing with ``probes``. ``question`` is ``dense`` or
    ``sparse``, the attention of the question's tokens in routing; the answer is always decoded with sparse attention.
    """

    lengths: list[int] = field(default_factory=lambda: [4096])
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    samples: int = 8
    needles: int = 1
    haystack: str | None = None
    question: str = field(default="sparse", metadata=choices(("dense", "sparse")))
    sparsities: list[float] = field(default_factory=lambda: [0.8, 0.9])
    probes: list[int] = field(default_factory=lambda: [0, 1, 2, 4])

    def __post_init__(self) -> None:
        check_choices(self, "eval.needle.")
        for key in ("samples", "needles"):
            require(getattr(self, key) > 0, f"eval.needle.{key}", getattr(self, key), "a positive number")
        for key in ("lengths", "depths"):
            require(bool(getattr(self, key)), f"eval.needle.{key}", getattr(self, key), "one or more")
        for length in self.lengths:
            require(length > 0, "eval.needle.lengths", self.lengths, "each a positive number of tokens")
        for depth in self.depths:
            require(0 <= depth <= 1, "eval.needle.depths", self.depths, "each in [0, 1]")
        for sparsity in self.sparsities:
            require(0 <= sparsity < 1, "eval.needle.sparsities", self.sparsities, "each in [0, 1)")
        for probes in self.probes:
            require(probes >= 0, "eval.needle.probes", self.probes, "each 0 or more buckets")


@dataclass(frozen=True)
class PromptsConfig:
    """The user's own prompts in the jsonl file ``path``, answered with up to ``max_new_tokens`` greedy tokens.

    Block selections are measured at ``sparsities``, routings with the number of probes that their artifacts record.
    """

    path: str | None = None
    max_new_tokens: int = 64
    sparsities: list[float] = field(default_factory=lambda: [0.9])

    def __post_init__(self) -> None:
        require(self.max_new_tokens > 0, "eval.prompts.max_new_tokens", self.max_new_tokens, "a positive number of tokens")
        for sparsity in self.sparsities:
            require(0 <= sparsity < 1, "eval.prompts.sparsities", self.sparsities, "each in [0, 1)")


@dataclass(frozen=True)
class LatencyConfig:
    """Time to the first token of prompts of ``lengths`` random tokens, dense and at each of ``sparsities``.

    After a warm-up prompt, prompts are measured for ``seconds``, at least one. One setting of each method is also measured on
    prompts of at least ``2 * chunk`` tokens in passes of ``chunk`` tokens, and on the last ``turn`` tokens of prompts of at
    least ``2 * turn`` tokens, after cached ones. None leaves these out.
    """

    lengths: list[int] = field(default_factory=lambda: [1024, 4096])
    sparsities: list[float] = field(default_factory=lambda: [0.5, 0.8, 0.9, 0.95])
    seconds: float = 1.0
    chunk: int | None = 8192
    turn: int | None = 8192

    def __post_init__(self) -> None:
        require(bool(self.lengths), "eval.latency.lengths", self.lengths, "one or more")
        for length in self.lengths:
            require(length > 0, "eval.latency.lengths", self.lengths, "each a positive number of tokens")
        for sparsity in self.sparsities:
            require(0 <= sparsity < 1, "eval.latency.sparsities", self.sparsities, "each in [0, 1)")
        require(self.seconds > 0, "eval.latency.seconds", self.seconds, "a positive number")
        for key in ("chunk", "turn"):
            tokens = getattr(self, key)
            require(tokens is None or tokens > 0, f"eval.latency.{key}", tokens, "a positive number of tokens, or null")


@dataclass(frozen=True)
class DecodingConfig:
    """Tokens per second of ``generate`` after caches of random keys, with dense attention and with bucket routing.

    Each of ``batches`` is measured after each of ``lengths`` cached keys, unless all sequences together have more than
    ``max_keys`` of them (None: no limit). ``tokens`` tokens of each sequence are measured. Up to a batch of
    ``transformers_batch``, transformers alone is measured too.
    """

    lengths: list[int] = field(default_factory=lambda: [4096])
    batches: list[int] = field(default_factory=lambda: [1])
    max_keys: int | None = None
    tokens: int = 64
    transformers_batch: int = 1

    def __post_init__(self) -> None:
        for key, unit in {"lengths": "keys", "batches": "sequences"}.items():
            values = getattr(self, key)
            require(bool(values), f"eval.decoding.{key}", values, "one or more")
            for value in values:
                require(value > 0, f"eval.decoding.{key}", values, f"each a positive number of {unit}")
        require(self.tokens > 0, "eval.decoding.tokens", self.tokens, "a positive number")
        require(
            self.max_keys is None or self.max_keys > 0, "eval.decoding.max_keys", self.max_keys, "a positive number, or null"
        )
        batch = self.transformers_batch
        require(batch >= 0, "eval.decoding.transformers_batch", batch, "0 or more sequences")


@dataclass(frozen=True)
class EvalConfig:
    """``tasks`` to run, with a section for each; ``baselines`` are block scores that are compared with the gate's."""

    tasks: list[str] = field(default_factory=lambda: list(QUALITY), metadata=choices(TASKS))
    baselines: list[str] = field(default_factory=lambda: list(BASELINES), metadata=choices(BASELINES))
    perplexity: PerplexityConfig = field(default_factory=PerplexityConfig)
    recall: RecallConfig = field(default_factory=RecallConfig)
    needle: NeedleConfig = field(default_factory=NeedleConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    latency: LatencyConfig = field(default_factory=LatencyConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)

    def __post_init__(self) -> None:
        check_choices(self, "eval.")
