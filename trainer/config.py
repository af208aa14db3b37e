"""The schema of ``conf/``: frozen dataclasses, one for each Hydra group and one for each command.

Hydra composes plain YAML; :func:`typed` merges the result onto a dataclass, which refuses unknown keys and wrong types,
and each ``__post_init__`` refuses values out of range. Interpolations such as ``${model.suits.recent}`` let a model's YAML
carry the sizes that suit it.
"""

import difflib
import math
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from msattn.trainer.errors import UserError

Config = TypeVar("Config")

POOLINGS = ("avg", "max", "min")
LOSSES = ("mse", "kl", "smooth_l1")
POLICIES = ("topk", "calibrated", "threshold", "nucleus", "token_budget", "multiscale")
SCORES = ("gate", "oracle", "random", "sink_local", "mean_pool", "quest")
TASKS = ("perplexity", "recall", "needle")
OPERATIONS = (  # those of kernels.bench
    "maxpool_attention",
    "block_sparse_attention",
    "multiscale_attention",
    "conv_attention",
    "head_mix_attention",
    "bucket_decode",
    "flash_decode",
    "conv_decode",
    "bucket_mass",
    "merge_states",
)
DIFFERENTIABLE = ("block_sparse_attention", "multiscale_attention", "conv_attention", "head_mix_attention")
PEERS = ("flash", "cudnn", "efficient", "math", "flex", "eager", "block_sparse", "product")
DTYPES = ("auto", "float32", "float16", "bfloat16")


def _require(condition: bool, key: str, value: object, accepted: str) -> None:
    if not condition:
        raise UserError(f"{key}={value}: {accepted}")


