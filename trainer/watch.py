"""What the training loop does between its steps: sums losses, logs, evaluates, stops what diverges, heeds Ctrl-C."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from msattn.trainer.checkpoints import Summary, mark_complete, newest_checkpoint
from msattn.trainer.config import TrainConfig
from msattn.trainer.errors import TrainingDiverged
from msattn.trainer.tracker import Tracker


class Watch(TrainerCallback):
    """Sums losses on the device; logs, evaluates, stops what diverges, and marks complete checkpoints."""

    def __init__(
        self,
        module: nn.Module,
        train: TrainConfig,
        tracker: Tracker,
        evaluate: Callable[[], dict[str, float]] | None,
        settings: dict[str, Any],
        done: Summary,
    ) -> None:
        self.module = module
        self.train = train
        self.tracker = tracker
        self.evaluate = evaluate if train.eval_every else None
        self.settings = settings
        self.done = done
        self.losses = done.losses
        self.metrics = done.metrics
        self.interrupted = False
        self.console = Console()
        self._started = time.perf_counter()
        self._open_window()

    def _open_window(self) -> None:
        """Begin the sums between two log lines."""
        self._names: tuple[str, ...] = ()
        self._sums = self._finite_batches = self._still_finite = torch.empty(0)  # [loss and parts], on the device
        self._batches = self._tokens = 0
        self._window_started = time.perf_counter()

    def summary(self, steps: int) -> Summary:
        """What the run has come to after ``steps``."""
        return Summary(steps, self.done.seconds + time.perf_counter() - self._started, self.losses, self.metrics)

    def add(self, outputs: dict[str, Any], inputs: dict[str, Any]) -> None:
        """Take in the losses of one micro-batch without waiting for the device."""
        losses = {"loss": outputs["loss"], **outputs.get("parts", {})}
        values = torch.stack([value.detach().float() for value in losses.values()])
        if not self._batches:
            self._names = tuple(losses)
            self._sums, self._finite_batches = torch.zeros_like(values), torch.zeros_like(values)
            self._still_finite = torch.ones_like(values, dtype=torch.bool)
        self._sums += values
        self._still_finite &= values.isfinite()
        self._finite_batches += self._still_finite
        self._batches += 1
        if "input_ids" in inputs:
            self._tokens += inputs["input_ids"].numel()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        step, finished = state.global_step, state.global_step >= state.max_steps
        if finished:
            control.should_log = True
        if self.interrupted:
            control.should_save = control.should_training_stop = True
        if control.should_log or control.should_save:
            self._read_losses(step, args)
        if control.should_save:
            self._check_weights(step, args)
        if self.evaluate is not None and (step % self.train.eval_every == 0 or finished):
            self._run_evaluation(step, args.process_index == 0)
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "grad_norm" not in logs:
            return
        if not np.isfinite(logs["grad_norm"]):
            self._stop(state.global_step, args, "the gradient")
        seconds = time.perf_counter() - self._window_started
        figures = {**self.losses, "grad_norm": logs["grad_norm"], "lr": logs["learning_rate"]}
        if self._tokens:
            figures["tokens_per_s"] = self._tokens * args.world_size / seconds
        self._open_window()
        if args.process_index == 0:
            self.tracker.log(figures, state.global_step)
            self._show(state.global_step, figures)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.world_size > 1:
            torch.distributed.barrier()  # every process has its random state in the checkpoint
        if args.process_index == 0:
            checkpoint = Path(cast(str, args.output_dir)) / f"checkpoint-{state.global_step}"
            mark_complete(checkpoint, self.settings, self.summary(state.global_step))

    def _read_losses(self, step: int, args: TrainingArguments) -> None:
        if not self._batches:
            return
        sums, finite_batches = torch.stack([self._sums, self._finite_batches]).tolist()
        first = min(finite_batches)
        if first < self._batches:
            # A bad weight spreads to every part within a step: those that broke first are to blame.
            broken = [name for name, count in zip(self._names, finite_batches, strict=True) if count == first]
            parts = [name for name in broken if name != "loss"]
            self._stop(step, args, f"the loss of {', '.join(parts)}" if parts else "the loss")
        self.losses = {name: value / self._batches for name, value in zip(self._names, sums, strict=True)}

    def _check_weights(self, step: int, args: TrainingArguments) -> None:
        trained = [(name, weight) for name, weight in self.module.named_parameters() if weight.requires_grad]
        finite = torch.stack([weight.detach().isfinite().all() for _, weight in trained]).tolist()
        if not all(finite):
            self._stop(step, args, f"the weight {trained[finite.index(False)][0]}")

    def _stop(self, step: int, args: TrainingArguments, what: str) -> None:
        last = newest_checkpoint(Path(cast(str, args.output_dir)))
        kept = f"the last good checkpoint is {last}" if last is not None else "there is no checkpoint yet"
        raise TrainingDiverged(f"{what} is not finite, seen at step {step}; {kept}")

    def _run_evaluation(self, step: int, reports: bool) -> None:
        self.module.eval()
        started = time.perf_counter()
        self.metrics = cast(Callable[[], dict[str, float]], self.evaluate)()
        self._window_started += time.perf_counter() - started
        if reports:
            self.tracker.log(self.metrics, step)
            self._show(step, self.metrics)

    def _show(self, step: int, figures: dict[str, float]) -> None:
        line = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
        if self.console.is_terminal:
            self._progress.update(self._task, completed=step, figures=line)
        else:
            print(f"step {step}/{self.train.steps}  {line}", flush=True)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """A progress bar on a terminal; plain lines elsewhere."""
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as self._progress:
            self._task = self._progress.add_task("", total=self.train.steps, completed=self.done.steps, figures="")
            yield

    @contextmanager
    def interruptible(self, processes: int) -> Iterator[None]:
        """The first Ctrl-C finishes and saves the step, the second stops at once.

        Several processes would stop at different steps and wait for each other, and only the main thread may handle
        signals: there Ctrl-C keeps its usual meaning.
        """
        if processes > 1 or threading.current_thread() is not threading.main_thread():
            yield
            return
        usual = signal.getsignal(signal.SIGINT)

        def finish_step(number: int, frame: FrameType | None) -> None:
            self.interrupted = True
            signal.signal(signal.SIGINT, usual)

        signal.signal(signal.SIGINT, finish_step)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, usual)
