"""Configuration of training: optimizer, tracker, gates, k-means and query classifiers."""

from typing import Annotated

from annotated_types import Interval, MinLen

from msattn.kernels.common.choices import POOLINGS
from msattn.trainer.config.schema import (
    BlockSize,
    Count,
    Flag,
    Int,
    Number,
    OneOf,
    Steps,
    Text,
    Tokens,
    TokensOrZero,
    key,
    schema,
)
from msattn.trainer.config.sizes import BlockSizes
from msattn.trainer.config.values import require

TARGETS = ("max", "mass", "mean_mass")
LOSSES = ("mse", "kl", "smooth_l1")
MAX_KERNEL = 32  # queries, and keys, of a kernel of conv_attention
MAX_MTA_HEAD_SIZE = 256
AUTO = "auto"
# The members of transformers.SchedulerType that need only a number of steps.
SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
)

StepsOrZero = Annotated[Int, Interval(ge=0, le=10**7)]
Batch = Annotated[Int, Interval(ge=1, le=65536)]
Rate = Annotated[Number, Interval(gt=0, le=1000)]
Width = Annotated[Int, Interval(ge=1, le=16384)]
Pools = Annotated[list[Annotated[Text, OneOf(POOLINGS)]], MinLen(1)]
Loss = Annotated[Text, OneOf(LOSSES)]
HeadsOf = Annotated[Text, OneOf(("query", "kv"))]
UpTo256 = Annotated[Int, Interval(ge=1, le=256)]
Letters = Annotated[Int, Interval(ge=1, le=25)]


@schema("train.")
class TrainConfig:
    """Optimizer settings of the shared training loop.

    A batch consists of chunks, of query batches for query classifiers, or of problems for
    ``train-mta``. Results depend on ``micro_batch_size`` only by rounding.
    """

    lr: Rate = key("peak learning rate")
    steps: Steps = key("optimizer steps")
    batch_size: Batch = key(
        "chunks (or query batches, or problems) per optimizer step, over all processes", default=1
    )
    micro_batch_size: Annotated[Text, OneOf((AUTO,))] | Batch = key(
        "chunks per forward pass on one device; auto: as many as increase the speed and fit in "
        "memory",
        default=AUTO,
    )
    schedule: Annotated[Text, OneOf(SCHEDULES)] = key(
        "learning rate schedule, as transformers.SchedulerType", default="cosine"
    )
    warmup_steps: StepsOrZero = key("optimizer steps of linear warm-up", default=0)
    weight_decay: Annotated[Number, Interval(ge=0, le=1000)] = key(
        "weight decay of AdamW", default=0.0
    )
    max_grad_norm: Annotated[Number, Interval(ge=0, le=10**9)] = key(
        "norm to which gradients are clipped; 0: no clipping", default=1.0
    )
    beta2: Annotated[Number, Interval(ge=0, lt=1)] = key(
        "decay of AdamW's second moment", default=0.999
    )
    log_every: Steps = key("optimizer steps between log lines", default=10)
    eval_every: StepsOrZero = key(
        "optimizer steps between evaluations on held-out text; 0: only at the end", default=0
    )
    save_every: Steps = key("optimizer steps between checkpoints", default=100)
    num_workers: Annotated[Int, Interval(ge=0, le=64)] = key(
        "worker processes that prepare batches; 0: the training process does", default=0
    )
    compile: Flag = key(
        "compile the trained module with torch.compile; not for gates, and in finetune only with "
        "select.sparsity=0",
        default=False,
    )

    def __post_init__(self) -> None:
        size = self.batch_size
        accepted = f"expected a multiple of train.micro_batch_size={self.micro_batch_size}"
        require(size % self.least_micro_batch == 0, "train.batch_size", size, accepted)
        accepted = f"expected at most train.steps={self.steps}"
        require(self.warmup_steps <= self.steps, "train.warmup_steps", self.warmup_steps, accepted)

    @property
    def least_micro_batch(self) -> int:
        """``micro_batch_size``, or 1 for ``auto``, before the training loop has chosen a number."""
        return self.micro_batch_size if isinstance(self.micro_batch_size, int) else 1


@schema("train.")
class FinetuneTrainConfig(TrainConfig):
    """Training of a whole model; weights, gradients and optimizer state take 16 bytes per
    parameter.
    """

    activation_checkpointing: Flag = key(
        "keep only the inputs of layers and recompute each layer in the backward pass", default=True
    )
    fsdp: Flag = key(
        "shard weights, gradients and optimizer state over the GPUs (FSDP2) instead of copying "
        "them to each",
        default=False,
    )


@schema("tracker.")
class TrackerConfig:
    """Tracker of metrics in addition to ``metrics.jsonl``."""

    kind: Annotated[Text, OneOf(("auto", "wandb", "none"))] = key(
        "auto, wandb or none", default="auto"
    )
    project: Text = key("Weights & Biases project", default="msattn")
    group: Text | None = key(
        "group under which runs are shown together; null: the experiment or the sweep, if any",
        default=None,
    )
    upload: Flag = key(
        "upload gates, k-means and query classifiers; false: record only their location",
        default=False,
    )


