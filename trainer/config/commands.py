"""The configuration schema of each command."""

import shlex
from collections.abc import Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Interval

from msattn.kernels.operations import DIFFERENTIABLE, IN_FP8, OPERATIONS, SOFT_CAPPED
from msattn.trainer.config.bench import BenchConfig
from msattn.trainer.config.data import DataConfig
from msattn.trainer.config.evaluate import TASKS, EvalConfig
from msattn.trainer.config.model import ModelConfig
from msattn.trainer.config.schema import (
    DTYPE,
    Count,
    CountOrZero,
    DType,
    Flag,
    Int,
    Layers,
    Number,
    OneOf,
    Seed,
    Share,
    ShareOfKeys,
    Text,
    Tokens,
    TokensOrZero,
    key,
    schema,
)
from msattn.trainer.config.select import (
    BASELINES,
    POLICIES,
    ROUTERS,
    SCORES,
    SelectConfig,
    check_usable,
)
from msattn.trainer.config.train import (
    FinetuneTrainConfig,
    GateConfig,
    KMeansConfig,
    MtaConfig,
    QModelConfig,
    TrackerConfig,
    TrainConfig,
)
from msattn.trainer.config.values import folder_name, require
from msattn.trainer.errors import UserError

TASK_TOKENS = 256  # shortest chunk that fits a retrieval task and some text
TRAINABLE = ("topk", "multiscale")  # policies of finetune, which read the same share of every row


@schema(kw_only=True)
class JobConfig:
    """Keys of every command."""

    # policies and scores of ``select`` that the job cannot use, and why
    refused: ClassVar[Mapping[str, str]] = {}

    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    outputs: Text = key("root folder of all outputs", default="outputs")
    device: Annotated[Text, OneOf(("auto", "cpu", "cuda"))] = key(
        "auto (CUDA if there is a GPU), cpu or cuda", default="auto"
    )
    seed: Seed = key("seed of random weights, data order and sampling", default=0)

    def __post_init__(self) -> None:
        require(bool(self.outputs.strip()), "outputs", repr(self.outputs), "expected a folder")

    @property
    def folder(self) -> Path:
        """The folder of this run's outputs, which also holds Hydra's ``runs``."""
        raise NotImplementedError

    @property
    def tags(self) -> list[str]:
        """The tags of the tracker: the names of the folders of this run below ``outputs``, e.g.
        model and name.
        """
        return list(self.folder.relative_to(self.outputs).parts)


