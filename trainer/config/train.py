"""Configuration of training: optimizer, tracker, gates, k-means and query classifiers."""

from dataclasses import dataclass, field

from msattn.trainer.config.values import check, choices, power_of_two, require, within

POOLINGS = ("avg", "max", "min")
HEADS = ("query", "kv")
PHASES = ("prefill", "decode")
SOURCES = ("cache", "online")
LOSSES = ("mse", "kl", "smooth_l1")
ATTENTIONS = ("plain", "multi_token")
MAX_KERNEL = 32  # queries, and keys, of a kernel of conv_attention
MAX_HEAD_SIZE = 256
AUTO = "auto"


@dataclass(frozen=True)
class TrainConfig:
    """Optimizer settings of the shared training loop.

    Attributes
    ----------
    lr : peak learning rate.
    steps : optimizer steps.
    batch_size : chunks (or query batches) of an optimizer step, over all processes.
    micro_batch_size : chunks (or query batches) of a forward pass on one device; ``auto``: as many as the device is faster
        with and has memory for. The result depends on it only by rounding.
    schedule : a name of ``transformers.SchedulerType``, e.g. ``cosine``, ``linear``, ``constant``.
    warmup_steps, weight_decay : optimizer steps of warm-up; weight decay of AdamW.
    max_grad_norm : gradients are clipped to this norm; 0 does not clip.
    beta2 : decay of AdamW's second moment.
    log_every, eval_every, save_every : optimizer steps between log lines, evaluations (0: none) and checkpoints.
    num_workers : processes that prepare batches.
    compile : run the trained module through ``torch.compile``.
    """

    lr: float = field(metadata=within("(0, 1000]"))
    steps: int = field(metadata=within("[1, 1e7]"))
    batch_size: int = field(default=1, metadata=within("[1, 65536]"))
    micro_batch_size: int | str = field(default=AUTO, metadata=choices((AUTO,)) | within("[1, 65536]"))
    schedule: str = "cosine"
    warmup_steps: int = field(default=0, metadata=within("[0, 1e7]"))
    weight_decay: float = field(default=0.0, metadata=within("[0, 1000]"))
    max_grad_norm: float = field(default=1.0, metadata=within("[0, 1e9]"))
    beta2: float = field(default=0.999, metadata=within("[0, 1)"))
    log_every: int = field(default=10, metadata=within("[1, 1e7]"))
    eval_every: int = field(default=0, metadata=within("[0, 1e7]"))
    save_every: int = field(default=100, metadata=within("[1, 1e7]"))
    num_workers: int = field(default=0, metadata=within("[0, 64]"))
    compile: bool = False

    def __post_init__(self) -> None:
        check(self, "train.")
        require(
            self.batch_size % self.least_micro_batch == 0,
            "train.batch_size",
            self.batch_size,
            f"a multiple of train.micro_batch_size={self.micro_batch_size}",
        )

    @property
    def least_micro_batch(self) -> int:
        """``micro_batch_size``, or 1 for ``auto``, before the training loop has chosen a number."""
        return self.micro_batch_size if isinstance(self.micro_batch_size, int) else 1


@dataclass(frozen=True)
class FinetuneTrainConfig(TrainConfig):
    """Training of a whole model; weights, gradients and optimizer state take 16 bytes per parameter.

    Attributes
    ----------
    activation_checkpointing : keep only the input of each layer and recompute the layer in the backward pass.
    fsdp : shard weights, gradients and optimizer state over the processes (FSDP2) instead of a copy on each.
    """

    activation_checkpointing: bool = True
    fsdp: bool = False


@dataclass(frozen=True)
class TrackerConfig:
    """Tracker of metrics in addition to ``metrics.jsonl``.

    Attributes
    ----------
    kind : ``wandb`` (offline without an API key), ``auto`` (the same, but says how an offline run is uploaded only where
        wandb is set up) or ``none``.
    project : project of Weights & Biases.
    group : runs that wandb shows together (None: the experiment, or else the sweep, if there is one).
    upload : upload the files of gates, k-means and query classifiers; otherwise wandb records only where they are.
    """

    kind: str = field(default="auto", metadata=choices(("auto", "wandb", "none")))
    project: str = "msattn"
    group: str | None = None
    upload: bool = False

    def __post_init__(self) -> None:
        check(self, "tracker.")


