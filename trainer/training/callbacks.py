"""The callback of the training loop: loss sums, logging, evaluation, divergence checks and signal
handling.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from msattn.trainer.artifacts import metrics_line
from msattn.trainer.config import TrainConfig
from msattn.trainer.errors import TrainingDiverged
from msattn.trainer.memory import peak_memory
from msattn.trainer.progress import Progress, duration, postpone
from msattn.trainer.signals import handled
from msattn.trainer.training.checkpoints import (
    TrainingResult,
    describe_last_checkpoint,
    handle_write_errors,
    mark_complete,
    remove_older,
)
from msattn.trainer.training.distributed import StopConsensus
from msattn.trainer.training.tracker import Tracker

BAR_WIDTH = 57  # characters of the progress bar's line in front of the figures
SLOW_PASSES = 5.0  # steps that take at least so many seconds show their passes


@dataclass(eq=False, repr=False)
class TrainingCallback(TrainerCallback):
    """Sums losses on the device, logs, evaluates, stops diverging runs and marks complete
    checkpoints.
    """

    module: nn.Module
    train: TrainConfig
    tracker: Tracker
    # logged every ``train.eval_every`` steps and at the end
    evaluate: Callable[[], dict[str, float]] | None
    # stored in each checkpoint, see :func:`~msattn.trainer.training.checkpoints.resume_settings`
    settings: dict[str, Any]
    previous: TrainingResult  # result of the run to resume
    stop_consensus: StopConsensus  # lets all ranks stop after the same step
    tokens: int | None  # tokens per item, if items have any

    def __post_init__(self) -> None:
        self.losses, self.metrics = self.previous.losses, self.previous.metrics
        self.signal = 0  # the signal number that this process received; 0: none
        self.console = Console()
        self._started = time.perf_counter()
        self._first_step: tuple[int, float] | None = None  # the step and the time at which it ended
        # times at which this step's passes ended, after the step's beginning
        self._passes: list[float] = []
        self._reset_sums()

    def _reset_sums(self) -> None:
        """Starts the sums of a new logging interval."""
        self._names: tuple[str, ...] = ()
        # [loss and parts], on the device
        self._sums = self._finite_batches = self._still_finite = torch.empty(0)
        self._batches = self._tokens = 0
        self._steps = 0
        self._interval_started = time.perf_counter()

    def result(self, steps: int) -> TrainingResult:
        """Returns the result of the run after ``steps``."""
        return TrainingResult(
            steps,
            self.previous.seconds + time.perf_counter() - self._started,
            self.losses,
            self.metrics,
        )

    def add_losses(self, outputs: dict[str, Any], inputs: dict[str, Any]) -> None:
        """Adds the losses of one micro-batch to the sums, without a synchronization with the
        device.
        """
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

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._passes = [time.perf_counter()]
        if args.process_index == 0 and self.tokens is not None:
            size, steps = self.train.batch_size, state.max_steps - state.global_step
            at_once = (
                f", {args.per_device_train_batch_size} in a pass"
                if args.gradient_accumulation_steps > 1
                else ""
            )
            a_step = f"{size} x {self.tokens:,} = {size * self.tokens:,} tokens{at_once}"
            print(
                f"a step reads {a_step}; {steps} steps {steps * size * self.tokens:,}", flush=True
            )
        if args.process_index == 0:
            self._show_pass(args)

    def _show_pass(self, args: TrainingArguments) -> None:
        """Shows the number of the current pass instead of figures until the first step has
        ended.
        """
        if args.gradient_accumulation_steps > 1:
            self._progress.update(
                self._task,
                figures=f"pass {len(self._passes)} of {args.gradient_accumulation_steps}",
            )

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Shows the progress within a step of several passes, and the time per step as soon as two
        passes have been timed.
        """
        self._passes.append(time.perf_counter())
        passes, began = len(self._passes) - 1, self._passes[0]
        if args.process_index != 0 or self._passes[-1] - began < SLOW_PASSES:
            return
        share = passes / args.gradient_accumulation_steps
        self._progress.update(self._task, completed=state.global_step + share)
        if self._first_step is None:
            self._show_pass(args)
        if self._first_step is None and passes == min(2, args.gradient_accumulation_steps - 1):
            # the first pass compiles
            seconds = (self._passes[-1] - self._passes[-2]) * args.gradient_accumulation_steps
            steps = state.max_steps - state.global_step
            print(
                f"a step takes about {duration(seconds)}, {steps} steps "
                f"{duration(steps * seconds)}; smaller train.batch_size, train.steps and "
                "data.seq_len take less",
                flush=True,
            )
            postpone()

    def on_step_end(  # pyrefly: ignore[bad-override]
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        step, finished = state.global_step, state.global_step >= state.max_steps
        self.tracker.step = step
        if finished:
            control.should_log = True
        self._steps += 1
        self._progress.update(self._task, completed=step)
        self._passes = [time.perf_counter()]
        self._first_step = self._first_step or (step, time.perf_counter())
        stop_signal = self.stop_consensus.exchange(self.signal)
        if stop_signal:
            control.should_save = control.should_training_stop = True
        if control.should_log or control.should_save:
            self._read_losses(step, args)
        if control.should_save:
            self._check_weights(step, args)
        every = self.train.eval_every
        if self.evaluate is not None and (
            finished or (every and step % every == 0 and not stop_signal)
        ):
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
            self._raise_diverged(state.global_step, args, "the gradient")
        seconds = time.perf_counter() - self._interval_started
        figures = {**self.losses, "grad_norm": logs["grad_norm"], "lr": logs["learning_rate"]}
        if self._tokens:
            figures["tokens_per_s"] = self._tokens * args.world_size / seconds
        figures["steps_per_s"] = self._steps / seconds
        figures["seconds_left"] = self._seconds_left(state)
        figures["memory_gib"] = peak_memory(args.device) / 2**30
        self._reset_sums()
        if args.process_index == 0:
            self.tracker.log(figures, state.global_step)
            self._print(state.global_step, figures, self.metrics)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.world_size > 1:
            # every rank has written its random state into the checkpoint
            torch.distributed.barrier()
        if args.process_index == 0:
            checkpoint = Path(cast(str, args.output_dir)) / f"checkpoint-{state.global_step}"
            with handle_write_errors(checkpoint):
                mark_complete(checkpoint, self.settings, self.result(state.global_step))
            remove_older(checkpoint.parent)

    def _read_losses(self, step: int, args: TrainingArguments) -> None:
        if not self._batches:
            return
        sums, finite_batches = self._sums.clone(), self._finite_batches.clone()
        # the mean over ranks; all ranks stop if one has a loss that is not finite
        if args.world_size > 1:
            torch.distributed.all_reduce(sums)
            torch.distributed.all_reduce(finite_batches, torch.distributed.ReduceOp.MIN)
        sums, finite_batches = torch.stack([sums / args.world_size, finite_batches]).tolist()
        first = min(finite_batches)
        if first < self._batches:
            # A bad weight makes every part non-finite within a step, so only the earliest parts are
            # named.
            earliest = [
                name
                for name, count in zip(self._names, finite_batches, strict=True)
                if count == first
            ]
            parts = [name for name in earliest if name != "loss"]
            self._raise_diverged(
                step, args, f"the loss of {', '.join(parts)}" if parts else "the loss"
            )
        self.losses = {
            name: value / self._batches for name, value in zip(self._names, sums, strict=True)
        }

    def _check_weights(self, step: int, args: TrainingArguments) -> None:
        trained = [
            (name, weight)
            for name, weight in self.module.named_parameters()
            if weight.requires_grad
        ]
        # A rank sees its shard of sharded weights; clipping by the global gradient norm made every
        # shard non-finite alike.
        shards = [
            weight.to_local() if isinstance(weight, DTensor) else weight for _, weight in trained
        ]
        finite = torch.stack([shard.detach().isfinite().all() for shard in shards]).tolist()
        if not all(finite):
            self._raise_diverged(step, args, f"the weight {trained[finite.index(False)][0]}")

    def _raise_diverged(self, step: int, args: TrainingArguments, what: str) -> None:
        raise TrainingDiverged(
            f"{what} is not finite, seen at step {step}; "
            f"{describe_last_checkpoint(Path(cast(str, args.output_dir)))}"
        )

    def _seconds_left(self, state: TrainerState) -> float:
        """Returns the remaining time, with evaluations and checkpoints, at the rate since the first
        step (which compiles).
        """
        first, ended = self._first_step or (0, self._started)
        if state.global_step == first:
            first, ended = self.previous.steps, self._started
        seconds_per_step = (time.perf_counter() - ended) / (state.global_step - first)
        return seconds_per_step * (state.max_steps - state.global_step)

    def _run_evaluation(self, step: int, args: TrainingArguments) -> None:
        self.module.eval()
        started = time.perf_counter()
        # A stopping run skips its evaluation, so evaluations must not advance the random state of
        # training.
        with torch.random.fork_rng([args.device] if args.device.type == "cuda" else []):
            self.metrics = cast(Callable[[], dict[str, float]], self.evaluate)()
        self._interval_started += time.perf_counter() - started
        if args.process_index == 0:
            self.tracker.log(self.metrics, step)
            self._print(step, self.metrics)

    def _print(
        self, step: int, figures: dict[str, float], evaluated: Mapping[str, float] | None = None
    ) -> None:
        """Prints figures, except those of single layers, which only the tracker records.

        The progress bar's line has as many of them as fit, then the figures last ``evaluated``.
        """
        shown = dict(figures)
        left = shown.pop("seconds_left", None)
        line = metrics_line(shown)
        if self.console.is_terminal:
            longer = f"{line}  {metrics_line(evaluated or {})}".rstrip().split("  ")
            while len(longer) > 1 and BAR_WIDTH + len("  ".join(longer)) > self.console.width:
                longer.pop()
            line = "  ".join(longer)
            self._progress.update(self._task, completed=step, figures=line)
        else:
            line += f"  {timedelta(seconds=round(left))} left" if left is not None else ""
            print(f"step {step}/{self.train.steps}  {line}", flush=True)
            postpone()

    @contextmanager
    def progress_bar(self, *, enabled: bool) -> Iterator[None]:
        """Shows the progress if ``enabled``: a bar on a terminal; elsewhere figures, and lines
        during long steps.
        """
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(10),
            TimeElapsedColumn(),
            TextColumn("so far,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            TextColumn("{task.fields[figures]}"),
        )
        with Progress(
            *columns, console=self.console, transient=False, enabled=enabled
        ) as self._progress:
            self._task = self._progress.add_task(
                "step", total=self.train.steps, completed=self.previous.steps, figures=""
            )
            yield

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Finishes and saves the current step after the first Ctrl-C or SIGTERM. A second one stops
        at once.

        All ranks stop after the same step. Outside the main thread, where Python allows no
        handlers, signals are unchanged.
        """

        def finish_step(number: int, frame: FrameType | None) -> None:
            self.signal = number
            restore()
            if self.stop_consensus.single_rank:  # torchrun prints a message of its own
                name = signal.Signals(number).name
                with suppress(OSError):  # stderr is closed or full
                    os.write(
                        2,
                        f"{name}: finishing and saving this step; a second one stops at "
                        f"once\n".encode(),
                    )

        with handled(finish_step) as restore:
            yield
