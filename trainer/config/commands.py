"""One schema for each command."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from msattn.kernels.operations import DIFFERENTIABLE, OPERATIONS
from msattn.trainer.config.bench import BenchConfig
from msattn.trainer.config.data import DataConfig
from msattn.trainer.config.evaluate import EvalConfig
from msattn.trainer.config.model import ModelConfig
from msattn.trainer.config.select import SelectConfig, SparsityConfig
from msattn.trainer.config.train import FinetuneTrainConfig, GateConfig, KMeansConfig, QModelConfig, TrackerConfig, TrainConfig
from msattn.trainer.config.values import DTYPES, one_of, require

TASK_TOKENS = 256  # a retrieval task and some text around it


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """What every command shares.

    Attributes
    ----------
    outputs : root of everything written.
    device : ``auto``, ``cpu`` or ``cuda``.
    """

    outputs: str = "outputs"
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("device", self.device, ("auto", "cpu", "cuda"))
        require(bool(self.outputs.strip()), "outputs", repr(self.outputs), "a folder")
        require(0 <= self.seed < 2**32, "seed", self.seed, "0 to 4294967295")

    @property
    def folder(self) -> Path:
        """Where this command writes, Hydra's ``runs`` included."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class BenchRunConfig(JobConfig):
    """``msattn bench``: ``op`` is the operation that is measured."""

    op: str
    bench: BenchConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("op", self.op, tuple(OPERATIONS))
        ok = self.bench.direction == "forward" or self.op in DIFFERENTIABLE
        require(ok, "bench.direction", self.bench.direction, f"{self.op} has no backward pass; {', '.join(DIFFERENTIABLE)} do")

    @property
    def folder(self) -> Path:
        return Path(self.outputs) / "bench" / self.op


@dataclass(frozen=True, kw_only=True)
class RunConfig(JobConfig):
    """What every command with a model shares; artifacts go to ``outputs/<model.name>/<name>/<kind>``.

    Attributes
    ----------
    dtype : ``auto`` (bfloat16 on CUDA, float32 on CPU), ``float32``, ``float16`` or ``bfloat16``.
    overwrite : replace an existing artifact.
    resume : go on from the last complete checkpoint.
    """

    model: ModelConfig
    data: DataConfig
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    name: str = "base"
    dtype: str = "auto"
    overwrite: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("dtype", self.dtype, DTYPES)
        require(self.name not in ("", ".", "..") and "/" not in self.name, "name", self.name, "a folder name")

    @property
    def folder(self) -> Path:
        return Path(self.outputs) / self.model.name / self.name


@dataclass(frozen=True, kw_only=True)
class TrainGateConfig(RunConfig):
    """``msattn train-gate``."""

    gate: GateConfig
    train: TrainConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.gate.block_size
        require(size <= self.data.seq_len, "gate.block_size", size, f"at most data.seq_len={self.data.seq_len}")
        require(not self.train.compile, "train.compile", self.train.compile, "false: the gates' teacher runs eagerly")
        rows = -(-self.data.seq_len // size)
        require(self.gate.skip_rows < rows, "gate.skip_rows", self.gate.skip_rows, f"fewer than a chunk's {rows} row blocks")


@dataclass(frozen=True, kw_only=True)
class FitKMeansConfig(RunConfig):
    """``msattn fit-kmeans``."""

    kmeans: KMeansConfig


@dataclass(frozen=True)
class ArtifactsConfig:
    """Which trained artifacts to use: a folder or a Hub id each (None: the one of the same model and name, if there is one)."""

    gate: str | None = None
    kmeans: str | None = None
    qmodel: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrainQModelConfig(RunConfig):
    """``msattn train-qmodel``; of ``artifacts`` it reads ``kmeans``."""

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
        why = "accepted is 0: a norm over layers would tie each to those it trains with"
        require(clipped == 0, "train.max_grad_norm", clipped, why)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(RunConfig):
    """``msattn finetune``; of ``artifacts`` it reads ``gate``, whose blocks the training reads, unless ``select.sparsity=0``.

    Attributes
    ----------
    dtype : of the products, and of the weights that are written; in training the weights are float32.
    gate_weight : of the gates' loss beside the language model's.
    tasks : share of the training chunks that are retrieval tasks, made anew every time: text seldom asks for such things.
    """

    select: SelectConfig
    train: FinetuneTrainConfig
    artifacts: ArtifactsConfig = field(default_factory=ArtifactsConfig)
    gate_weight: float = 1.0
    tasks: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.dtype != "float16", "dtype", self.dtype, "auto, bfloat16 or float32: float16 loses small gradients")
        require(self.data.seq_len > 1, "data.seq_len", self.data.seq_len, "2 tokens or more")
        require(0 <= self.gate_weight < math.inf, "gate_weight", self.gate_weight, "0 or more")
        require(0 <= self.tasks <= 1, "tasks", self.tasks, "in [0, 1]")
        ok = self.tasks == 0 or self.data.seq_len >= TASK_TOKENS
        require(ok, "data.seq_len", self.data.seq_len, f"{TASK_TOKENS} tokens or more with tasks={self.tasks}")
        if self.sparse:
            gate = self.artifacts.gate
            require(gate is not None, "artifacts.gate", gate, "the gates that choose what is read; msattn train-gate first")
            require(self.select.policy == "topk", "select.policy", self.select.policy, "finetune trains with topk")
            require(self.select.scores == "gate", "select.scores", self.select.scores, "finetune trains with gate")
            below = self.select.dense_below
            require(below in ("auto", 0), "select.dense_below", below, "auto or 0: finetune reads every chunk sparsely")
            why = "only plain training (select.sparsity=0) is compiled"
            require(not self.train.compile, "train.compile", self.train.compile, why)

    @property
    def sparse(self) -> bool:
        """Whether attention reads what gates choose."""
        return not (isinstance(self.select, SparsityConfig) and self.select.sparsity == 0)


@dataclass(frozen=True, kw_only=True)
class ServingConfig(RunConfig):
    """How artifacts are put onto the running model.

    Attributes
    ----------
    select : how block scores become the blocks that prefill reads.
    artifacts : gate and query classifier to serve with; a k-means routes without training.
    probes : buckets that a decoded query visits.
    recent, sink : last and first keys that are always read.
    dense_layers : layers that decode densely.
    """

    select: SelectConfig
    artifacts: ArtifactsConfig = field(default_factory=ArtifactsConfig)
    probes: int = 32
    recent: int = 2047
    sink: int = 1
    dense_layers: list[int] = field(default_factory=lambda: [0])

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.probes >= 0, "probes", self.probes, "0 or more buckets")
        require(self.recent >= 1, "recent", self.recent, "1 or more tokens")
        require(self.sink >= 0, "sink", self.sink, "0 or more tokens")


@dataclass(frozen=True, kw_only=True)
class EvalRunConfig(ServingConfig):
    """``msattn eval``; the k-means of ``artifacts`` routes without training, beside the classifier."""

    eval: EvalConfig


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(ServingConfig):
    """``msattn generate``: ``max_new_tokens`` greedy tokens, sparse beside dense."""

    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.max_new_tokens > 0, "max_new_tokens", self.max_new_tokens, "a positive number")
