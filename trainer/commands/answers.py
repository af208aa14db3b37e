"""Shared parts of the commands that answer prompts (generate, chat, serve): loading, tracking,
greedy answers, their times.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from msattn.trainer import artifacts, models
from msattn.trainer.config import AnswerConfig
from msattn.trainer.config.select import ROUTERS
from msattn.trainer.errors import UserError
from msattn.trainer.methods.gate.attn_gate import Gate
from msattn.trainer.models.ends import end_tokens
from msattn.trainer.models.loading import config_and_tokenizer
from msattn.trainer.models.timing import TokenClock
from msattn.trainer.serving.build import AttachOptions, check_options, load_router
from msattn.trainer.serving.dispatch import Dispatch
from msattn.trainer.training.tracker import Tracker


@dataclass(frozen=True)
class Served:
    """A model before its weights are read, its artifacts by kind (None: there is none), and the
    options that attach them.
    """

    model: models.Described
    chosen: dict[str, str | Path | None]
    options: dict[str, Any]


def find_served(cfg: AnswerConfig, check: Callable[[Any], None] = lambda config: None) -> Served:
    """Reads all of a model but its weights, and loads its artifacts; there must be at least one,
    and all must fit. ``check`` raises UserError for the configuration of a model that the caller
    does not serve.
    """
    chosen = _artifacts(cfg, check)
    model = models.describe(cfg.model, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
    check(model.config)
    gate, kind = chosen["gate"], _router_kind(chosen)
    router = chosen[kind] if kind else None
    if kind != "qmodel" and router in ROUTERS:
        router = f"./{router}"  # artifacts.qmodel alone takes names
    options: dict[str, Any] = {
        "gate": gate and Gate.load(gate),
        "select": cfg.select if gate or not cfg.select.by_gate else None,
        "qmodel": router and load_router(router, model.config),
        **cfg.routing,
    }
    check_options(model.config, AttachOptions(**options))
    return Served(model, chosen, options)


def _artifacts(
    cfg: AnswerConfig, check: Callable[[Any], None] = lambda config: None
) -> dict[str, str | Path | None]:
    """Returns the paths of the artifacts by kind: from the configuration, otherwise those of the
    model and name.

    With a training-free selection such as ``select=quest``, only artifacts from the configuration
    count.
    """
    untrained = not cfg.select.by_gate
    if untrained and cfg.artifacts.gate:
        raise UserError(
            f"artifacts.gate={cfg.artifacts.gate}: select={cfg.select.scores} reads no gate; give "
            f"one of them"
        )
    chosen: dict[str, str | Path | None] = {
        kind: getattr(cfg.artifacts, kind)
        or (None if untrained else artifacts.default_artifact(cfg, kind))
        for kind in artifacts.KINDS
    }
    if untrained:
        chosen["gate"] = None
    elif not any(chosen.values()):
        check(config_and_tokenizer(cfg.model)[0])  # one that is not supported has its own message
        raise UserError(
            f"{cfg.folder}: no gate, k-means or classifier here; train one, e.g. msattn train-gate "
            f"{cfg.arguments(cfg.name)}, or add select=quest, which needs no training"
        )
    given = [kind for kind in artifacts.ROUTER_KINDS if getattr(cfg.artifacts, kind)]
    if len(given) > 1:
        listed = ", ".join(f"artifacts.{kind}={chosen[kind]}" for kind in given)
        raise UserError(f"{listed}: expected one of them, since one router decodes")
    kinds = given or [kind for kind in artifacts.ROUTER_KINDS if chosen[kind]]
    return chosen | dict.fromkeys(set(artifacts.ROUTER_KINDS) - {*kinds[:1]})  # one router decodes


@contextmanager
def tracked(
    cfg: AnswerConfig, job: str, served: Served | None, *, after_work: bool = False
) -> Iterator[Tracker | None]:
    """Yields a tracker that has recorded the artifacts of ``served`` (None: served densely), or
    None with ``tracker=none``.

    Each start has its own folder, because otherwise the steps of two servers would look like a
    resumed run.
    """
    if cfg.tracker.kind == "none":
        yield None
        return
    folder = cfg.folder / "runs" / job / f"{datetime.now():%Y%m%d-%H%M%S}"
    run_name = f"{cfg.model.name}-{cfg.name}-{job}"
    with Tracker.of_job(
        cfg, job, folder=folder, run_name=run_name, after_work=after_work
    ) as tracker:
        attached = [served.options["gate"], served.options["qmodel"]] if served is not None else []
        for module in attached:
            if module is not None and module.artifact is not None:
                tracker.use_artifact(module.artifact)
        yield tracker


def describe(cfg: AnswerConfig, served: Served, dense: Mapping[str, str] | None = None) -> str:
    """Describes what prompts and new tokens read, e.g.
    ``tiny: prompts by quest, topk, sparsity=0.9; new tokens dense``; ``dense`` has the reasons of
    those that read all, from :func:`dense_by_choice`.
    """
    dense = dense or {}
    prompts = new_tokens = "dense"
    if served.options["select"] is not None:
        scores = cfg.select.scores
        source = _artifact("gate", served, scores) if served.chosen["gate"] else scores
        share = cfg.select.sparsity  # not every policy has it
        prompts = ", ".join(
            [f"by {source}", cfg.select.policy, *([] if share is None else [f"sparsity={share:g}"])]
        )
    kind = _router_kind(served.chosen)
    if kind is not None:
        new_tokens = f"by {_artifact(kind, served)}"
    prompts, new_tokens = dense.get("prompts", prompts), dense.get("new tokens", new_tokens)
    return f"{cfg.model.name}: prompts {prompts}; new tokens {new_tokens}"


def dense_by_choice(
    cfg: AnswerConfig, dispatch: Dispatch, prompt_tokens: int, max_new_tokens: int
) -> dict[str, str]:
    """Returns why ``prompts`` and ``new tokens`` are dense in all passes of an answer; those that
    are not, or have no other choice, are left out.
    """

    def why(below: int, unit: str, at: str = "") -> str:
        if cfg.dense_below is not None:
            return f"dense, as dense_below={cfg.dense_below}"
        lengths = "at every length" if below == sys.maxsize else f"below {below:,} {unit}"
        return f"dense, which is faster {lengths}{at}"

    reasons, keys = {}, prompt_tokens + max_new_tokens - 1
    if dispatch.decide_prompt(prompt_tokens, prompt_tokens).dense_reason is not None:
        at = "" if cfg.select.sparsity is None else f" at sparsity={cfg.select.sparsity:g}"
        reasons["prompts"] = (
            why(dispatch.dense_below, "tokens", at)
            if prompt_tokens < dispatch.dense_below
            else f"dense, as select.dense_queries={cfg.select.dense_queries}"
        )
    if dispatch.routed_layers and dispatch.tokens_until_routed(keys, 1):
        reasons["new tokens"] = why(dispatch.shortest_routed(1), "keys")
    return reasons


def _router_kind(chosen: dict[str, str | Path | None]) -> str | None:
    return next((kind for kind in artifacts.ROUTER_KINDS if chosen[kind]), None)


def _artifact(kind: str, served: Served, name: str | None = None) -> str:
    path, name = served.chosen[kind], name or kind
    if kind == "qmodel" and path in ROUTERS:
        return str(path)
    return (
        f"the embedded {name}"
        if path in ("embedded", artifacts.SHIPPED / kind)
        else f"{name} {path}"
    )


def check_fits(config: Any, prompt_tokens: int, max_new_tokens: int, what: str) -> None:
    """Raises UserError if the model has too few positions for the tokens of ``what``, a prompt, and
    the new ones.
    """
    given = f"the {what}'s {prompt_tokens} tokens and max_new_tokens={max_new_tokens}"
    models.check_length(config, prompt_tokens + max_new_tokens, given)


class Clock(TokenClock):
    """Records the new tokens and their times, and passes them on to another streamer, except for
    those in ``hidden``.
    """

    def __init__(self, streamer: BaseStreamer | None = None, hidden: Sequence[int] = ()) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self._streamer, self._hidden = streamer, hidden

    def put(self, value: Tensor) -> None:
        """Records a new token; the first call is for the prompt."""
        new = value.flatten().tolist() if self.times else []
        self.tokens += new
        super().put(value)
        if self._streamer is not None and not (new and new[0] in self._hidden):
            self._streamer.put(value)

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()

    @property
    def first_token_s(self) -> float:
        start, first, *_ = self.times
        return first - start

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first one; NaN if there are none."""
        first, *rest = self.times[1:]
        return len(rest) / (rest[-1] - first) if rest else float("nan")


