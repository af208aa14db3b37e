"""The configuration schema of each command."""

import shlex
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from msattn.kernels.operations import DIFFERENTIABLE, OPERATIONS, SOFT_CAPPED
from msattn.trainer.config.bench import BenchConfig
from msattn.trainer.config.data import DataConfig
from msattn.trainer.config.evaluate import EvalConfig
from msattn.trainer.config.model import ModelConfig
from msattn.trainer.config.select import SelectConfig, SparsityConfig
from msattn.trainer.config.train import (
    FinetuneTrainConfig,
    GateConfig,
    KMeansConfig,
    MtaConfig,
    QModelConfig,
    TrackerConfig,
    TrainConfig,
)
from msattn.trainer.config.values import DTYPES, check, choices, folder_name, require, within
from msattn.trainer.errors import UserError

TASK_TOKENS = 256  # shortest chunk that fits a retrieval task and some text
TRAINABLE = ("topk", "multiscale")  # policies of finetune, which read the same share of every row


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """Keys of every command.

    Attributes
    ----------
    outputs : root folder of all outputs.
    device : ``auto``, ``cpu`` or ``cuda``.
    seed : seed of random weights, of the order of the data and of all sampling.
    """

    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    outputs: str = "outputs"
    device: str = field(default="auto", metadata=choices(("auto", "cpu", "cuda")))
    seed: int = field(default=0, metadata=within("[0, 4294967295]"))

    def __post_init__(self) -> None:
        check(self)
        require(bool(self.outputs.strip()), "outputs", repr(self.outputs), "a folder")

    @property
    def folder(self) -> Path:
        """The folder of this run's outputs, which also holds Hydra's ``runs``."""
        raise NotImplementedError

    @property
    def tags(self) -> list[str]:
        """The tags of the tracker: the names of the folders of this run below ``outputs``, e.g. model and name."""
        return list(self.folder.relative_to(self.outputs).parts)


@dataclass(frozen=True, kw_only=True)
class BenchRunConfig(JobConfig):
    """``msattn bench``; ``op`` is the operation to measure."""

    op: str = field(metadata=choices(tuple(OPERATIONS)))
    bench: BenchConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = self.bench.direction == "forward" or self.op in DIFFERENTIABLE
        require(ok, "bench.direction", self.bench.direction, f"{self.op} has no backward pass; {', '.join(DIFFERENTIABLE)} do")
        ok = self.bench.softcap is None or self.op in SOFT_CAPPED
        require(ok, "bench.softcap", self.bench.softcap, f"{self.op} cannot cap scores; {', '.join(SOFT_CAPPED)} can")

    @property
    def folder(self) -> Path:
        return Path(self.outputs) / "bench" / self.op


@dataclass(frozen=True, kw_only=True)
class NamedConfig(JobConfig):
    """Keys of every command whose results have a name.

    Attributes
    ----------
    name : folder of the results.
    overwrite : replace an existing result.
    resume : continue an interrupted run: training from its last complete checkpoint, an evaluation from its last row.
    """

    name: str = "base"
    overwrite: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        folder_name("name", self.name)


@dataclass(frozen=True, kw_only=True)
class TrainMtaConfig(NamedConfig):
    """``msattn train-mta``."""

    mta: MtaConfig
    train: TrainConfig

    @property
    def folder(self) -> Path:
        return Path(self.outputs) / "mta" / self.name


