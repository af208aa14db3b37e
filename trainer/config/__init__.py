"""The schema of ``conf/``: a frozen dataclass for each Hydra group and each command.

Hydra composes plain YAML. :func:`typed` merges the result into a dataclass and refuses unknown keys and wrong types; each
``__post_init__`` refuses values out of range. Sizes that differ by model are interpolations, e.g. ``${model.presets.recent}``.
"""

from msattn.trainer.config.bench import PEERS, BenchConfig
from msattn.trainer.config.commands import (
    ArtifactsConfig,
    BenchRunConfig,
    EvalRunConfig,
    FinetuneConfig,
    FitKMeansConfig,
    GenerateConfig,
    JobConfig,
    RunConfig,
    ServingConfig,
    TrainGateConfig,
    TrainQModelConfig,
)
from msattn.trainer.config.data import DataConfig
from msattn.trainer.config.evaluate import (
    RULER_TASKS,
    TASKS,
    DecodingConfig,
    DocumentsConfig,
    EvalConfig,
    LatencyConfig,
    NeedleConfig,
    PerplexityConfig,
    PromptsConfig,
    RecallConfig,
    RulerConfig,
)
from msattn.trainer.config.model import ModelConfig, ModelPresets
from msattn.trainer.config.select import (
    BASELINES,
    POLICIES,
    SCORES,
    CalibratedConfig,
    MultiscaleConfig,
    NucleusConfig,
    SelectConfig,
    SparsityConfig,
    ThresholdConfig,
    TokenBudgetConfig,
    TopKConfig,
)
from msattn.trainer.config.train import (
    LOSSES,
    POOLINGS,
    FinetuneTrainConfig,
    GateConfig,
    KMeansConfig,
    QModelConfig,
    TrackerConfig,
    TrainConfig,
)
from msattn.trainer.config.typed import known_keys, leaves, typed
from msattn.trainer.config.values import DTYPES, nearest

__all__ = [
    "BASELINES",
    "DTYPES",
    "LOSSES",
    "PEERS",
    "POLICIES",
    "POOLINGS",
    "RULER_TASKS",
    "SCORES",
    "TASKS",
    "ArtifactsConfig",
    "BenchConfig",
    "BenchRunConfig",
    "CalibratedConfig",
    "DataConfig",
    "DecodingConfig",
    "DocumentsConfig",
    "EvalConfig",
    "EvalRunConfig",
    "FinetuneConfig",
    "FinetuneTrainConfig",
    "FitKMeansConfig",
    "GateConfig",
    "GenerateConfig",
    "JobConfig",
    "KMeansConfig",
    "LatencyConfig",
    "ModelConfig",
    "ModelPresets",
    "MultiscaleConfig",
    "NeedleConfig",
    "NucleusConfig",
    "PerplexityConfig",
    "PromptsConfig",
    "QModelConfig",
    "RecallConfig",
    "RulerConfig",
    "RunConfig",
    "SelectConfig",
    "ServingConfig",
    "SparsityConfig",
    "ThresholdConfig",
    "TokenBudgetConfig",
    "TopKConfig",
    "TrackerConfig",
    "TrainConfig",
    "TrainGateConfig",
    "TrainQModelConfig",
    "known_keys",
    "leaves",
    "nearest",
    "typed",
]