@dataclass(frozen=True)
class GateConfig:
    """SeerAttention's AttnGate.

    Attributes
    ----------
    phase : ``prefill`` (queries are pooled by block) or ``decode`` (single queries, one gate for each key/value head).
    block_size : tokens of a block (a power of two, 16 to 128).
    q_pool, k_pool : poolings that are concatenated: avg, max, min. Decode gates have no ``q_pool``.
    hidden : width of the gate's projections; None takes the head size.
    heads : ``query`` (one gate for each query head) or ``kv`` (one for each key/value head); ``prefill`` only.
    rope : apply RoPE to pooled queries and keys, at the first position of their block, and to single queries at their own.
    qk_norm : RMSNorm of projected queries and keys before RoPE; ``decode`` only.
    loss : ``mse``, ``kl`` or ``smooth_l1``.
    skip_rows : number of first row blocks that the loss leaves out.
    queries : query positions of a chunk that train decode gates, at random.
    sink, recent : numbers of first and last keys of a query that targets of decode gates leave out, as they are read anyway.
    """

    phase: str = field(default="prefill", metadata=choices(PHASES))
    block_size: int = field(default=64, metadata=within("[16, 128]"))
    q_pool: list[str] = field(default_factory=lambda: ["avg"], metadata=choices(POOLINGS))
    k_pool: list[str] = field(default_factory=lambda: ["max", "min"], metadata=choices(POOLINGS))
    hidden: int | None = field(default=None, metadata=within("[2, 16384]"))
    heads: str = field(default="query", metadata=choices(HEADS))
    rope: bool = True
    qk_norm: bool = False
    loss: str = field(default="mse", metadata=choices(LOSSES))
    skip_rows: int = field(default=0, metadata=within("[0, 1e9]"))
    queries: int = field(default=1024, metadata=within("[1, 1e9]"))
    sink: int = field(default=1, metadata=within("[0, 1e9]"))
    recent: int = field(default=0, metadata=within("[0, 1e9]"))

    @property
    def kind(self) -> str:
        """The kind of the artifact, which is the name of its folder."""
        return {"prefill": "gate", "decode": "decode_gate"}[self.phase]

    def __post_init__(self) -> None:
        check(self, "gate.")
        require(power_of_two(self.block_size), "gate.block_size", self.block_size, "a power of two from 16 to 128")
        for key, pools in (("gate.q_pool", self.q_pool), ("gate.k_pool", self.k_pool)):
            require(
                bool(pools) and len(set(pools)) == len(pools),
                key,
                pools,
                f"one or more of {', '.join(POOLINGS)}, each once",
            )
        require(self.hidden is None or self.hidden % 2 == 0, "gate.hidden", self.hidden, "null or even")
        allowed = self.phase == "decode" or not self.qk_norm
        require(allowed, "gate.qk_norm", self.qk_norm, "accepted with gate.phase=decode alone")


@dataclass(frozen=True)
class KMeansConfig:
    """Spherical k-means on keys.

    Attributes
    ----------
    num_buckets : buckets of each key/value head.
    iterations : Lloyd iterations.
    num_prompts : chunks of ``data.seq_len`` tokens whose keys are clustered.
    points_per_bucket : keys of each head, for each bucket, that are drawn at random from those of all chunks (None: all keys).
        Only these are kept in memory; 256 is the default of Faiss.
    normalize_keys : scale keys to unit length before clustering.
    balance : buckets with more than this multiple of the mean number of keys are split while they form (None: no limit).
    rope : cluster keys after RoPE (an untrained baseline) instead of before.
    engine : ``batched`` (all heads of a layer at once, with msattn's kernels), ``faiss`` (one head after another, on the GPU if
        Faiss supports it; without ``balance``) or ``auto``: ``batched`` on CUDA and with ``balance``, else ``faiss``.
    """

    num_buckets: int = field(default=1024, metadata=within("[1, 1e6]"))
    iterations: int = field(default=10, metadata=within("[1, 1e6]"))
    num_prompts: int = field(default=8, metadata=within("[1, 1e6]"))
    points_per_bucket: int | None = field(default=None, metadata=within("[1, 1e6]"))
    normalize_keys: bool = False
    balance: float | None = field(default=None, metadata=within("(1, 1e6]"))
    rope: bool = False
    engine: str = field(default="auto", metadata=choices(("auto", "batched", "faiss")))

    def __post_init__(self) -> None:
        check(self, "kmeans.")
        fits = self.engine != "faiss" or self.balance is None
        require(fits, "kmeans.balance", self.balance, "accepted is null with kmeans.engine=faiss; batched balances buckets")