@schema("gate.")
class GateConfig:
    """SeerAttention's AttnGate."""

    phase: Annotated[Text, OneOf(("prefill", "decode"))] = key(
        "prefill: gates for blocks of queries; decode: gates for single queries, one for each "
        "key/value head",
        default="prefill",
    )
    block_size: BlockSize = key("tokens per block; a power of two from 16 to 128", default=64)
    key_block_size: BlockSize | None = key(
        "prefill: keys per block, if they are fewer than its queries, e.g. 16; null: "
        "gate.block_size",
        default=None,
    )
    q_pool: Pools = key(
        "prefill: poolings of a block's queries, concatenated: avg, max, min", default=["avg"]
    )
    k_pool: Pools = key(
        "poolings of a block's keys, concatenated: avg, max, min", default=["max", "min"]
    )
    hidden: Annotated[Int, Interval(ge=2, le=16384)] | None = key(
        "width of the projections; null: the head size", default=None
    )
    heads: HeadsOf = key(
        "prefill: one gate for each query head, or kv: one for each key/value head", default="query"
    )
    rope: Flag | Annotated[Text, OneOf(("model",))] = key(
        "true: apply RoPE to single queries, and to pooled queries and keys at the first position "
        "of their block; model: pool queries and keys after the model's RoPE (the paper's "
        "baseline); false: use no positions",
        default=True,
    )
    qk_norm: Flag = key(
        "decode: apply RMSNorm to projected queries and keys, before RoPE", default=False
    )
    target: Annotated[Text, OneOf(TARGETS)] | None = key(
        "prefill: pooling of the block map that gates learn; mass: sum of probabilities over a "
        "block's keys, maximum over the row block's queries; mean_mass: the same with the mean "
        "over queries; max (the paper): the largest probability; null: mass or mean_mass, "
        "whichever true map changes predictions less",
        default=None,
    )
    mean_weight: Annotated[Number, Interval(ge=0, le=100)] | None = key(
        "prefill: weight of the scores of mean-pooled queries and keys after RoPE, which a trained "
        "gate adds to its own before the softmax; 0: none, as in the paper; null: the one of 0, "
        "0.2, 0.5 and 1 that changes predictions least",
        default=None,
    )
    loss: Loss = key("mse (the paper), kl or smooth_l1", default="mse")
    skip_rows: TokensOrZero = key("number of first row blocks that the loss ignores", default=0)
    queries: Tokens = key(
        "decode: number of random query positions of each chunk used for training", default=1024
    )
    sink: TokensOrZero = key(
        "decode: number of first keys that the targets ignore, because decoding always reads them",
        default=1,
    )
    recent: TokensOrZero = key(
        "decode: number of last keys that the targets ignore, because decoding always reads them; "
        "0: none, as in the paper",
        default=0,
    )

    @property
    def sizes(self) -> BlockSizes:
        """The queries and keys of a block."""
        return BlockSizes(self.block_size, self.key_block_size or self.block_size)

    @property
    def cached_pools(self) -> tuple[str, ...]:
        """The poolings of keys that a cache keeps; ``rope`` is the mean after RoPE."""
        return (*self.k_pool, *["rope"] * (self.phase == "prefill" and self.mean_weight != 0))

    @property
    def kind(self) -> str:
        """The kind of the artifact, which is the name of its folder."""
        return {"prefill": "gate", "decode": "decode_gate"}[self.phase]

    def __post_init__(self) -> None:
        for name, pools in (("gate.q_pool", self.q_pool), ("gate.k_pool", self.k_pool)):
            require(
                len(set(pools)) == len(pools),
                name,
                pools,
                f"expected one or more of {', '.join(POOLINGS)}, each once",
            )
        require(
            self.hidden is None or self.hidden % 2 == 0,
            "gate.hidden",
            self.hidden,
            "expected null or an even number",
        )
        decode = self.phase == "decode"
        allowed = not decode or self.key_block_size is None
        require(
            allowed,
            "gate.key_block_size",
            self.key_block_size,
            "allowed only with gate.phase=prefill",
        )
        BlockSizes.configured("gate", self.block_size, self.key_block_size)  # may refuse them
        fits = not decode or self.rope != "model"
        require(fits, "gate.rope", self.rope, "expected true or false with gate.phase=decode")
        allowed = decode or not self.qk_norm
        require(allowed, "gate.qk_norm", self.qk_norm, "allowed only with gate.phase=decode")


