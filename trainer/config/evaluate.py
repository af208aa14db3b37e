"""Configuration of the evaluation tasks."""

from dataclasses import field, fields
from typing import Annotated

from annotated_types import Interval, MinLen

from msattn.trainer.config.schema import (
    Count,
    CountOrZero,
    Flag,
    Int,
    Number,
    OneOf,
    Samples,
    Share,
    ShareOfKeys,
    Sparsity,
    Text,
    Tokens,
    TokensOrZero,
    key,
    schema,
)
from msattn.trainer.config.select import BASELINES, ROUTERS
from msattn.trainer.config.values import require
from msattn.trainer.errors import UserError

RULER_TASKS = (
    *(
        "niah_single_1",
        "niah_single_2",
        "niah_single_3",
        "niah_multikey_1",
        "niah_multikey_2",
        "niah_multikey_3",
    ),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
)
# the keys of eval.ruler that name the files of RULER's tasks
QUESTION_FILES = {"qa_1": "squad", "qa_2": "hotpotqa"}
SPARSITIES = "shares of the visible blocks that are not read"
PROBES = "numbers of buckets that a query reads; 0: only sink and recent keys"
KEYS = "mean shares of the keys outside the dense window that a query reads, for query classifiers"
INDEPENDENT = (
    "also measure separate buckets for each query head; serving shares them within a query group"
)
HAYSTACK = "a text file or folder; null: the held-out documents of data"

Index = Annotated[Int, Interval(ge=0, lt=10000)]
Lengths = Annotated[list[Tokens], MinLen(1)]
LongerThanOne = Annotated[Int, Interval(ge=2, le=10**9)]
NewTokens = Annotated[Int, Interval(ge=1, le=65536)]


@schema("eval.perplexity.")
class PerplexityConfig:
    """Perplexity of held-out chunks, at each of ``sparsities``."""

    length: LongerThanOne = key("tokens of a held-out chunk", default=4096)
    num_chunks: Count = key("held-out chunks", default=16)
    sparsities: list[Sparsity] = key(SPARSITIES, default=[0.5, 0.8, 0.9])


@schema("eval.recall.")
class RecallConfig:
    """Attention mass in the keys that are read, on held-out chunks: by block selections, and by
    routing in decoding.
    """

    length: Tokens = key("tokens of a held-out chunk", default=4096)
    num_chunks: Count = key("held-out chunks", default=2)
    num_queries: Count = key("decoding queries per chunk", default=64)
    sparsities: list[Sparsity] = key(SPARSITIES, default=[0.5, 0.8, 0.9])
    probes: list[CountOrZero] = key(PROBES, default=[0, 1, 2, 4])
    keys: list[ShareOfKeys] = key(KEYS, default=[])
    independent: Flag = key(INDEPENDENT, default=False)


@schema("eval.needle.")
class NeedleConfig:
    """Retrieval of needles from text. The answer is always decoded with sparse attention."""

    lengths: Lengths = key("tokens per prompt", default=[4096])
    depths: Annotated[list[Share], MinLen(1)] = key(
        "position of the needle; 0: the start of the context", default=[0.0, 0.25, 0.5, 0.75, 1.0]
    )
    samples: Samples = key("prompts of each length and depth", default=8)
    needles: Annotated[Int, Interval(ge=1, le=1000)] = key(
        "needles hidden in a prompt; the question asks for one of them", default=1
    )
    haystack: Text | None = key(HAYSTACK, default=None)
    question: Annotated[Text, OneOf(("dense", "sparse"))] = key(
        "attention of the question's tokens when the answer is decoded with bucket routing: "
        "sparse or dense",
        default="sparse",
    )
    sparsities: list[Sparsity] = key(SPARSITIES, default=[0.8, 0.9])
    probes: list[CountOrZero] = key(PROBES, default=[0, 1, 2, 4])
    keys: list[ShareOfKeys] = key(KEYS, default=[])
    independent: Flag = key(INDEPENDENT, default=False)


@schema("eval.documents.")
class DocumentsConfig:
    """Perplexity of the first tokens of the same held-out documents, at each of ``lengths`` and
    ``sparsities``.
    """

    lengths: Annotated[list[LongerThanOne], MinLen(1)] = key(
        "number of first tokens of a held-out document", default=[4096]
    )
    num_documents: Count | None = key(
        "held-out documents; null: all that are long enough", default=16
    )
    min_tokens: Tokens | None = key(
        "smallest number of tokens of a document; null: the longest of lengths", default=None
    )
    sparsities: list[Sparsity] = key(SPARSITIES, default=[0.5, 0.8, 0.9])

    @property
    def least_tokens(self) -> int:
        """Number of tokens of a document that is long enough."""
        return self.min_tokens or max(self.lengths)

    def __post_init__(self) -> None:
        longest = max(self.lengths)
        accepted = f"expected null, or the longest of eval.documents.lengths, {longest}, or more"
        require(
            self.least_tokens >= longest, "eval.documents.min_tokens", self.min_tokens, accepted
        )