def generate_greedily(
    loaded: models.Loaded, ids: Tensor, max_new_tokens: int, clock: Clock, **options: Any
) -> Tensor:
    """Returns the tokens ``ids [1, N]`` and up to ``max_new_tokens`` new ones; ``options`` are
    those of ``generate``.
    """
    model: Any = loaded.model
    with torch.no_grad():
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            streamer=clock,
            pad_token_id=next(iter(end_tokens(model)), None),
            **options,
        )


@dataclass(frozen=True)
class Answer:
    """A greedy answer, the clock of its tokens, and what was read, as
    :meth:`msattn.trainer.serving.attend.Sparse.stats`.
    """

    text: str
    clock: Clock
    stats: dict[str, Any]

    @property
    def figures(self) -> dict[str, float]:
        """The numbers of the answer for a tracker, without those that it does not have. They hold
        no text.
        """
        figures: dict[str, float | None] = {"new_tokens": len(self.clock.tokens)}
        if self.clock.tokens:
            figures |= {
                "first_token_s": self.clock.first_token_s,
                "tokens_per_s": self.clock.tokens_per_s,
            }
        figures |= {name: self.stats.get(name) for name in ("sparsity", "selectivity")}
        return {
            name: value for name, value in figures.items() if value is not None and value == value
        }


def format_number(value: float | None) -> str:
    """Returns three significant digits, or - if there is no value."""
    return "-" if value is None or value != value else f"{value:.3g}"