@dataclass(frozen=True, kw_only=True)
class RunConfig(NamedConfig):
    """Keys of every command that loads a model; artifacts go to ``outputs/<model.name>/<name>/<kind>``.

    Attributes
    ----------
    dtype : ``auto`` (bfloat16 on CUDA, float32 on CPU), ``float32``, ``float16`` or ``bfloat16``.
    """

    model: ModelConfig
    data: DataConfig
    dtype: str = field(default="auto", metadata=choices(DTYPES))

    @property
    def folder(self) -> Path:
        return Path(self.outputs) / self.model.name / self.name

    def check_text(self) -> None:
        """Raises UserError if a pretrained model would train on text that nobody chose."""
        if self.data.source is None and self.model.init == "pretrained":
            ways = "--data FILE, data=text data.path=FILES, data=hub data.path=OWNER/NAME, or data=stdlib (Python's library)"
            raise UserError(f"data=by_model: choose the text on which {self.model.argument} trains: {ways}")

    def arguments(self, name: str) -> str:
        """Returns the arguments of a command that trains on this model and text artifacts called ``name``, for messages."""
        keys = {"outputs": self.outputs, "name": name}
        defaults = {item.name: item.default for item in fields(RunConfig)}
        others = [f"{key}={value}" for key, value in keys.items() if value != defaults[key]]
        if self.data.source == "text":
            others = ["--data", str(self.data.path), *others]
        elif self.data.source == "hub":
            others = ["data=hub", f"data.path={self.data.path}", *others]
        if self.data.seq_len != self.model.presets.seq_len:
            others.append(f"data.seq_len={self.data.seq_len}")
        return " ".join([self.model.argument, *map(shlex.quote, others)])