@dataclass(frozen=True)
class QModelConfig:
    """SAAP's query classifier.

    Attributes
    ----------
    source : ``cache`` (queries and targets of all chunks are computed once, kept on disk and used many times) or ``online``
        (the model runs during training, and every batch has new queries of one chunk, as in the paper).
    hidden : width of the hidden layer.
    heads : ``kv`` (one classifier for each key/value head) or ``query`` (one for each query head).
    num_prompts : chunks whose queries train the classifiers.
    queries_per_prompt : cached queries of each chunk and query head; held-out ones with either source.
    steps_per_prompt : batches that are drawn each time the model runs over a chunk (``online``).
    prompts_at_once : chunks whose batches alternate at random (``online``); their batches are kept in memory.
    long_range : training queries are those whose top key is more than this many tokens away (0: all queries).
    causal : exclude keys after the query from the targets (the paper includes them).
    min_distance : targets count only keys farther than this many tokens (None: all keys).
    batch_queries : queries of an optimizer step, for each head.
    residual : add the network's logits to the products of query and centroids.
    layers_at_once : layers that train together on one device (None: as many as fit its free memory); does not change results.
    """

    source: str = field(default="cache", metadata=choices(SOURCES))
    hidden: int = field(default=1024, metadata=within("[1, 16384]"))
    heads: str = field(default="kv", metadata=choices(HEADS))
    num_prompts: int = field(default=48, metadata=within("[1, 1e6]"))
    queries_per_prompt: int = field(default=1000, metadata=within("[1, 1e6]"))
    steps_per_prompt: int = field(default=25, metadata=within("[1, 1e6]"))
    prompts_at_once: int = field(default=2, metadata=within("[1, 1e6]"))
    long_range: int = field(default=1024, metadata=within("[0, 1e9]"))
    causal: bool = False
    min_distance: int | None = field(default=None, metadata=within("[0, 1e9]"))
    batch_queries: int = field(default=1000, metadata=within("[1, 1e6]"))
    residual: bool = False
    layers_at_once: int | None = field(default=None, metadata=within("[1, 1e6]"))

    def __post_init__(self) -> None:
        check(self, "qmodel.")


@dataclass(frozen=True)
class MtaConfig:
    """The block-retrieval task of Multi-Token Attention, and the Llama model that learns it from random weights.

    Attributes
    ----------
    attention : ``multi_token`` (a convolution of ``asked`` queries and ``2 * letters - 1`` keys in each head) or ``plain``.
    blocks : blocks of a problem.
    letters : distinct letters of a block.
    asked : letters of the question.
    test_problems : unseen problems that an evaluation solves.
    num_layers, num_heads : layers, and attention heads of a layer.
    hidden_size : width of the model; the MLPs are four times as wide.
    """

    attention: str = field(default="multi_token", metadata=choices(ATTENTIONS))
    blocks: int = field(default=50, metadata=within("[1, 10000]"))
    letters: int = field(default=5, metadata=within("[1, 25]"))
    asked: int = field(default=2, metadata=within("[1, 25]"))
    test_problems: int = field(default=1000, metadata=within("[1, 1e6]"))
    num_layers: int = field(default=4, metadata=within("[1, 256]"))
    num_heads: int = field(default=2, metadata=within("[1, 256]"))
    hidden_size: int = field(default=256, metadata=within("[8, 65536]"))

    def __post_init__(self) -> None:
        check(self, "mta.")
        require(self.asked <= self.letters, "mta.asked", self.asked, f"at most mta.letters={self.letters}")
        longest = (MAX_KERNEL + 1) // 2
        fits = self.attention == "plain" or self.letters <= longest
        require(fits, "mta.letters", self.letters, f"at most {longest} with mta.attention=multi_token")
        size, rest = divmod(self.hidden_size, self.num_heads)
        fits = rest == 0 and size % 8 == 0 and size <= MAX_HEAD_SIZE
        accepted = f"mta.num_heads={self.num_heads} times a head size that is a multiple of 8 up to {MAX_HEAD_SIZE}"
        require(fits, "mta.hidden_size", self.hidden_size, accepted)
