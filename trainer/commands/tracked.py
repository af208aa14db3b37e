"""Tracking of ``msattn generate`` and ``msattn serve``, which record no metrics unless a tracker is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from msattn.trainer.commands.greedy import Served
from msattn.trainer.config import AnswerConfig
from msattn.trainer.training.tracker import Tracker


@contextmanager
def tracked(cfg: AnswerConfig, job: str, served: Served | None, *, after_work: bool = False) -> Iterator[Tracker | None]:
    """Yields a tracker that has recorded the artifacts of ``served``, or None with ``tracker=none``.

    Each start has a folder of its own, because the steps of two servers of a model would be taken for those of a resumed run.

    Parameters
    ----------
    job, after_work : see :meth:`Tracker.of_job`.
    served : the model with its artifacts; None for a model that is served densely.

    Raises
    ------
    UserError : wandb is not installed, or its server cannot be reached.
    """
    if cfg.tracker.kind == "none":
        yield None
        return
    folder = cfg.folder / "runs" / job / f"{datetime.now():%Y%m%d-%H%M%S}"
    run_name = f"{cfg.model.name}-{cfg.name}-{job}"
    with Tracker.of_job(cfg, job, folder=folder, run_name=run_name, after_work=after_work) as tracker:
        attached = [served.options["gate"], served.options["qmodel"]] if served is not None else []
        for module in attached:
            if module is not None and module.artifact is not None:
                tracker.use_artifact(module.artifact)
        yield tracker