@dataclass(frozen=True, kw_only=True)
class TrainGateConfig(RunConfig):
    """``msattn train-gate``."""

    gate: GateConfig
    train: TrainConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.gate.block_size
        require(size <= self.data.seq_len, "gate.block_size", size, f"at most data.seq_len={self.data.seq_len}")
        require(
            not self.train.compile, "train.compile", self.train.compile, "accepted is false: the gates' teacher runs eagerly"
        )
        window = self.gate.sink + self.gate.recent
        ok = self.gate.phase == "prefill" or window < self.data.seq_len
        require(ok, "gate.recent", self.gate.recent, f"gate.sink + gate.recent below data.seq_len={self.data.seq_len}")
        rows = -(-self.data.seq_len // size)
        require(self.gate.skip_rows < rows, "gate.skip_rows", self.gate.skip_rows, f"fewer than the {rows} blocks of a chunk")


@dataclass(frozen=True, kw_only=True)
class FitKMeansConfig(RunConfig):
    """``msattn fit-kmeans``."""

    kmeans: KMeansConfig


@dataclass(frozen=True)
class ArtifactsConfig:
    """Artifacts to read, as folders or Hub ids; None stands for the artifact of the same model and name, if there is one."""

    gate: str | None = None
    kmeans: str | None = None
    qmodel: str | None = None
    decode_gate: str | None = None

    def __post_init__(self) -> None:
        check(self, "artifacts.")


@dataclass(frozen=True, kw_only=True)
class TrainQModelConfig(RunConfig):
    """``msattn train-qmodel``; reads ``artifacts.kmeans``."""

    qmodel: QModelConfig
    train: TrainConfig
    artifacts: ArtifactsConfig = field(default_factory=ArtifactsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        length, clipped = self.data.seq_len, self.train.max_grad_norm
        require(length > 1, "data.seq_len", length, "2 tokens or more")
        for key in ("long_range", "min_distance"):
            distance = getattr(self.qmodel, key)
            ok = distance is None or distance < length
            require(ok, f"qmodel.{key}", distance, f"accepted is less than data.seq_len={length}")
        ok = self.qmodel.source == "cache" or not self.train.compile
        require(ok, "train.compile", self.train.compile, "accepted is false with qmodel.source=online, which runs the model")
        why = "accepted is 0: a norm over all layers would make each result depend on the layers that train with it"
        require(clipped == 0, "train.max_grad_norm", clipped, why)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(RunConfig):
    """``msattn finetune``; reads ``artifacts.gate`` for sparse attention, unless ``select.sparsity=0``.

    Attributes
    ----------
    dtype : dtype of matrix products and of the saved weights; training keeps float32 weights.
    gate_weight : weight of the gates' loss; the language model's loss has weight 1.
    tasks : share of the training chunks that are retrieval tasks, generated anew for every step; plain text seldom needs
        retrieval.
    """

    select: SelectConfig
    train: FinetuneTrainConfig
    artifacts: ArtifactsConfig = field(default_factory=ArtifactsConfig)
    gate_weight: float = field(default=1.0, metadata=within("[0, 1e6]"))
    tasks: float = field(default=0.0, metadata=within("[0, 1]"))

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.dtype != "float16", "dtype", self.dtype, "auto, bfloat16 or float32: float16 loses small gradients")
        require(self.data.seq_len > 1, "data.seq_len", self.data.seq_len, "2 tokens or more")
        ok = self.tasks == 0 or self.data.seq_len >= TASK_TOKENS
        require(ok, "data.seq_len", self.data.seq_len, f"{TASK_TOKENS} tokens or more with tasks={self.tasks}")
        if self.sparse:
            gate = self.artifacts.gate
            require(
                gate is not None,
                "artifacts.gate",
                gate,
                f"gates are needed; msattn train-gate {self.arguments('base')} trains them",
            )
            policy, scores = self.select.policy, self.select.scores
            require(policy in TRAINABLE, "select.policy", policy, f"finetune trains with {' or '.join(TRAINABLE)}")
            require(scores == "gate", "select.scores", scores, "finetune trains with gate")
            below = self.select.dense_below
            require(
                below in ("auto", 0), "select.dense_below", below, "auto or 0: finetune uses sparse attention in every chunk"
            )
            why = "only plain training (select.sparsity=0) is compiled"
            require(not self.train.compile, "train.compile", self.train.compile, why)

    @property
    def sparse(self) -> bool:
        """True if attention reads the blocks that gates select."""
        return not (isinstance(self.select, SparsityConfig) and self.select.sparsity == 0)


@dataclass(frozen=True, kw_only=True)
class AttachConfig(RunConfig):
    """Keys of the commands that attach artifacts to a model.

    Attributes
    ----------
    select : scores and policy that select the blocks of prefill.
    artifacts : gates for prefill; query classifiers, decode gates, or a k-means, which routes without a classifier.
    chat : make a prompt the message of a user in the model's chat template; None does so if the model has one.
    probes : buckets that each decoded query reads.
    keys : instead of ``probes``, mean share of the keys outside the dense window that decoded queries read.
    recent, sink : numbers of last and first keys that are always read.
    dense_layers : layers in which decoding reads every key. None for these four stands for what the artifact records.
    dense_below : number of keys below which prompts and new tokens are dense; None stands for measured break-even lengths.
    """

    select: SelectConfig
    artifacts: ArtifactsConfig = field(default_factory=ArtifactsConfig)
    chat: bool | None = None
    probes: int | None = field(default=None, metadata=within("[0, 1e6]"))
    keys: float | None = field(default=None, metadata=within("[0.001, 0.5]"))
    recent: int | None = field(default=None, metadata=within("[1, 1e9]"))
    sink: int | None = field(default=None, metadata=within("[0, 1e9]"))
    dense_layers: list[int] | None = field(default=None, metadata=within("[0, 1e6]"))
    dense_below: int | None = field(default=None, metadata=within("[0, 1e9]"))

    @property
    def routing(self) -> dict[str, Any]:
        """The arguments of :func:`msattn.attach` that concern decoding."""
        names = ("probes", "keys", "recent", "sink", "dense_layers")
        return {name: getattr(self, name) for name in names}

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = self.keys is None or self.probes is None
        require(ok, "keys", self.keys, f"accepted is null with probes={self.probes}: give one of the two")


@dataclass(frozen=True, kw_only=True)
class EvalRunConfig(AttachConfig):
    """``msattn eval``; compares routing by the query classifiers with routing by the k-means alone.

    Attributes
    ----------
    compare : folder of another evaluation, whose scores the report shows beside these; None for none.
    """

    eval: EvalConfig
    compare: str | None = None

    @property
    def all_keys(self) -> list[float]:
        """The shares of the keys with which a task measures query classifiers."""
        sections = {"recall": self.eval.recall, "needle": self.eval.needle, "ruler": self.eval.ruler}
        asked = [share for task, section in sections.items() if task in self.eval.tasks for share in section.keys]
        return asked if self.keys is None else [*asked, self.keys]


@dataclass(frozen=True, kw_only=True)
class AnswerConfig(AttachConfig):
    """Keys of the commands that answer prompts with up to ``max_new_tokens`` tokens.

    Attributes
    ----------
    keys : as for :class:`AttachConfig` or, with decode gates, a whole number of keys from 1 on.
    threshold : instead of ``probes`` or ``keys``, probability from which decode gates read a block.
    """

    keys: float | None = None
    threshold: float | None = field(default=None, metadata=within("(0, 1)"))
    max_new_tokens: int = field(default=64, metadata=within("[1, 1e6]"))

    @property
    def routing(self) -> dict[str, Any]:
        return super().routing | {"threshold": self.threshold}

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = self.keys is None or 0.001 <= self.keys <= 0.5 or (1 <= self.keys <= 1e9 and self.keys == int(self.keys))
        require(ok, "keys", self.keys, "accepted is null, a share in [0.001, 0.5], or a whole number of keys")
        for name in ("probes", "keys"):
            ok, other = self.threshold is None or getattr(self, name) is None, f"{name}={getattr(self, name)}"
            require(ok, "threshold", self.threshold, f"accepted is null with {other}: give one of the two")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(AnswerConfig):
    """``msattn generate``: greedy tokens, with dense and with sparse attention.

    Attributes
    ----------
    independent : each query head reads buckets of its own, which a query group shares otherwise (and always in ``serve``).
    """

    independent: bool = False

    @property
    def routing(self) -> dict[str, Any]:
        return super().routing | {"independent": self.independent}


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """``server.*``: memory of the KV cache, and limits of requests.

    Attributes
    ----------
    page_size : tokens of a page of the cache.
    pages : pages of the cache; None stands for what memory holds on a GPU, and for eight of the longest requests on a CPU.
    batch_tokens : tokens that one pass of the model computes at most; longer prompts take several passes.
    max_length : tokens of a request, prompt and answer together; None stands for the model's positions.
    max_running : requests that one pass of the model computes at most.
    max_waiting : requests without a first token; a further one is refused.
    max_body_mb : size of a request's body in megabytes.
    drain_s : seconds that running requests have to finish after Ctrl-C or SIGTERM.
    """

    page_size: int = field(default=256, metadata=within("[16, 4096]"))
    pages: int | None = field(default=None, metadata=within("[1, 1e9]"))
    batch_tokens: int | None = field(default=None, metadata=within("[1, 1e6]"))
    max_length: int | None = field(default=None, metadata=within("[2, 1e9]"))
    max_running: int = field(default=256, metadata=within("[1, 1e5]"))
    max_waiting: int = field(default=1024, metadata=within("[1, 1e6]"))
    max_body_mb: float = field(default=16.0, metadata=within("(0, 1024]"))
    drain_s: float = field(default=30.0, metadata=within("[0, 3600]"))

    def __post_init__(self) -> None:
        check(self, "server.")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(AnswerConfig):
    """``msattn serve``; ``max_new_tokens`` is the number of new tokens of a request that does not give one.

    Attributes
    ----------
    dense : serve the model without artifacts.
    """

    server: ServerLimits
    dense: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.chat is None, "chat", self.chat, "accepted is null: a request is a chat by its path, /v1/chat/completions")
        given = [kind for kind, path in vars(self.artifacts).items() if path is not None]
        ok = not (self.dense and given)
        require(ok, "dense", self.dense, f"accepted is false with artifacts.{given[0] if given else ''}: give one of the two")
