"""The schema of ``conf/``: a frozen dataclass for each Hydra group and each command.

A field states type, range, default and help of its key. The defaults are Hydra's base, ``conf/``
holds what differs from them, e.g. sizes that depend on the model (``${model.presets.recent}``), and
:func:`typed` makes the result a dataclass again.
"""
# ruff: noqa: F401 (names for import from here)

from msattn.trainer.config.commands import (
    AnswerConfig,
    ArtifactsConfig,
    AttachConfig,
    BenchRunConfig,
    EvalRunConfig,
    FinetuneConfig,
    FitKMeansConfig,
    GenerateConfig,
    JobConfig,
    NamedConfig,
    RunConfig,
    ServeConfig,
    TrainGateConfig,
    TrainMtaConfig,
    TrainQModelConfig,
)
from msattn.trainer.config.data import DataConfig
from msattn.trainer.config.evaluate import (
    RULER_TASKS,
    TASKS,
    AnalysisConfig,
    DecodingConfig,
    DocumentsConfig,
    EvalConfig,
    HarnessConfig,
    LatencyConfig,
    NeedleConfig,
    PerplexityConfig,
    RecallConfig,
    ThroughputConfig,
)
from msattn.trainer.config.model import ModelConfig, ModelPresets
from msattn.trainer.config.policies import POLICIES
from msattn.trainer.config.select import BASELINES, SCORES, SelectConfig
from msattn.trainer.config.sizes import BlockSizes
from msattn.trainer.config.train import (
    LOSSES,
    FinetuneTrainConfig,
    GateConfig,
    KMeansConfig,
    QModelConfig,
    TrackerConfig,
    TrainConfig,
)
from msattn.trainer.config.typed import defaults, known_keys, leaves, typed
from msattn.trainer.config.values import nearest
