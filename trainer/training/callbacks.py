"""What the training loop does between its steps: sums losses, logs, evaluates, stops what diverges, heeds signals."""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from msattn.trainer.config import TrainConfig
from msattn.trainer.errors import TrainingDiverged
from msattn.trainer.training.checkpoints import TrainingResult, describe_last_checkpoint, handle_write_errors, mark_complete
from msattn.trainer.training.distributed import StopConsensus
from msattn.trainer.training.tracker import Tracker

STOPS = (signal.SIGINT, signal.SIGTERM)


class TrainingCallback(TrainerCallback):
    """Sums losses on the device; logs, evaluates, stops what diverges, and marks complete checkpoints."""

    def __init__(
        self,
        module: nn.Module,
        train: TrainConfig,
        tracker: Tracker,
        evaluate: Callable[[], dict[str, float]] | None,
        settings: dict[str, Any],
        done: TrainingResult,
        vote: StopConsensus,
    ) -> None:
        self.module = module
        self.train = train
        self.tracker = tracker
        self.evaluate = evaluate if train.eval_every else None
        self.settings = settings
        self.done = done
        self.vote = vote
        self.losses = done.losses
        self.metrics = done.metrics
        self.signal = 0  # that came here; 0: none
        self.console = Console()
        self._started = time.perf_counter()
        self._first_step: tuple[int, float] | None = None  # and when it ended
        self._open_window()

    def _open_window(self) -> None:
        """Begin the sums between two log lines."""
        self._names: tuple[str, ...] = ()
        self._sums = self._finite_batches = self._still_finite = torch.empty(0)  # [loss and parts], on the device
        self._batches = self._tokens = 0
        self._steps = 0
        self._window_started = time.perf_counter()

    def summary(self, steps: int) -> TrainingResult:
        """What the run has come to after ``steps``."""
        return TrainingResult(steps, self.done.seconds + time.perf_counter() - self._started, self.losses, self.metrics)

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
        self.tracker.step = step
        if finished:
            control.should_log = True
        self._steps += 1
        self._first_step = self._first_step or (step, time.perf_counter())
        stops = self.vote.agree(self.signal)
        if stops:
            control.should_save = control.should_training_stop = True
        if control.should_log or control.should_save:
            self._read_losses(step, args)
        if control.should_save:
            self._check_weights(step, args)
        if self.evaluate is not None and (finished or (step % self.train.eval_every == 0 and not stops)):
            self._run_evaluation(step, args)
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
        figures["steps_per_s"] = self._steps / seconds
        figures["seconds_left"] = self._seconds_left(state)
        figures["memory_gib"] = peak_memory_gib(args.device)
        self._open_window()
        if args.process_index == 0:
            self.tracker.log(figures, state.global_step)
            self._show(state.global_step, figures)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.world_size > 1:
            torch.distributed.barrier()  # every process has its random state in the checkpoint
        if args.process_index == 0:
            checkpoint = Path(cast(str, args.output_dir)) / f"checkpoint-{state.global_step}"
            with handle_write_errors(checkpoint):
                mark_complete(checkpoint, self.settings, self.summary(state.global_step))

    def _read_losses(self, step: int, args: TrainingArguments) -> None:
        if not self._batches:
            return
        sums, finite_batches = self._sums.clone(), self._finite_batches.clone()
        if args.world_size > 1:  # what counts is the mean over processes, and all stop where one's loss is not finite
            torch.distributed.all_reduce(sums)
            torch.distributed.all_reduce(finite_batches, torch.distributed.ReduceOp.MIN)
        sums, finite_batches = torch.stack([sums / args.world_size, finite_batches]).tolist()
        first = min(finite_batches)
        if first < self._batches:
            # A bad weight spreads to every part within a step: those that broke first are to blame.
            broken = [name for name, count in zip(self._names, finite_batches, strict=True) if count == first]
            parts = [name for name in broken if name != "loss"]
            self._stop(step, args, f"the loss of {', '.join(parts)}" if parts else "the loss")
        self.losses = {name: value / self._batches for name, value in zip(self._names, sums, strict=True)}

    def _check_weights(self, step: int, args: TrainingArguments) -> None:
        trained = [(name, weight) for name, weight in self.module.named_parameters() if weight.requires_grad]
        # Of shared-out weights each process sees its part; their common gradient norm has spoilt all parts alike.
        parts = [weight.to_local() if isinstance(weight, DTensor) else weight for _, weight in trained]
        finite = torch.stack([part.detach().isfinite().all() for part in parts]).tolist()
        if not all(finite):
            self._stop(step, args, f"the weight {trained[finite.index(False)][0]}")

    def _stop(self, step: int, args: TrainingArguments, what: str) -> None:
        raise TrainingDiverged(
            f"{what} is not finite, seen at step {step}; {describe_last_checkpoint(Path(cast(str, args.output_dir)))}"
        )

    def _seconds_left(self, state: TrainerState) -> float:
        """At the pace since the first step, which compiles; with evaluations and checkpoints in it."""
        first, ended = self._first_step or (0, self._started)
        if state.global_step == first:
            first, ended = self.done.steps, self._started
        pace = (time.perf_counter() - ended) / (state.global_step - first)
        return pace * (state.max_steps - state.global_step)

    def _run_evaluation(self, step: int, args: TrainingArguments) -> None:
        self.module.eval()
        started = time.perf_counter()
        # A run that stops leaves one out, and goes on to the same bits all the same.
        with torch.random.fork_rng([args.device] if args.device.type == "cuda" else []):
            self.metrics = cast(Callable[[], dict[str, float]], self.evaluate)()
        self._window_started += time.perf_counter() - started
        if args.process_index == 0:
            self.tracker.log(self.metrics, step)
            self._show(step, self.metrics)

    def _show(self, step: int, figures: dict[str, float]) -> None:
        """Figures but those of single layers, which the tracker has."""
        shown = {name: value for name, value in figures.items() if "layer" not in name}
        left = shown.pop("seconds_left", None)
        line = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
        if self.console.is_terminal:
            self._progress.update(self._task, completed=step, figures=line)
        else:
            line += f"  {timedelta(seconds=round(left))} left" if left is not None else ""
            print(f"step {step}/{self.train.steps}  {line}", flush=True)

    @contextmanager
    def shown(self, *, first: bool) -> Iterator[None]:
        """A progress bar on a terminal, that of the ``first`` process; plain lines elsewhere."""
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        bar = first and self.console.is_terminal
        with Progress(*columns, console=self.console, disable=not bar) as self._progress:
            self._task = self._progress.add_task("", total=self.train.steps, completed=self.done.steps, figures="")
            yield

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM finishes and saves the step, in all processes the same one; the second stops at once.

        Only the main thread may handle signals: elsewhere they keep their usual meaning.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        usual = {number: signal.getsignal(number) for number in STOPS}

        def finish_step(number: int, frame: FrameType | None) -> None:
            self.signal = number
            for each in STOPS:
                signal.signal(each, usual[each])
            if self.vote.alone:  # torchrun says as much itself
                name = signal.Signals(number).name
                os.write(2, f"{name}: finishing this step, then saving\n".encode())

        for number in STOPS:
            signal.signal(number, finish_step)
        try:
            yield
        finally:
            for number in STOPS:
                signal.signal(number, usual[number])


def peak_memory_gib(device: torch.device) -> float:
    """Most memory that was taken so far: of the GPU by tensors, or of the machine by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