@schema("eval.ruler.")
class RulerConfig:
    """RULER's tasks."""

    lengths: Lengths = key("tokens of a prompt including its answer", default=[4096])
    tasks: Annotated[list[Annotated[Text, OneOf(RULER_TASKS)]], MinLen(1)] | None = key(
        "tasks of RULER; null: all, with qa_1 and qa_2 only if their question files are given",
        default=None,
    )
    squad: Text | None = key("JSON file in SQuAD's format with the questions of qa_1", default=None)
    hotpotqa: Text | None = key(
        "JSON file in HotpotQA's format with the questions of qa_2", default=None
    )
    samples: Samples = key("prompts of each length and task", default=20)
    haystack: Text | None = key(HAYSTACK, default=None)
    batch_tokens: TokensOrZero = key(
        "total tokens of prompts that are answered as one batch; a single prompt may have more",
        default=32768,
    )
    sparsities: list[Sparsity] = key(SPARSITIES, default=[0.8, 0.9])
    probes: list[CountOrZero] = key(PROBES, default=[1, 2, 4])
    keys: list[ShareOfKeys] = key(KEYS, default=[])
    independent: Flag = key(INDEPENDENT, default=False)

    def asked(self) -> list[str]:
        """Returns the tasks to run. Raises UserError for a task that needs a file of questions and
        has none.
        """
        for task in self.tasks or []:
            if (name := QUESTION_FILES.get(task)) and getattr(self, name) is None:
                raise UserError(
                    f"eval.ruler.tasks={task}: needs a file of questions, eval.ruler.{name}=FILE"
                )
        without = {task for task, name in QUESTION_FILES.items() if getattr(self, name) is None}
        return self.tasks or [task for task in RULER_TASKS if task not in without]


@schema("eval.leval.")
class LevalConfig:
    """L-Eval's questions about long documents: the likelihood of the expected answers, and answers
    of the model's own.
    """

    path: Text | None = key(
        "jsonl file of L-Eval, or a folder or glob of such files; each file is a task", default=None
    )
    lengths: Lengths = key(
        "largest number of tokens of a prompt including its answer; longer documents lose their "
        "middle",
        default=[4096],
    )
    questions: Count | None = key(
        "number of questions from each file, spread over its documents; null: all", default=None
    )
    answers: Flag = key("also generate answers and score them with L-Eval's metrics", default=False)
    max_new_tokens: NewTokens = key("largest number of tokens of an answer", default=64)
    sparsities: list[Sparsity] = key(SPARSITIES, default=[0.8, 0.9])
    probes: list[CountOrZero] = key(PROBES, default=[1, 2, 4])
    keys: list[ShareOfKeys] = key(KEYS, default=[])


@schema("eval.harness.")
class HarnessConfig:
    """Tasks of lm_eval. Without ``probes``, routings are measured with the number that their
    artifacts record.
    """

    tasks: list[Text] = key("lm_eval tasks and groups, such as longbench", default=[])
    include_path: Text | None = key(
        "folder with YAML files of further tasks; functions named there are run", default=None
    )
    lengths: list[Tokens] = key(
        "prompt lengths in tokens for tasks that generate prompts, such as RULER and BABILong; "
        "[]: the tasks' own",
        default=[],
    )
    bins: list[Tokens] = key(
        "length bounds that group samples which record their length, such as [4000, 8000] for "
        "LongBench-E; []: one group",
        default=[],
    )
    limit: Tokens | None = key(
        "at most this many samples of each task and length; null: all", default=None
    )
    sparsities: list[Sparsity] = key(SPARSITIES, default=[0.9])
    probes: list[CountOrZero] = key(PROBES, default=[])

    def __post_init__(self) -> None:
        require(
            sorted({*self.bins}) == self.bins,
            "eval.harness.bins",
            self.bins,
            "expected increasing numbers",
        )


@schema("eval.prompts.")
class PromptsConfig:
    """The user's own prompts. Routings are measured with the number of probes that their artifacts
    record.
    """

    path: Text | None = key(
        "jsonl file; each line has an answer and a prompt, or messages with role and content",
        default=None,
    )
    max_new_tokens: Count = key("largest number of tokens of an answer", default=64)
    sparsities: list[Sparsity] = key(SPARSITIES, default=[0.9])
    independent: Flag = key(INDEPENDENT, default=False)


@schema("eval.analysis.")
class AnalysisConfig:
    """Queries, keys and attention mass of held-out chunks."""

    length: LongerThanOne = key("tokens of a held-out chunk", default=4096)
    num_chunks: Count = key("held-out chunks", default=4)
    num_queries: Count = key("decoding queries per chunk", default=32)
    layers: Annotated[list[Index], MinLen(1)] | None = key(
        "layers to measure; null: four, evenly spaced", default=None
    )
    heads: Annotated[list[Index], MinLen(1)] | None = key(
        "key/value heads to measure, with their query heads; null: all", default=None
    )
    buckets: list[Count] | None = key(
        "numbers of buckets of further k-means partitions, fitted to training text; null: a "
        "quarter of the router's number",
        default=None,
    )


