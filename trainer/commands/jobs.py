"""The commands that run a job from a composed configuration.

This module imports no schema before it is used, so that the command line starts at once.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msattn.trainer.config import JobConfig


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: its name and purpose, the name of its schema in
    :mod:`msattn.trainer.config.commands`, and the job as ``module:function``.

    ``first`` are the groups and keys that ``--help`` shows first, ``writes`` the subfolders of the
    run that the job replaces, ``sizes`` the settings to reduce if the machine is too small,
    ``after_sweep`` a ``module:function`` that gets the results of all jobs of a sweep. In
    ``writes``, ``{kind}`` is the kind of the gates that the job trains. ``reads_text``: the command
    takes ``--model`` and ``--data``.
    """

    name: str
    help: str
    config: str
    job: str
    first: str
    writes: tuple[str, ...] = ()
    sizes: str = "data.seq_len or the batch size"
    after_sweep: str | None = None
    reads_text: bool = True

    @property
    def schema(self) -> "type[JobConfig]":
        """The schema of the command's configuration."""
        return getattr(importlib.import_module("msattn.trainer.config.commands"), self.config)

    @property
    def trains(self) -> bool:
        """True if the job writes an artifact or a trained model."""
        from msattn.trainer.config import AttachConfig, NamedConfig

        return issubclass(self.schema, NamedConfig) and not issubclass(self.schema, AttachConfig)

    @property
    def resumes(self) -> bool:
        """True if ``resume=true`` continues an interrupted job: training, or an evaluation."""
        return self.trains or self.name == "eval"

    def written(self, cfg: "JobConfig") -> list[str]:
        """Returns the names of the folders that the job ``cfg`` replaces."""
        from msattn.trainer.config import TrainGateConfig

        kind = cfg.gate.kind if isinstance(cfg, TrainGateConfig) else ""
        return [name.format(kind=kind) for name in self.writes]

    def run(self, cfg: "JobConfig", arguments: dict[str, Any]) -> Any:
        return imported(self.job)(cfg, **arguments)


def config_name(command: str) -> str:
    """Returns the name of the YAML of a command in ``conf/``."""
    return command.replace("-", "_")


def imported(function: str) -> Callable[..., Any]:
    module, name = function.split(":")
    return getattr(importlib.import_module(f"msattn.trainer.{module}"), name)


_ALL = (
    Command(
        name="train-gate",
        help="Train gates, which select key blocks for prompts. A gate scores each pair of "
        "blocks (SeerAttention).",
        config="TrainGateConfig",
        job="methods.gate.train:train_gate",
        first="model data data.path data.seq_len gate.phase gate.loss train.steps train.lr name "
        "overwrite",
        writes=("{kind}",),
    ),
    Command(
        name="fit-kmeans",
        help="Cluster keys into buckets with spherical k-means. Each key/value head has its "
        "own buckets.",
        config="FitKMeansConfig",
        job="methods.classifier.fit_kmeans:fit_kmeans",
        first="model data data.path data.seq_len kmeans.num_buckets kmeans.num_prompts name "
        "device overwrite",
        writes=("kmeans",),
    ),
    Command(
        name="train-qmodel",
        help="Train query classifiers, which select buckets. A new token reads only some "
        "buckets of keys (SAAP).",
        config="TrainQModelConfig",
        job="methods.classifier.train:train_qmodel",
        first="model data data.path artifacts.kmeans qmodel.num_prompts train.steps train.lr "
        "name overwrite",
        writes=("qmodel",),
    ),
    Command(
        name="finetune",
        help="Train all weights of a model with sparse attention. Uses long text and gates, or "
        "dense attention.",
        config="FinetuneConfig",
        job="finetune.run:finetune",
        first="model data data.path data.seq_len artifacts.gate select.sparsity train.steps "
        "train.lr name",
        writes=("model", "gate"),
    ),
    Command(
        name="eval",
        help="Measure artifacts; write a verdict, tables and figures. Compares them with "
        "training-free baselines.",
        config="EvalRunConfig",
        job="evaluate.run:evaluate",
        first="model eval select select.sparsity data data.path artifacts.gate probes recent name",
        writes=("eval",),
        after_sweep="evaluate.report.compare:tabulate",
    ),
    Command(
        name="generate",
        help="Answer a prompt with dense and with sparse attention, or chat.",
        config="GenerateConfig",
        job="commands.generate:generate",
        first="model select select.sparsity dense_below max_new_tokens artifacts.gate probes "
        "device",
        reads_text=False,
    ),
    Command(
        name="serve",
        help="Serve a model over HTTP with sparse attention. The API is OpenAI's; Ctrl-C lets "
        "running requests finish.",
        config="ServeConfig",
        job="commands.serve:serve",
        first="model dense artifacts.gate artifacts.qmodel select probes server.pages "
        "server.max_length",
        sizes="server.pages, server.batch_tokens or server.max_running",
        reads_text=False,
    ),
    Command(
        name="train-mta",
        help="Train a small model with multi-token attention. Starts from random weights, on a "
        "retrieval task.",
        config="TrainMtaConfig",
        job="mta.train_mta:train_mta",
        first="mta.attention mta.blocks mta.letters mta.asked train.steps train.batch_size "
        "train.lr name device overwrite",
        writes=("solver",),
        sizes="mta.blocks or train.batch_size",
        reads_text=False,
    ),
    Command(
        name="bench",
        help="Time an operation and competing implementations. Checks the operation against its "
        "reference first.",
        config="BenchRunConfig",
        job="commands.bench:bench",
        first="op device bench.lengths bench.heads bench.head_size bench.dtype bench.sparsities "
        "bench.direction bench.tune",
        sizes="bench.lengths or bench.heads",
        reads_text=False,
    ),
)
COMMANDS = {command.name: command for command in _ALL}