def _one_of(key: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        near = difflib.get_close_matches(value, accepted, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(f"{key}={value}: accepted are {', '.join(accepted)}{hint}")


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@dataclass(frozen=True)
class Suits:
    """Sizes that suit one model; other groups refer to them as ``${model.suits.*}``.

    Attributes
    ----------
    seq_len : training chunk, in tokens.
    num_buckets : k-means buckets a key/value head.
    long_range : distance, in tokens, beyond which a query's top key makes it a training query.
    qmodel_hidden : width of the query classifier.
    qmodel_steps, qmodel_lr : its optimizer steps and learning rate.
    gate_lr, gate_steps, gate_batch : learning rate of the gates, optimizer steps, chunks a step.
    gate_loss, gate_q_pool, gate_k_pool : their loss and poolings.
    kmeans_prompts, qmodel_prompts : chunks whose keys are clustered, whose queries are learnt from.
    probes : buckets visited a query.
    recent : dense window, in tokens.
    needles : whether training text has needles woven in.
    eval_chunks : held-out chunks that perplexity is measured on.
    needle_samples : needles a cell of the depth x length grid.
    eval_probes : the numbers of probes at which routing is measured (0: the dense window alone).
    """

    seq_len: int = 65536
    num_buckets: int = 1024
    long_range: int = 1024
    qmodel_hidden: int = 1024
    qmodel_steps: int = 40000
    qmodel_lr: float = 1e-5
    gate_lr: float = 1e-3
    gate_steps: int = 500
    gate_batch: int = 16
    gate_loss: str = "mse"
    gate_q_pool: list[str] = field(default_factory=lambda: ["avg"])
    gate_k_pool: list[str] = field(default_factory=lambda: ["max", "min"])
    kmeans_prompts: int = 8
    qmodel_prompts: int = 48
    probes: int = 32
    recent: int = 2047
    needles: bool = False
    eval_chunks: int = 16
    needle_samples: int = 8
    eval_probes: list[int] = field(default_factory=lambda: [0, 4, 16, 32])


@dataclass(frozen=True)
class ModelConfig:
    """Which language model, and how it is brought up.

    Attributes
    ----------
    name : short name; the folder under ``outputs``.
    path : Hub id, local folder, or ``embedded`` (the model that ships with the package).
    init : ``pretrained``, or ``random`` (weights drawn from the seed, shape from ``architecture``; no download).
    revision : Hub revision.
    rope_scaling : overrides the model's RoPE parameters, e.g. ``{rope_type: yarn, factor: 4.0}``.
    architecture : the keys of the model's ``config.json``, used by ``init=random``.
    suits : sizes that suit this model.
    """

    name: str
    path: str
    init: str = "pretrained"
    revision: str | None = None
    rope_scaling: dict[str, Any] | None = None
    architecture: dict[str, Any] | None = None
    suits: Suits = field(default_factory=Suits)

    def __post_init__(self) -> None:
        _one_of("model.init", self.init, ("pretrained", "random"))
        _require(
            self.init == "pretrained" or self.architecture is not None,
            "model.init",
            self.init,
            "random needs model.architecture (the shipped model/*.yaml carry it)",
        )


@dataclass(frozen=True)
class DataConfig:
    """Text, and how it is cut into chunks.

    Attributes
    ----------
    source : ``stdlib`` (the running interpreter's library), ``text`` (local files) or ``hub`` (streamed).
    path : file, folder or glob of txt, jsonl or parquet, .gz and .zst too (``text``); dataset id (``hub``).
    heldout_path : held-out documents for ``text``; None holds out a tenth of the documents, by a hash of their name, or the
        last tenth of a lone document.
    subset, split, column : of a Hub dataset; ``column`` also of jsonl and parquet.
    seq_len : tokens a chunk.
    num_chunks : at most so many chunks (None: all; a streamed source needs a number).
    needles : weave sentences into the text that are said once and again much later, as the embedded model was trained on:
        plain text seldom asks for what ``eval=needle`` asks for.
    """

    source: str
    path: str | None = None
    heldout_path: str | None = None
    subset: str | None = None
    split: str = "train"
    column: str = "text"
    seq_len: int = 4096
    num_chunks: int | None = None
    needles: bool = False

    def __post_init__(self) -> None:
        _one_of("data.source", self.source, ("stdlib", "text", "hub"))
        _require(self.source == "stdlib" or bool(self.path), "data.path", self.path, f"data={self.source} needs a path")
        ok = self.source != "stdlib" or self.path is None
        _require(ok, "data.path", self.path, "data=stdlib reads no path; add data=text or data=hub")
        _require(self.seq_len > 0, "data.seq_len", self.seq_len, "a positive number of tokens")
        _require(self.num_chunks is None or self.num_chunks > 0, "data.num_chunks", self.num_chunks, "null or positive")


@dataclass(frozen=True)
class TrainConfig:
    """One training run of the shared loop.

    Attributes
    ----------
    lr : peak learning rate.
    steps : optimizer steps.
    batch_size : chunks (or query batches) an optimizer step, over all processes.
    micro_batch_size : chunks that pass through the model at once on one device.
    schedule : a name of ``transformers.SchedulerType``, e.g. ``cosine``, ``linear``, ``constant``.
    warmup_steps, weight_decay, max_grad_norm : as usual; ``max_grad_norm=0`` does not clip.
    beta2 : decay of Adam's second moment.
    log_every, eval_every, save_every : optimizer steps between log lines, health checks (0: none) and checkpoints.
    num_workers : processes that prepare batches.
    compile : run the trained module through ``torch.compile``.
    """

    lr: float
    steps: int
    batch_size: int = 1
    micro_batch_size: int = 1
    schedule: str = "cosine"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    beta2: float = 0.999
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 100
    num_workers: int = 0
    compile: bool = False

    def __post_init__(self) -> None:
        for key in ("lr", "steps", "batch_size", "micro_batch_size", "log_every", "save_every"):
            ok = 0 < getattr(self, key) < math.inf
            _require(ok, f"train.{key}", getattr(self, key), "a positive number")
        for key in ("warmup_steps", "weight_decay", "max_grad_norm", "eval_every", "num_workers"):
            _require(0 <= getattr(self, key) < math.inf, f"train.{key}", getattr(self, key), "0 or more")
        _require(0 <= self.beta2 < 1, "train.beta2", self.beta2, "in [0, 1)")
        _require(
            self.batch_size % self.micro_batch_size == 0,
            "train.batch_size",
            self.batch_size,
            f"a multiple of train.micro_batch_size={self.micro_batch_size}",
        )


@dataclass(frozen=True)
class TrackerConfig:
    """Where figures go besides ``metrics.jsonl``: ``wandb`` (offline when there is no key) or ``none``."""

    kind: str = "wandb"
    project: str = "msattn"

    def __post_init__(self) -> None:
        _one_of("tracker.kind", self.kind, ("wandb", "none"))


@dataclass(frozen=True)
class GateConfig:
    """SeerAttention's AttnGate.

    Attributes
    ----------
    block_size : tokens a block (a power of two, 16 to 128).
    q_pool, k_pool : poolings that are concatenated, of avg, max, min.
    hidden : width of the gate's projections; None takes the head size.
    heads : ``query`` (one gate a query head) or ``kv``.
    rope : whether the gate rotates its pooled queries and keys at the blocks' starts.
    loss : ``mse``, ``kl`` or ``smooth_l1``.
    skip_rows : first row blocks that do not count in the loss.
    """

    block_size: int = 64
    q_pool: list[str] = field(default_factory=lambda: ["avg"])
    k_pool: list[str] = field(default_factory=lambda: ["max", "min"])
    hidden: int | None = None
    heads: str = "query"
    rope: bool = True
    loss: str = "mse"
    skip_rows: int = 0

    def __post_init__(self) -> None:
        ok = _power_of_two(self.block_size) and 16 <= self.block_size <= 128
        _require(ok, "gate.block_size", self.block_size, "a power of two from 16 to 128")
        for key, pools in (("gate.q_pool", self.q_pool), ("gate.k_pool", self.k_pool)):
            _require(
                bool(pools) and len(set(pools)) == len(pools),
                key,
                pools,
                f"one or more of {', '.join(POOLINGS)}, each once",
            )
            for pool in pools:
                _one_of(key, pool, POOLINGS)
        _one_of("gate.heads", self.heads, ("query", "kv"))
        _one_of("gate.loss", self.loss, LOSSES)
        _require(
            self.hidden is None or (self.hidden > 0 and self.hidden % 2 == 0),
            "gate.hidden",
            self.hidden,
            "null or even",
        )
        _require(self.skip_rows >= 0, "gate.skip_rows", self.skip_rows, "0 or more")


@dataclass(frozen=True)
class KMeansConfig:
    """Spherical k-means on keys.

    Attributes
    ----------
    num_buckets : buckets a key/value head.
    iterations : Lloyd iterations.
    num_prompts : chunks of ``data.seq_len`` tokens whose keys are clustered.
    normalize_keys : keys to unit length before clustering.
    rope : cluster keys after RoPE (the untrained baseline of seed 004) instead of before.
    """

    num_buckets: int = 1024
    iterations: int = 10
    num_prompts: int = 8
    normalize_keys: bool = False
    rope: bool = False

    def __post_init__(self) -> None:
        for key in ("num_buckets", "iterations", "num_prompts"):
            _require(getattr(self, key) > 0, f"kmeans.{key}", getattr(self, key), "a positive number")


@dataclass(frozen=True)
class QModelConfig:
    """SAAP's query classifier.

    Attributes
    ----------
    hidden : width of the hidden layer.
    heads : ``kv`` (one classifier a key/value head) or ``query``.
    num_prompts : chunks whose queries and targets are cached.
    queries_per_prompt : long-range queries kept a prompt and query head.
    long_range : a query counts when its top key is more than so many tokens away.
    causal : whether targets leave out keys after the query (the paper trains without).
    min_distance : targets count only keys farther than so many tokens (None: all keys).
    batch_queries : queries an optimizer step, a head.
    """

    hidden: int = 1024
    heads: str = "kv"
    num_prompts: int = 48
    queries_per_prompt: int = 1000
    long_range: int = 1024
    causal: bool = False
    min_distance: int | None = None
    batch_queries: int = 1000

    def __post_init__(self) -> None:
        for key in ("hidden", "num_prompts", "queries_per_prompt", "batch_queries"):
            _require(getattr(self, key) > 0, f"qmodel.{key}", getattr(self, key), "a positive number")
        _require(self.long_range >= 0, "qmodel.long_range", self.long_range, "0 or more tokens")
        _one_of("qmodel.heads", self.heads, ("query", "kv"))


@dataclass(frozen=True)
class SelectConfig:
    """From block scores to the blocks that are read.

    Attributes
    ----------
    policy : ``topk``, ``calibrated``, ``threshold``, ``nucleus``, ``token_budget`` or ``multiscale``.
    scores : where scores come from: ``gate``, or a baseline.
    sparsity : share of the causally visible blocks that is not read, in [0, 1): of each row (``topk``), or of each layer
        on average (``calibrated``, by thresholds that the gate learned from text).
    threshold : smallest row-normalised score that is read (``threshold``).
    mass : probability to collect (``nucleus``).
    tokens : keys a query block may read (``token_budget``).
    shares : of the visible blocks, best first, that are read whole, at half, a quarter and an eighth of their tokens
        (``multiscale``); what is left is skipped.
    sink_blocks : first blocks that are always read.
    block_size : tokens a block for scores other than the gate's own.
    seed : of ``random``.
    """

    policy: str = "topk"
    scores: str = "gate"
    sparsity: float = 0.9
    threshold: float = 0.002
    mass: float = 0.95
    tokens: int = 1024
    shares: list[float] = field(default_factory=lambda: [0.1, 0.1, 0.2, 0.4])
    sink_blocks: int = 0
    block_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("select.policy", self.policy, POLICIES)
        _one_of("select.scores", self.scores, SCORES)
        _require(0 <= self.sparsity < 1, "select.sparsity", self.sparsity, "in [0, 1)")
        _require(0 <= self.threshold < 1, "select.threshold", self.threshold, "in [0, 1)")
        _require(0 < self.mass <= 1, "select.mass", self.mass, "in (0, 1]")
        _require(self.tokens > 0, "select.tokens", self.tokens, "a positive number of keys")
        fits = len(self.shares) == 4 and min(self.shares) >= 0 and 0 < sum(self.shares) <= 1 + 1e-9
        _require(fits, "select.shares", self.shares, "four shares, for zoom 1, 2, 4 and 8, with a sum in (0, 1]")
        _require(self.sink_blocks >= 0, "select.sink_blocks", self.sink_blocks, "0 or more")
        ok = _power_of_two(self.block_size) and 16 <= self.block_size <= 128
        _require(ok, "select.block_size", self.block_size, "a power of two from 16 to 128")


@dataclass(frozen=True)
class PerplexityConfig:
    """``length`` tokens a document chunk, ``num_chunks`` of them, at each of ``sparsities``."""

    length: int = 4096
    num_chunks: int = 16
    sparsities: list[float] = field(default_factory=lambda: [0.5, 0.8, 0.9])

    def __post_init__(self) -> None:
        for sparsity in self.sparsities:
            _require(0 <= sparsity < 1, "eval.perplexity.sparsities", self.sparsities, "each in [0, 1)")
        for key in ("length", "num_chunks"):
            _require(getattr(self, key) > 0, f"eval.perplexity.{key}", getattr(self, key), "a positive number")


@dataclass(frozen=True)
class RecallConfig:
    """Attention mass read, on ``num_chunks`` chunks of ``length`` tokens: by block selections at ``sparsities``, by routing
    with ``probes`` buckets at ``num_queries`` decoding queries a chunk."""

    length: int = 4096
    num_chunks: int = 2
    num_queries: int = 64
    sparsities: list[float] = field(default_factory=lambda: [0.5, 0.8, 0.9])
    probes: list[int] = field(default_factory=lambda: [0, 1, 2, 4])

    def __post_init__(self) -> None:
        for key in ("length", "num_chunks", "num_queries"):
            _require(getattr(self, key) > 0, f"eval.recall.{key}", getattr(self, key), "a positive number")
        for sparsity in self.sparsities:
            _require(0 <= sparsity < 1, "eval.recall.sparsities", self.sparsities, "each in [0, 1)")
        for probes in self.probes:
            _require(probes >= 0, "eval.recall.probes", self.probes, "each 0 or more buckets")


@dataclass(frozen=True)
class NeedleConfig:
    """Needles in essays: a ``depths`` x ``lengths`` grid, ``samples`` a cell.

    ``haystack`` is a text file or folder (None: the held-out documents of ``data``); ``needles`` how many are hidden, one
    is asked for; ``sparsities`` for gates, ``probes`` for routing; ``question`` says whether the question's tokens are read
    ``dense`` or ``sparse`` when decoding is routed (the answer always is).
    """

    lengths: list[int] = field(default_factory=lambda: [4096])
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    samples: int = 8
    needles: int = 1
    haystack: str | None = None
    question: str = "sparse"
    sparsities: list[float] = field(default_factory=lambda: [0.8, 0.9])
    probes: list[int] = field(default_factory=lambda: [0, 1, 2, 4])

    def __post_init__(self) -> None:
        _one_of("eval.needle.question", self.question, ("dense", "sparse"))
        for key in ("samples", "needles"):
            _require(getattr(self, key) > 0, f"eval.needle.{key}", getattr(self, key), "a positive number")
        for key in ("lengths", "depths"):
            _require(bool(getattr(self, key)), f"eval.needle.{key}", getattr(self, key), "one or more")
        for length in self.lengths:
            _require(length > 0, "eval.needle.lengths", self.lengths, "each a positive number of tokens")
        for depth in self.depths:
            _require(0 <= depth <= 1, "eval.needle.depths", self.depths, "each in [0, 1]")
        for sparsity in self.sparsities:
            _require(0 <= sparsity < 1, "eval.needle.sparsities", self.sparsities, "each in [0, 1)")
        for probes in self.probes:
            _require(probes >= 0, "eval.needle.probes", self.probes, "each 0 or more buckets")


@dataclass(frozen=True)
class EvalConfig:
    """``tasks`` to run, each with its own section; ``baselines``: block scores that stand beside the gate's."""

    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    baselines: list[str] = field(default_factory=lambda: [s for s in SCORES if s != "gate"])
    perplexity: PerplexityConfig = field(default_factory=PerplexityConfig)
    recall: RecallConfig = field(default_factory=RecallConfig)
    needle: NeedleConfig = field(default_factory=NeedleConfig)

    def __post_init__(self) -> None:
        for task in self.tasks:
            _one_of("eval.tasks", task, TASKS)
        for baseline in self.baselines:
            _one_of("eval.baselines", baseline, SCORES[1:])


@dataclass(frozen=True)
class BenchConfig:
    """What is measured of a kernel. None stands for what suits the machine: see ``conf/bench/default.yaml``.

    Attributes
    ----------
    lengths : numbers of keys.
    heads : query heads and key/value heads.
    head_size : a multiple of 8 up to 256.
    dtype : ``auto`` (bfloat16 on CUDA, float32 on CPU), ``float32``, ``float16`` or ``bfloat16``.
    batch : sequences.
    sparsities : shares of the visible keys that are not read, for operations that select, each in [0, 1).
    direction : ``forward``, or ``backward`` alone.
    queries : numbers of queries, 1 to 16, for ``flash_decode``.
    peers : what stands beside the operation, where the operation and the machine have it.
    sweep : try the kernel's tiles instead of timing peers.
    """

    lengths: list[int] | None = None
    heads: list[int] | None = None
    head_size: int = 128
    dtype: str = "auto"
    batch: int = 1
    sparsities: list[float] = field(default_factory=lambda: [0.9, 0.8, 0.5])
    direction: str = "forward"
    queries: list[int] = field(default_factory=lambda: [1, 4, 16])
    peers: list[str] = field(default_factory=lambda: ["flash", "cudnn", "flex", "eager", "block_sparse", "product"])
    sweep: bool = False

    def __post_init__(self) -> None:
        for key in ("lengths", "sparsities", "queries"):
            _require(getattr(self, key) != [], f"bench.{key}", getattr(self, key), "one or more")
        for length in self.lengths or ():
            _require(length > 0, "bench.lengths", self.lengths, "each a positive number of tokens")
        for sparsity in self.sparsities:
            _require(0 <= sparsity < 1, "bench.sparsities", self.sparsities, "each in [0, 1)")
        for number in self.queries:
            _require(1 <= number <= 16, "bench.queries", self.queries, "each from 1 to 16")
        heads = self.heads or [1, 1]
        ok = len(heads) == 2 and min(heads) > 0 and heads[0] % heads[1] == 0
        _require(ok, "bench.heads", self.heads, "query heads and key/value heads, the first a multiple of the second")
        ok = 0 < self.head_size <= 256 and self.head_size % 8 == 0
        _require(ok, "bench.head_size", self.head_size, "a multiple of 8 up to 256")
        _require(self.batch > 0, "bench.batch", self.batch, "a positive number of sequences")
        _one_of("bench.dtype", self.dtype, DTYPES)
        _one_of("bench.direction", self.direction, ("forward", "backward"))
        for peer in self.peers:
            _one_of("bench.peers", peer, PEERS)


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
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        _require(bool(self.outputs.strip()), "outputs", repr(self.outputs), "a folder")
        _require(0 <= self.seed < 2**32, "seed", self.seed, "0 to 4294967295")

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
        _one_of("op", self.op, OPERATIONS)
        ok = self.bench.direction == "forward" or self.op in DIFFERENTIABLE
        _require(ok, "bench.direction", self.bench.direction, f"{self.op} has no backward pass; {', '.join(DIFFERENTIABLE)} do")

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
        _one_of("dtype", self.dtype, DTYPES)
        _require(self.name not in ("", ".", "..") and "/" not in self.name, "name", self.name, "a folder name")

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
        _require(size <= self.data.seq_len, "gate.block_size", size, f"at most data.seq_len={self.data.seq_len}")
        _require(not self.train.compile, "train.compile", self.train.compile, "false: the gates' teacher runs eagerly")
        rows = -(-self.data.seq_len // size)
        _require(self.gate.skip_rows < rows, "gate.skip_rows", self.gate.skip_rows, f"fewer than a chunk's {rows} row blocks")


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
        _require(self.probes >= 0, "probes", self.probes, "0 or more buckets")
        _require(self.recent >= 1, "recent", self.recent, "1 or more tokens")
        _require(self.sink >= 0, "sink", self.sink, "0 or more tokens")


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
        _require(self.max_new_tokens > 0, "max_new_tokens", self.max_new_tokens, "a positive number")


def known_keys(schema: type, prefix: str = "") -> list[str]:
    """Every dotted key of a config dataclass, for nearest-key hints."""
    keys: list[str] = []
    for item in fields(schema):
        keys.append(prefix + item.name)
        if isinstance(item.type, type) and is_dataclass(item.type):
            keys += known_keys(item.type, f"{prefix}{item.name}.")
    return keys


def nearest(key: str, accepted: list[str]) -> str:
    """`` (did you mean X?)`` for the accepted key nearest to ``key``, or nothing."""
    near = difflib.get_close_matches(key, accepted, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _unfreeze(node: Any, schema: type) -> None:
    """OmegaConf marks the nodes of frozen dataclasses read-only; composing needs them open, the resulting object is frozen."""
    from omegaconf import OmegaConf

    for item in fields(schema):
        if isinstance(item.type, type) and is_dataclass(item.type):
            if OmegaConf.is_missing(node, item.name):
                OmegaConf.set_readonly(node, False)
                node[item.name] = OmegaConf.structured(item.type)
            _unfreeze(node[item.name], item.type)
    OmegaConf.set_readonly(node, False)


def typed(config: Any, schema: type[Config]) -> Config:
    """Merge a composed OmegaConf ``config`` onto ``schema``.

    Raises
    ------
    UserError : an unknown key (the nearest is named), a wrong type, or a value out of range.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

    try:
        target = OmegaConf.structured(schema)
        _unfreeze(target, schema)
        target.merge_with(config)
        return OmegaConf.to_object(target)  # pyright: ignore[reportReturnType]
    except UserError:
        raise
    except ConfigKeyError as error:
        key = error.full_key or str(error.key)
        raise UserError(f"unknown key {key}{nearest(key, known_keys(schema))}") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or error.key}: {str(error).splitlines()[0]}") from error