@schema("eval.latency.")
class LatencyConfig:
    """Time to the first token, dense and sparse, after a warm-up prompt.

    Prompts are held-out text, or random tokens with ``model.init=random``.
    One setting of each method is also measured on prompts of at least ``2 * chunk`` tokens in
    passes of ``chunk`` tokens, and on the last ``turn`` tokens of prompts of at least ``2 * turn``
    tokens, after cached ones.
    """

    lengths: Lengths = key("numbers of tokens in a prompt", default=[1024, 4096])
    sparsities: list[Sparsity] = key(SPARSITIES, default=[0.5, 0.8, 0.9, 0.95])
    seconds: Annotated[Number, Interval(gt=0, le=600)] = key(
        "seconds of measurement for each method and length; at least one prompt is measured",
        default=1.0,
    )
    chunk: Tokens | None = key(
        "tokens per pass when a prompt is prefilled in chunks; null: do not measure this",
        default=8192,
    )
    turn: Tokens | None = key(
        "new tokens after cached ones, as in the second turn of a chat; null: do not measure this",
        default=8192,
    )


@schema("eval.decoding.")
class DecodingConfig:
    """Tokens per second of ``generate`` after caches of random keys, with dense attention and with
    bucket routing.
    """

    lengths: Lengths = key("numbers of random keys in the cache of each sequence", default=[4096])
    batches: Annotated[list[Count], MinLen(1)] = key(
        "batch sizes; each is measured with each length", default=[1]
    )
    max_keys: Tokens | None = key(
        "skip batches and lengths with more cached keys in total, to save memory; null: no limit",
        default=None,
    )
    tokens: NewTokens = key("number of measured tokens per sequence", default=64)
    transformers_batch: CountOrZero = key(
        "largest batch size also measured with transformers alone, which copies the cache for "
        "each token",
        default=1,
    )


@schema("eval.throughput.")
class ThroughputConfig:
    """Requests that are served together; with too few pages, requests wait."""

    lengths: Lengths = key("numbers of random tokens in a prompt", default=[65536])
    requests: Annotated[list[Annotated[Int, Interval(ge=1, le=10**5)]], MinLen(1)] = key(
        "numbers of requests that arrive at once", default=[16]
    )
    tokens: NewTokens = key("new tokens per request", default=256)
    page_size: Annotated[Int, Interval(ge=16, le=4096)] = key(
        "tokens per page of the cache; a multiple of the gate's block size", default=256
    )
    pages: Tokens | None = key(
        "pages of the cache; null: enough for all requests at once", default=None
    )
    batch_tokens: Annotated[Int, Interval(ge=16, le=10**6)] = key(
        "largest number of tokens in a pass, of prompts and new tokens together", default=8192
    )


@schema("eval.")
class TaskSections:
    """The settings of each task."""

    perplexity: PerplexityConfig = field(default_factory=PerplexityConfig)
    recall: RecallConfig = field(default_factory=RecallConfig)
    needle: NeedleConfig = field(default_factory=NeedleConfig)
    documents: DocumentsConfig = field(default_factory=DocumentsConfig)
    ruler: RulerConfig = field(default_factory=RulerConfig)
    leval: LevalConfig = field(default_factory=LevalConfig)
    harness: HarnessConfig = field(default_factory=HarnessConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    analysis: AnalysisConfig = field(default_factory=AnalysisConfig)
    latency: LatencyConfig = field(default_factory=LatencyConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    throughput: ThroughputConfig = field(default_factory=ThroughputConfig)


TASKS = tuple(item.name for item in fields(TaskSections))


@schema("eval.")
class ComparedConfig:
    """The tasks to run, and the methods that all of them compare."""

    tasks: list[Annotated[Text, OneOf(TASKS)]] = key(
        "tasks to run", default=["perplexity", "recall", "needle"]
    )
    baselines: list[Annotated[Text, OneOf(BASELINES)]] = key(
        "training-free block scores that are compared with the gate",
        default=[
            "oracle",
            "random",
            "sink_local",
            "a_shape",
            "mean_pool",
            "quest",
            "vertical_slash",
        ],
    )
    routers: list[Annotated[Text, OneOf(ROUTERS)]] = key(
        "training-free routers that are compared in decoding", default=[]
    )
    key_shares: list[Annotated[Number, Interval(gt=0, le=1)]] = key(
        "shares of the keys that routers should read, measured on training text, e.g. [0.1, 0.2]; "
        "[]: use probes",
        default=[],
    )

    def __post_init__(self) -> None:
        for name in ("baselines", "routers", "key_shares"):
            values = [
                f"{value:.3g}" if isinstance(value, float) else value
                for value in getattr(self, name)
            ]
            require(
                len({*values}) == len(values),
                f"eval.{name}",
                getattr(self, name),
                "expected each value once",
            )


@schema("eval.")
class EvalConfig(TaskSections, ComparedConfig):
    """``tasks`` to run, with a section for each."""