@schema("kmeans.")
class KMeansConfig:
    """Spherical k-means on keys. The keys that are clustered are kept in memory; 256 a bucket is
    the default of Faiss.
    """

    num_buckets: Count = key("buckets of each key/value head", default=1024)
    iterations: Count = key("Lloyd iterations", default=10)
    num_prompts: Count = key("chunks whose keys are clustered", default=8)
    points_per_bucket: Count | None = key(
        "keys per head and bucket that are sampled from all chunks; null: all keys", default=None
    )
    normalize_keys: Flag = key("scale keys to unit length first", default=False)
    balance: Annotated[Number, Interval(gt=1, le=10**6)] | None = key(
        "split buckets with more than this multiple of the mean number of keys, e.g. 1.5; null: "
        "no limit",
        default=None,
    )
    rope: Flag = key("true: cluster keys after RoPE, a baseline", default=False)
    engine: Annotated[Text, OneOf(("auto", "batched", "faiss"))] = key(
        "batched (all heads of a layer at once), faiss (one head at a time), or auto: faiss on a "
        "CPU without balance, otherwise batched",
        default="auto",
    )

    def __post_init__(self) -> None:
        fits = self.engine != "faiss" or self.balance is None
        require(
            fits,
            "kmeans.balance",
            self.balance,
            "expected null with kmeans.engine=faiss; batched balances buckets",
        )

    def num_sampled(self, num_keys: int) -> int:
        """Returns how many of the ``num_keys`` keys of each head are clustered."""
        return (
            num_keys
            if self.points_per_bucket is None
            else min(num_keys, self.points_per_bucket * self.num_buckets)
        )


@schema("qmodel.")
class QModelConfig:
    """SAAP's query classifier. The paper draws new queries at every step (``online``), and its
    targets include later keys.
    """

    source: Annotated[Text, OneOf(("cache", "online"))] = key(
        "cache: compute queries and targets once and keep them on disk; online: draw new ones at "
        "every step",
        default="cache",
    )
    hidden: Width = key("width of the hidden layer", default=1024)
    heads: HeadsOf = key(
        "one classifier for each key/value head, or query: one for each query head", default="kv"
    )
    num_prompts: Count = key("chunks whose queries train the classifiers", default=48)
    queries_per_prompt: Count = key(
        "cached queries of each chunk and query head; with online only for held-out chunks",
        default=1000,
    )
    steps_per_prompt: Count = key(
        "online: batches drawn from each pass of the model over a chunk", default=25
    )
    prompts_at_once: Count = key(
        "online: chunks in memory at a time, whose batches alternate at random", default=2
    )
    long_range: TokensOrZero = key(
        "train only on queries whose top key is more than this many tokens away; 0: on all queries",
        default=1024,
    )
    causal: Flag = key("true: exclude keys after the query from the targets", default=False)
    min_distance: TokensOrZero | None = key(
        "targets count only keys that are more than this many tokens away; null: all keys",
        default=None,
    )
    batch_queries: Count = key("queries per optimizer step and head", default=1000)
    residual: Flag = key(
        "true: add the network's output to the products of query and centroids", default=False
    )
    layers_at_once: Count | None = key(
        "layers that train at a time on one device; null: as many as fit in free memory. Does not "
        "change results",
        default=None,
    )


@schema("mta.")
class MtaConfig:
    """The block-retrieval task of Multi-Token Attention, and the Llama model that learns it from
    random weights.

    The convolution of ``multi_token`` covers ``asked`` queries and ``2 * letters - 1`` keys in each
    head.
    """

    attention: Annotated[Text, OneOf(("plain", "multi_token"))] = key(
        "multi_token: scores convolved over the question's queries and a block's keys; or plain",
        default="multi_token",
    )
    mask: Annotated[Text, OneOf(("query", "key"))] = key(
        "scores that are masked with attention=multi_token: keys after their own query (query), "
        "or after the output's (key)",
        default="query",
    )
    blocks: Annotated[Int, Interval(ge=1, le=10000)] = key("blocks per problem", default=50)
    letters: Letters = key(
        "distinct letters per block; at most 16 with attention=multi_token", default=5
    )
    asked: Letters = key(
        "letters in the question, which occur together in only one block", default=2
    )
    test_problems: Count = key("number of unseen problems in an evaluation", default=1000)
    num_layers: UpTo256 = key("layers of the model", default=4)
    num_heads: UpTo256 = key("attention heads per layer", default=2)
    hidden_size: Annotated[Int, Interval(ge=8, le=65536)] = key(
        "width of the model; the MLPs are four times as wide", default=256
    )

    def __post_init__(self) -> None:
        require(
            self.asked <= self.letters,
            "mta.asked",
            self.asked,
            f"expected at most mta.letters={self.letters}",
        )
        longest = (MAX_KERNEL + 1) // 2
        fits = self.attention == "plain" or self.letters <= longest
        require(
            fits,
            "mta.letters",
            self.letters,
            f"expected at most {longest} with mta.attention=multi_token",
        )
        size, rest = divmod(self.hidden_size, self.num_heads)
        fits = rest == 0 and size % 8 == 0 and size <= MAX_MTA_HEAD_SIZE
        accepted = (
            f"expected mta.num_heads={self.num_heads} times a head size that is a multiple "
            f"of 8 up to {MAX_MTA_HEAD_SIZE}"
        )
        require(fits, "mta.hidden_size", self.hidden_size, accepted)
