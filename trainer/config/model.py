"""Which model, and the sizes that suit it."""

from dataclasses import dataclass, field
from typing import Any

from msattn.trainer.config.values import one_of, require


@dataclass(frozen=True)
class ModelPresets:
    """Sizes that suit one model; other groups refer to them as ``${model.presets.*}``.

    Attributes
    ----------
    seq_len : training chunk, in tokens.
    num_buckets : k-means buckets a key/value head.
    long_range : distance, in tokens, beyond which a query's top key makes it a training query.
    qmodel_hidden : width of the query classifier.
    qmodel_steps, qmodel_lr : its optimizer steps and learning rate.
    qmodel_residual : whether it corrects the products of query and centroids instead of replacing them.
    gate_lr, gate_steps, gate_batch : learning rate of the gates, optimizer steps, chunks a step.
    gate_loss, gate_q_pool, gate_k_pool, gate_rope : their loss and poolings, and whether they rotate.
    kmeans_prompts, qmodel_prompts : chunks whose keys are clustered, whose queries are learnt from.
    probes : buckets visited a query.
    recent : dense window, in tokens.
    needles : whether training text has needles woven in.
    eval_chunks : held-out chunks that perplexity is measured on.
    needle_samples : needles a cell of the depth x length grid.
    eval_probes : the numbers of probes at which routing is measured (0: the dense window alone).
    latency_lengths, decoding_lengths : prompts and caches, in tokens, at which speed is measured.
    """

    seq_len: int = 65536
    num_buckets: int = 1024
    long_range: int = 1024
    qmodel_hidden: int = 1024
    qmodel_steps: int = 40000
    qmodel_lr: float = 1e-5
    qmodel_residual: bool = False
    gate_lr: float = 1e-3
    gate_steps: int = 500
    gate_batch: int = 16
    gate_loss: str = "mse"
    gate_q_pool: list[str] = field(default_factory=lambda: ["avg"])
    gate_k_pool: list[str] = field(default_factory=lambda: ["max", "min"])
    gate_rope: bool = True
    kmeans_prompts: int = 8
    qmodel_prompts: int = 48
    probes: int = 32
    recent: int = 2047
    needles: bool = False
    eval_chunks: int = 16
    needle_samples: int = 8
    eval_probes: list[int] = field(default_factory=lambda: [0, 4, 16, 32])
    latency_lengths: list[int] = field(default_factory=lambda: [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072])
    decoding_lengths: list[int] = field(default_factory=lambda: [131072, 524288])


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
    presets : sizes that suit this model.
    """

    name: str
    path: str
    init: str = "pretrained"
    revision: str | None = None
    rope_scaling: dict[str, Any] | None = None
    architecture: dict[str, Any] | None = None
    presets: ModelPresets = field(default_factory=ModelPresets)

    def __post_init__(self) -> None:
        one_of("model.init", self.init, ("pretrained", "random"))
        require(
            self.init == "pretrained" or self.architecture is not None,
            "model.init",
            self.init,
            "random needs model.architecture (the shipped model/*.yaml carry it)",
        )
