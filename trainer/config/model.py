"""Configuration of the language model, and sizes that depend on it."""

import shlex
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from msattn.trainer.config.schema import (
    Count,
    CountOrZero,
    Flag,
    OneOf,
    Samples,
    ShareOfKeys,
    Steps,
    Text,
    Tokens,
    TokensOrZero,
    key,
    schema,
)
from msattn.trainer.config.train import Batch, GateConfig, KMeansConfig, QModelConfig, Rate, Width
from msattn.trainer.config.values import folder_name, require

GATE, KMEANS, QMODEL = GateConfig(), KMeansConfig(), QModelConfig()


@schema("model.presets.")
class ModelPresets:
    """Sizes that differ by model; the defaults of other groups refer to them as
    ``${model.presets.*}``.

    These are the papers' settings, for models with a long context (7B and up).
    """

    seq_len: Tokens = key("length of a chunk, in tokens", default=65536)
    num_buckets: Count = key("k-means buckets of each key/value head", default=KMEANS.num_buckets)
    long_range: TokensOrZero = key(
        "train only on queries whose top key is more than this many tokens away",
        default=QMODEL.long_range,
    )
    qmodel_hidden: Width = key("width of the query classifier", default=QMODEL.hidden)
    qmodel_steps: Steps = key("optimizer steps of the query classifier", default=40000)
    qmodel_lr: Rate = key("learning rate of the query classifier", default=1e-5)
    gate_steps: Steps = key("optimizer steps of the gates", default=500)
    gate_batch: Batch = key("chunks per optimizer step of the gates", default=16)
    gate_loss: Text = key("loss of the gates", default=GATE.loss)
    gate_q_pool: list[Text] = key("query poolings of the gates", default=GATE.q_pool)
    gate_k_pool: list[Text] = key("key poolings of the gates", default=GATE.k_pool)
    kmeans_prompts: Count = key("chunks whose keys are clustered", default=KMEANS.num_prompts)
    qmodel_prompts: Count = key(
        "chunks whose queries train the classifier", default=QMODEL.num_prompts
    )
    points_per_bucket: Count | None = key(
        "keys per bucket that are sampled for clustering; null: all",
        default=KMEANS.points_per_bucket,
    )
    qmodel_source: Text = key(
        "cache: compute queries of all chunks once; online: run the model during training",
        default=QMODEL.source,
    )
    qmodel_steps_per_prompt: Count = key(
        "batches drawn from each pass of the model over a chunk, with qmodel_source=online",
        default=QMODEL.steps_per_prompt,
    )
    qmodel_schedule: Text = key("learning rate schedule of the query classifier", default="cosine")
    probes: CountOrZero = key("buckets that each decoded query reads", default=32)
    recent: Tokens = key("number of last keys that are always read", default=2047)
    data: Annotated[Text, OneOf(("stdlib",))] | None = key(
        "default text: stdlib, or null if training must ask for a text", default=None
    )
    needles: Flag = key("insert repeated sentences into training text", default=False)
    eval_chunks: Count = key("held-out chunks for perplexity", default=16)
    needle_samples: Samples = key("needle prompts of each length and depth", default=8)
    eval_probes: list[CountOrZero] = key(
        "numbers of probes that recall and needle compare; 0: only sink and recent keys",
        default=[0, 4, 16, 32],
    )
    eval_keys: list[ShareOfKeys] = key(
        "shares of the keys at which query classifiers are compared", default=[0.03]
    )
    latency_lengths: list[Tokens] = key(
        "prompt lengths of eval=latency, in tokens",
        default=[1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072],
    )
    decoding_lengths: list[Tokens] = key(
        "numbers of cached keys in eval=latency", default=[131072, 524288]
    )
    throughput_length: Tokens = key("prompt length of eval=throughput, in tokens", default=65536)


@schema("model.")
class ModelConfig:
    """A language model and how it is loaded."""

    name: Text = key("folder under outputs")
    path: Text = key("Hub id, local folder, GGUF file, or embedded (the model of this package)")
    init: Annotated[Text, OneOf(("pretrained", "random"))] = key(
        "random: random weights with the shape of model.architecture, without a download",
        default="pretrained",
    )
    revision: Text | None = key(
        "branch, tag or commit of a Hub model; null: the default branch", default=None
    )
    trust_remote_code: Flag = key(
        "run Python code from the model's files, e.g. a tokenizer's; false: refuse such models",
        default=False,
    )
    cache: Text | None = key(
        "folder where unpacked GGUF files are kept for later runs; null: nowhere", default=None
    )
    obtained_by: Text | None = key(
        "how to get the model if its path does not exist, for the error message", default=None
    )
    rope_scaling: dict[str, Any] | None = key(
        "replaces the model's RoPE parameters, e.g. {rope_type: yarn, factor: 4.0}", default=None
    )
    architecture: dict[str, Any] | None = key(
        "keys of transformers' config.json, for model.init=random", default=None
    )
    presets: ModelPresets = field(default_factory=ModelPresets)

    def __post_init__(self) -> None:
        folder_name("model.name", self.name)
        require(
            bool(self.path.strip()),
            "model.path",
            self.path,
            "expected a Hub id, a folder, a GGUF file, or embedded",
        )
        require(
            self.cache is None or bool(self.cache.strip()),
            "model.cache",
            repr(self.cache),
            "expected null, or a folder",
        )
        ok = self.init == "pretrained" or self.architecture is not None
        require(
            ok,
            "model.init",
            self.init,
            "random needs model.architecture, which the files of conf/model/ have",
        )

    @property
    def argument(self) -> str:
        """The argument of a command that means this model, for messages."""
        return (
            f"model={self.name}"
            if self.name in packaged_models()
            else f"--model {shlex.quote(self.path)}"
        )

    @property
    def is_embedded(self) -> bool:
        """True for the model that ships with the package, with its own weights and positions."""
        return self.path == "embedded" and self.init == "pretrained" and self.rope_scaling is None


def packaged_models() -> list[str]:
    """Returns the options of the group ``model`` that name a model."""
    return sorted(
        path.stem
        for path in (Path(__file__).parents[2] / "conf" / "model").glob("*.yaml")
        if path.stem != "own"
    )
