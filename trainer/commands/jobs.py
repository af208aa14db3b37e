"""The commands that run a job from a composed configuration."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msattn.trainer import config as schemas
from msattn.trainer.config import JobConfig


@dataclass(frozen=True)
class Command:
    """A command: the schema of its configuration, and the job as ``module:function``.

    ``first`` are the groups and keys that ``--help`` shows first, ``writes`` the subfolders of the
    run that the job replaces, ``sizes`` the settings to reduce if the machine is too small,
    ``after_sweep`` a ``module:function`` that gets the results of all jobs of a sweep. In
    ``writes``, ``{kind}`` is the kind of the gates that the job trains.
    """

    schema: type[JobConfig]
    job: str
    first: str
    writes: tuple[str, ...] = ()
    sizes: str = "data.seq_len or the batch size"
    after_sweep: str | None = None

    @property
    def trains(self) -> bool:
        """True if the job writes an artifact or a trained model."""
        return issubclass(self.schema, schemas.NamedConfig) and not issubclass(
            self.schema, schemas.AttachConfig
        )

    @property
    def resumes(self) -> bool:
        """True if ``resume=true`` continues an interrupted job: training, or an evaluation."""
        return self.trains or self.schema is schemas.EvalRunConfig

    def written(self, cfg: JobConfig) -> list[str]:
        """Returns the names of the folders that the job ``cfg`` replaces."""
        kind = cfg.gate.kind if isinstance(cfg, schemas.TrainGateConfig) else ""
        return [name.format(kind=kind) for name in self.writes]

    def run(self, cfg: JobConfig, arguments: dict[str, Any]) -> Any:
        return imported(self.job)(cfg, **arguments)


def config_name(command: str) -> str:
    """Returns the name of the YAML of a command in ``conf/``."""
    return command.replace("-", "_")


def imported(function: str) -> Callable[..., Any]:
    module, name = function.split(":")
    return getattr(importlib.import_module(f"msattn.trainer.{module}"), name)


COMMANDS = {
    "train-gate": Command(
        schemas.TrainGateConfig,
        "methods.gate.train:train_gate",
        "model data data.path data.seq_len gate.phase gate.loss train.steps train.lr name "
        "overwrite",
        writes=("{kind}",),
    ),
    "fit-kmeans": Command(
        schemas.FitKMeansConfig,
        "methods.classifier.fit_kmeans:fit_kmeans",
        "model data data.path data.seq_len kmeans.num_buckets kmeans.num_prompts name device "
        "overwrite",
        writes=("kmeans",),
    ),
    "train-qmodel": Command(
        schemas.TrainQModelConfig,
        "methods.classifier.train:train_qmodel",
        "model data data.path artifacts.kmeans qmodel.num_prompts train.steps train.lr name "
        "overwrite",
        writes=("qmodel",),
    ),
    "finetune": Command(
        schemas.FinetuneConfig,
        "finetune.run:finetune",
        "model data data.path data.seq_len artifacts.gate select.sparsity train.steps train.lr "
        "name",
        writes=("model", "gate"),
    ),
    "train-mta": Command(
        schemas.TrainMtaConfig,
        "mta.train_mta:train_mta",
        "mta.attention mta.blocks mta.letters mta.asked train.steps train.batch_size train.lr "
        "name device overwrite",
        writes=("solver",),
        sizes="mta.blocks or train.batch_size",
    ),
    "eval": Command(
        schemas.EvalRunConfig,
        "evaluate.run:evaluate",
        "model eval select select.sparsity data data.path artifacts.gate probes recent name",
        writes=("eval",),
        after_sweep="evaluate.report.compare:tabulate",
    ),
    "generate": Command(
        schemas.GenerateConfig,
        "commands.generate:generate",
        "model select select.sparsity dense_below max_new_tokens artifacts.gate probes device",
    ),
    "serve": Command(
        schemas.ServeConfig,
        "commands.serve:serve",
        "model dense artifacts.gate artifacts.qmodel select probes server.pages server.max_length",
        sizes="server.pages, server.batch_tokens or server.max_running",
    ),
    "bench": Command(
        schemas.BenchRunConfig,
        "commands.bench:bench",
        "op device bench.lengths bench.heads bench.head_size bench.dtype bench.sparsities "
        "bench.direction bench.tune",
        sizes="bench.lengths or bench.heads",
    ),
}