@schema(kw_only=True)
class BenchRunConfig(JobConfig):
    """``msattn bench``."""

    op: Annotated[Text, OneOf(tuple(OPERATIONS))] = key(
        "operation to time", default="block_sparse_attention"
    )
    bench: BenchConfig = field(default_factory=BenchConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = self.bench.direction == "forward" or self.op in DIFFERENTIABLE
        require(
            ok,
            "bench.direction",
            self.bench.direction,
            f"{self.op} has no backward pass; {', '.join(DIFFERENTIABLE)} do",
        )
        ok = self.bench.softcap is None or self.op in SOFT_CAPPED
        require(
            ok,
            "bench.softcap",
            self.bench.softcap,
            f"{self.op} cannot cap scores; {', '.join(SOFT_CAPPED)} can",
        )
        ok = not self.bench.fp8 or self.op in IN_FP8
        require(ok, "bench.fp8", True, f"{self.op} reads none; {', '.join(IN_FP8)} do")

    @property
    def folder(self) -> Path:
        return Path(self.outputs) / "bench" / self.op


@schema(kw_only=True)
class NamedConfig(JobConfig):
    """Keys of every command whose results have a name."""

    name: Text = key(
        "folder of the results, inside that of the model; in a training sweep the default is the "
        "job's number",
        default="base",
    )
    overwrite: Flag = key(
        "replace an existing artifact or result, and drop what an interrupted training has written",
        default=False,
    )
    resume: Flag = key(
        "continue an interrupted run: training from its last complete checkpoint, an evaluation "
        "from its last row",
        default=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        folder_name("name", self.name)

    @property
    def starts_again(self) -> bool:
        """True if a training drops the work of an earlier one."""
        return self.overwrite and not self.resume


@schema(kw_only=True)
class TrainMtaConfig(NamedConfig):
    """``msattn train-mta``."""

    mta: MtaConfig
    train: TrainConfig

    @property
    def folder(self) -> Path:
        return Path(self.outputs) / "mta" / self.name


@schema(kw_only=True)
class RunConfig(NamedConfig):
    """Keys of every command that loads a model; artifacts go to
    ``outputs/<model.name>/<name>/<kind>``.
    """

    model: ModelConfig
    data: DataConfig
    dtype: DType = key(DTYPE, default="auto")

    @property
    def folder(self) -> Path:
        return Path(self.outputs) / self.model.name / self.name

    def check_text(self) -> None:
        """Raises UserError if a pretrained model would train on text that nobody chose."""
        if self.data.source is None and self.model.init == "pretrained":
            ways = (
                "--data FILE, data=text data.path=FILES, data=hub data.path=OWNER/NAME, or "
                "data=stdlib (Python's library)"
            )
            raise UserError(
                f"data=by_model: choose the text on which {self.model.argument} trains: {ways}"
            )

    def arguments(self, name: str) -> str:
        """Returns the arguments of a command that trains on this model and text artifacts called
        ``name``, for messages. FILE stands for a text that nobody chose, but training needs.
        """
        keys = {"outputs": self.outputs, "name": name}
        defaults = {item.name: item.default for item in fields(RunConfig)}
        others = [f"{key}={value}" for key, value in keys.items() if value != defaults[key]]
        if self.data.source == "text":
            others = ["--data", str(self.data.path), *others]
        elif self.data.source == "hub":
            others = ["data=hub", f"data.path={self.data.path}", *others]
        elif self.data.source is None and self.model.init == "pretrained":
            others = ["--data", "FILE", *others]
        if self.data.seq_len != self.model.presets.seq_len:
            others.append(f"data.seq_len={self.data.seq_len}")
        return " ".join([self.model.argument, *map(shlex.quote, others)])


@schema(kw_only=True)
class TrainGateConfig(RunConfig):
    """``msattn train-gate``."""

    gate: GateConfig
    train: TrainConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.gate.block_size
        require(
            size <= self.data.seq_len,
            "gate.block_size",
            size,
            f"expected at most data.seq_len={self.data.seq_len}",
        )
        eager = "expected false: the gates' teacher runs eagerly"
        require(not self.train.compile, "train.compile", self.train.compile, eager)
        window = self.gate.sink + self.gate.recent
        ok = self.gate.phase == "prefill" or window < self.data.seq_len
        require(
            ok,
            "gate.recent",
            self.gate.recent,
            f"expected gate.sink + gate.recent below data.seq_len={self.data.seq_len}",
        )
        rows, skipped = -(-self.data.seq_len // size), self.gate.skip_rows
        require(
            skipped < rows,
            "gate.skip_rows",
            skipped,
            f"expected fewer than the {rows} blocks of a chunk",
        )


@schema(kw_only=True)
class FitKMeansConfig(RunConfig):
    """``msattn fit-kmeans``."""

    kmeans: KMeansConfig


@schema("artifacts.")
class ArtifactsConfig:
    """Artifacts to read; ``embedded`` stands for those of the embedded model that ship with the
    package.
    """

    gate: Text | None = key(
        "folder or Hub id of gates, or embedded; null: those of the same model and name, if any",
        default=None,
    )
    kmeans: Text | None = key(
        "folder or Hub id of a k-means, or embedded; null: the one of the same model and name, if "
        "any",
        default=None,
    )
    qmodel: Text | None = key(
        "folder or Hub id of query classifiers, or embedded, or a router without training "
        "(generate: e.g. quest; serve: random); null: those of the same model and name, if any",
        default=None,
    )
    decode_gate: Text | None = key(
        "folder or Hub id of decode gates; null: those of the same model and name, if any",
        default=None,
    )


@schema(kw_only=True)
class TrainQModelConfig(RunConfig):
    """``msattn train-qmodel``; reads ``artifacts.kmeans``."""

    qmodel: QModelConfig
    train: TrainConfig
    artifacts: ArtifactsConfig = field(default_factory=ArtifactsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        length, clipped = self.data.seq_len, self.train.max_grad_norm
        require(length > 1, "data.seq_len", length, "expected 2 tokens or more")
        for name in ("long_range", "min_distance"):
            distance = getattr(self.qmodel, name)
            ok = distance is None or distance < length
            require(ok, f"qmodel.{name}", distance, f"expected less than data.seq_len={length}")
        ok = self.qmodel.source == "cache" or not self.train.compile
        require(
            ok,
            "train.compile",
            self.train.compile,
            "expected false with qmodel.source=online, which runs the model",
        )
        why = (
            "expected 0: clipping by a norm over all layers would make each layer's result "
            "depend on the others"
        )
        require(clipped == 0, "train.max_grad_norm", clipped, why)


@schema(kw_only=True)
class FinetuneConfig(RunConfig):
    """``msattn finetune``; reads ``artifacts.gate`` for sparse attention, unless
    ``select.sparsity=0``.
    """

    refused: ClassVar[Mapping[str, str]] = {
        **{
            policy: f"finetune trains with {' or '.join(TRAINABLE)}"
            for policy in POLICIES
            if policy not in TRAINABLE
        },
        # The last tokens of a chunk of text are no question.
        **{scores: "finetune trains with gate" for scores in SCORES if scores != "gate"},
    }
    select: SelectConfig
    train: FinetuneTrainConfig
    artifacts: ArtifactsConfig = field(default_factory=ArtifactsConfig)
    gate_weight: Annotated[Number, Interval(ge=0, le=10**6)] = key(
        "weight of the gates' loss; the language model's loss has weight 1", default=1.0
    )
    tasks: Share = key(
        "share of the training chunks that are retrieval tasks, newly generated for every step",
        default=0.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        accepted = "expected auto, bfloat16 or float32: float16 loses small gradients"
        require(self.dtype != "float16", "dtype", self.dtype, accepted)
        require(
            self.data.seq_len > 1, "data.seq_len", self.data.seq_len, "expected 2 tokens or more"
        )
        ok = self.tasks == 0 or self.data.seq_len >= TASK_TOKENS
        require(
            ok,
            "data.seq_len",
            self.data.seq_len,
            f"expected {TASK_TOKENS} tokens or more with tasks={self.tasks}",
        )
        if self.sparse:
            gate = self.artifacts.gate
            how = f"gates are needed; msattn train-gate {self.arguments('base')} trains them"
            require(gate is not None, "artifacts.gate", gate, how)
            check_usable(self.select, self.refused)
            why = "only plain training (select.sparsity=0) is compiled"
            require(not self.train.compile, "train.compile", self.train.compile, why)

    @property
    def sparse(self) -> bool:
        """True if attention reads the blocks that gates select."""
        return self.select.sparsity != 0


@schema(kw_only=True)
class ReadOptions:
    """Options of :func:`msattn.attach` that say which keys are read, as the configuration and
    Python callers give them.
    """

    probes: CountOrZero | None = key(
        "buckets that each decoded query reads; null: as recorded in the artifact", default=None
    )
    keys: Number | None = key(
        "replaces probes: mean share of the keys outside the dense window that decoded queries "
        "read, e.g. 0.05; with decode gates also their number, rounded down to whole blocks",
        default=None,
    )
    recent: Tokens | None = key(
        "number of last keys that are always read; null: as recorded in the artifact", default=None
    )
    sink: TokensOrZero | None = key(
        "number of first keys that are always read; null: as recorded in the artifact", default=None
    )
    dense_layers: Layers | None = key(
        "layers in which decoding reads every key; null: as recorded in the artifact", default=None
    )
    dense_below: TokensOrZero | None = key(
        "attention is dense below this number of keys; null: the measured break-even lengths. "
        "eval ignores it",
        default=None,
    )

    def check_budget(self) -> None:
        """Raises UserError for two of ``probes``, ``keys`` and ``threshold``, or ``keys`` that are
        neither share nor number.
        """
        names = ("threshold", "keys", "probes")
        given = [
            f"{name}={value:g}"
            for name in names
            if (value := getattr(self, name, None)) is not None
        ]
        if len(given) > 1:
            raise UserError(f"{given[0]}: {given[1]} is given too; give one of the two")
        ok = (
            self.keys is None
            or 0.001 <= self.keys <= 0.5
            or (1 <= self.keys <= 1e9 and self.keys == int(self.keys))
        )
        require(
            ok,
            "keys",
            self.keys,
            "expected null, a share in [0.001, 0.5], or a whole number of keys",
        )


@schema(kw_only=True)
class BudgetOptions(ReadOptions):
    """:class:`ReadOptions` with the budget of decode gates alone."""

    threshold: Annotated[Number, Interval(gt=0, lt=1)] | None = key(
        "replaces probes and keys: a decode gate reads the blocks with at least this probability, "
        "e.g. 0.005",
        default=None,
    )


@schema(kw_only=True)
class AttachConfig(ReadOptions, RunConfig):
    """Keys of the commands that attach artifacts to a model."""

    select: SelectConfig
    artifacts: ArtifactsConfig = field(default_factory=ArtifactsConfig)
    chat: Flag | None = key(
        "format prompts as user messages with the model's chat template; null: if it has one",
        default=None,
    )

    @property
    def routing(self) -> dict[str, Any]:
        """The arguments of :func:`msattn.attach` that say which keys are read."""
        names = (*(item.name for item in fields(ReadOptions)), "threshold", "independent")
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_budget()


@schema(kw_only=True)
class EvalRunConfig(AttachConfig):
    """``msattn eval``; compares routing by the query classifiers with routing by the k-means
    alone.
    """

    refused: ClassVar[Mapping[str, str]] = {
        scores: f"eval measures gates and the scores of eval.baselines=[{scores}]"
        for scores in BASELINES
    }
    keys: ShareOfKeys | None = key(
        "replaces probes: mean share of the keys outside the dense window that decoded queries "
        "read, e.g. 0.05",
        default=None,
    )
    eval: EvalConfig = field(default_factory=EvalConfig)
    compare: Text | None = key(
        "folder of another evaluation, e.g. outputs/tiny/base/eval; the report also shows its "
        "scores",
        default=None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_usable(self.select, self.refused)
        router = self.artifacts.qmodel
        require(
            router not in ROUTERS,
            "artifacts.qmodel",
            router,
            f"eval measures the routers of eval.routers=[{router}]",
        )

    @property
    def all_keys(self) -> list[float]:
        """The shares of the keys with which a task measures query classifiers."""
        sections = [getattr(self.eval, task) for task in TASKS if task in self.eval.tasks]
        asked = [share for section in sections for share in getattr(section, "keys", [])]
        return asked if self.keys is None else [*asked, self.keys]


@schema(kw_only=True)
class AnswerConfig(BudgetOptions, AttachConfig):
    """Keys of the commands that answer prompts with up to ``max_new_tokens`` tokens."""

    refused: ClassVar[Mapping[str, str]] = {
        "a_shape": "needs spans that msattn eval measures on text; sink_local uses equal spans"
    }
    max_new_tokens: Count = key("number of tokens to generate, greedily", default=64)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_usable(self.select, self.refused)


@schema(kw_only=True)
class GenerateConfig(AnswerConfig):
    """``msattn generate``: greedy tokens, with dense and with sparse attention."""

    independent: Flag = key(
        "each query head reads its own buckets; otherwise, and always in serve, a query group "
        "shares them",
        default=False,
    )


@schema("server.", kw_only=True)
class ServerLimits:
    """``server.*``: memory of the KV cache, and limits of requests."""

    page_size: Annotated[Int, Interval(ge=16, le=4096)] = key(
        "tokens per page of the KV cache", default=256
    )
    pages: Tokens | None = key(
        "pages of the KV cache; null: as many as fit in GPU memory, on a CPU enough for eight "
        "requests of max_length",
        default=None,
    )
    batch_tokens: Count | None = key(
        "largest number of tokens in one pass of the model; null: 8192 on a GPU, 512 on a CPU",
        default=None,
    )
    max_length: Annotated[Int, Interval(ge=2, le=10**9)] | None = key(
        "largest number of tokens of a request, prompt and answer together; null: the model's "
        "positions",
        default=None,
    )
    max_running: Annotated[Int, Interval(ge=1, le=10**5)] = key(
        "largest number of requests in one pass of the model", default=256
    )
    max_waiting: Count = key(
        "requests that may wait for their first token; any further request is refused with 429",
        default=1024,
    )
    max_body_mb: Annotated[Number, Interval(gt=0, le=1024)] = key(
        "largest size of a request in megabytes; larger ones are refused with 413", default=16.0
    )
    drain_s: Annotated[Number, Interval(ge=0, le=3600)] = key(
        "seconds that running requests may take to finish after Ctrl-C or SIGTERM", default=30.0
    )


@schema(kw_only=True)
class ServeConfig(AnswerConfig):
    """``msattn serve``; ``max_new_tokens`` is the number of new tokens of a request that does not
    give one.
    """

    refused: ClassVar[Mapping[str, str]] = {
        **AnswerConfig.refused,
        "multiscale": "cannot read pages of a KV cache; use another policy",
    }
    server: ServerLimits = field(default_factory=ServerLimits)
    max_new_tokens: Count = key("new tokens of a request without max_tokens", default=1024)
    dense: Flag = key(
        "serve the model with dense attention and without artifacts, for comparison", default=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.chat is None,
            "chat",
            self.chat,
            "expected null: the path /v1/chat/completions makes a request a chat",
        )
        given = [kind for kind, path in vars(self.artifacts).items() if path is not None]
        ok = not (self.dense and given)
        require(
            ok,
            "dense",
            self.dense,
            f"expected false with artifacts.{given[0] if given else ''}: give one of the two",
        )
