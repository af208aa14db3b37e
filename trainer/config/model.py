"""Configuration of the language model, and sizes that depend on it."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msattn.trainer.config.values import check, choices, folder_name, require, within


@dataclass(frozen=True)
class ModelPresets:
    """Sizes that differ by model; the defaults of other groups refer to them as ``${model.presets.*}``.

    Attributes
    ----------
    seq_len : length of a chunk, in tokens.
    num_buckets : k-means buckets of each key/value head.
    long_range : training queries are those whose top key is more than this many tokens away.
    qmodel_hidden, qmodel_steps, qmodel_lr : width of the query classifier, its optimizer steps and learning rate.
    gate_steps, gate_batch : optimizer steps of the gates, and chunks of a step.
    gate_loss, gate_q_pool, gate_k_pool : loss and poolings of the gates.
    kmeans_prompts, qmodel_prompts : chunks whose keys are clustered, and whose queries train the classifier.
    points_per_bucket : keys that are clustered, for each bucket (None: all).
    qmodel_source, qmodel_steps_per_prompt, qmodel_schedule : source of training queries, batches of a run of the model over a
        chunk, and schedule of the learning rate.
    probes : buckets that each decoded query reads.
    recent : last keys that are always read, in tokens.
    data : text of a run that chooses none; None: training a pretrained model refuses, as the standard library is too little.
    needles : insert repeated sentences into training text.
    eval_chunks : held-out chunks for perplexity.
    needle_samples : needle prompts of each length and depth.
    eval_probes : numbers of probes with which routing is measured (0: only sink and recent keys are read).
    eval_keys : shares of the keys at which query classifiers are measured.
    latency_lengths, decoding_lengths : prompt lengths and cache lengths at which speed is measured, in tokens.
    throughput_length : length of the prompts of requests that are served together, in tokens.
    """

    seq_len: int = field(default=65536, metadata=within("[1, 1e9]"))
    num_buckets: int = field(default=1024, metadata=within("[1, 1e6]"))
    long_range: int = field(default=1024, metadata=within("[0, 1e9]"))
    qmodel_hidden: int = field(default=1024, metadata=within("[1, 16384]"))
    qmodel_steps: int = field(default=40000, metadata=within("[1, 1e7]"))
    qmodel_lr: float = field(default=1e-5, metadata=within("(0, 1000]"))
    gate_steps: int = field(default=500, metadata=within("[1, 1e7]"))
    gate_batch: int = field(default=16, metadata=within("[1, 65536]"))
    gate_loss: str = "mse"
    gate_q_pool: list[str] = field(default_factory=lambda: ["avg"])
    gate_k_pool: list[str] = field(default_factory=lambda: ["max", "min"])
    kmeans_prompts: int = field(default=8, metadata=within("[1, 1e6]"))
    qmodel_prompts: int = field(default=48, metadata=within("[1, 1e6]"))
    points_per_bucket: int | None = field(default=None, metadata=within("[1, 1e6]"))
    qmodel_source: str = "cache"
    qmodel_steps_per_prompt: int = field(default=25, metadata=within("[1, 1e6]"))
    qmodel_schedule: str = "cosine"
    probes: int = field(default=32, metadata=within("[0, 1e6]"))
    recent: int = field(default=2047, metadata=within("[1, 1e9]"))
    data: str | None = field(default=None, metadata=choices(("stdlib",)))
    needles: bool = False
    eval_chunks: int = field(default=16, metadata=within("[1, 1e6]"))
    needle_samples: int = field(default=8, metadata=within("[1, 10000]"))
    eval_probes: list[int] = field(default_factory=lambda: [0, 4, 16, 32], metadata=within("[0, 1e6]"))
    eval_keys: list[float] = field(default_factory=lambda: [0.03], metadata=within("[0.001, 0.5]"))
    latency_lengths: list[int] = field(
        default_factory=lambda: [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072], metadata=within("[1, 1e9]")
    )
    decoding_lengths: list[int] = field(default_factory=lambda: [131072, 524288], metadata=within("[1, 1e9]"))
    throughput_length: int = field(default=65536, metadata=within("[1, 1e9]"))

    def __post_init__(self) -> None:
        check(self, "model.presets.")


@dataclass(frozen=True)
class ModelConfig:
    """A language model and how it is loaded.

    Attributes
    ----------
    name : folder under ``outputs``.
    path : Hub id, local folder, GGUF file, or ``embedded`` (the model that ships with the package).
    obtained_by : the way to a model whose ``path`` does not exist, for the error message.
    init : ``pretrained``, or ``random`` (weights drawn from the seed, shape from ``architecture``; no download).
    revision : branch, tag or commit of a Hub model.
    trust_remote_code : run Python code that the model's folder or repository brings; without it such a model is refused.
    rope_scaling : replaces the model's RoPE parameters, e.g. ``{rope_type: yarn, factor: 4.0}``.
    architecture : the keys of the model's ``config.json``, used by ``init=random``.
    presets : defaults of other groups for this model.
    """

    name: str
    path: str
    init: str = field(default="pretrained", metadata=choices(("pretrained", "random")))
    revision: str | None = None
    trust_remote_code: bool = False
    obtained_by: str | None = None
    rope_scaling: dict[str, Any] | None = None
    architecture: dict[str, Any] | None = None
    presets: ModelPresets = field(default_factory=ModelPresets)

    def __post_init__(self) -> None:
        check(self, "model.")
        folder_name("model.name", self.name)
        require(bool(self.path.strip()), "model.path", self.path, "a Hub id, a folder, a GGUF file, or embedded")
        require(
            self.init == "pretrained" or self.architecture is not None,
            "model.init",
            self.init,
            "random needs model.architecture, which the files of conf/model/ have",
        )

    @property
    def argument(self) -> str:
        """The argument of a command that means this model, for messages."""
        return f"model={self.name}" if self.name in packaged_models() else f"--model {shlex.quote(self.path)}"

    @property
    def is_embedded(self) -> bool:
        """True for the model that ships with the package, with its own weights and positions."""
        return self.path == "embedded" and self.init == "pretrained" and self.rope_scaling is None


def packaged_models() -> list[str]:
    """Returns the options of the group ``model`` that name a model."""
    return sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "model").glob("*.yaml") if path.stem != "own")
