"""The one training loop: ``transformers.Trainer``, thinly specialised.

:func:`fit` trains any module whose forward returns ``{"loss": scalar, "parts": {name: scalar}}``. What it adds to the
Trainer: checkpoints that count only once they are complete, resuming to the bit, a stop that names the part whose loss is
not finite, and Ctrl-C that saves first. The step itself never waits for the device: losses are summed there and read when
they are logged or a checkpoint is due.
"""

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, cast

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SchedulerType

from msattn.trainer.config import TrainConfig
from msattn.trainer.errors import TrainingDiverged, UserError
from msattn.trainer.tracker import Tracker

WEIGHTS = "model.safetensors"
MARKER = "complete.json"  # written last: a checkpoint without it was cut short and does not count
_SCHEDULES = tuple(kind.value for kind in SchedulerType)
# What may differ between a run and its continuation without changing the result.
_FREE_TO_CHANGE = ("log_every", "save_every", "num_workers")


@dataclass(frozen=True)
class Summary:
    """Outcome of :func:`fit`.

    Attributes
    ----------
    steps : optimizer steps done, over all continuations.
    seconds : wall-clock time, over all continuations.
    losses : means since the line before the last: ``loss`` and one entry a part.
    metrics : of the last evaluation.
    """

    steps: int
    seconds: float
    losses: dict[str, float]
    metrics: dict[str, float]


def fit(
    module: nn.Module,
    dataset: "Dataset[Any]",
    *,
    train: TrainConfig,
    folder: Path | str,
    tracker: Tracker,
    device: torch.device,
    seed: int,
    resume: bool,
    evaluate: Callable[[], dict[str, float]] | None = None,
    collate: Callable[[list[Any]], dict[str, Any]] | None = None,
    optimizer: Literal["adamw", "adam"] = "adamw",
) -> Summary:
    """Train ``module`` in place for ``train.steps`` optimizer steps.

    Parameters
    ----------
    module : ``forward(**batch)`` returns a dict with ``loss`` (scalar, mean over the micro-batch) and, optionally, ``parts``
        (name -> scalar) to be logged and watched. Only registered parameters and buffers are saved.
    dataset : map-style, its items a function of the index alone. Passed over as often as needed, each time in an order
        drawn from ``seed``.
    folder : work folder; checkpoints go to ``folder/checkpoints``.
    device : ``cpu``, or ``cuda`` (one device a process; more under ``torchrun``).
    resume : go on from the newest complete checkpoint, to the same result as an uninterrupted run; start where there is
        none. Otherwise earlier checkpoints in ``folder`` are removed.
    evaluate : called every ``train.eval_every`` steps and after the last, the module in eval mode.
    collate : items -> batch; torch's default otherwise.
    optimizer : ``adamw`` decays weights beside the gradient, ``adam`` inside it.

    Raises
    ------
    UserError : settings that do not fit together, or that differ from those of the run to be resumed.
    TrainingDiverged : something is not finite; the last complete checkpoint stays.
    KeyboardInterrupt : Ctrl-C, after the step was finished and saved.
    """
    checkpoints = Path(folder) / "checkpoints"
    arguments = _arguments(train, checkpoints, device, seed)
    settings = _settings(train, seed, optimizer, arguments.world_size)
    last = _starting_point(checkpoints, settings, resume=resume, writes=arguments.process_index == 0)
    done = _outcome(last) if last is not None else Summary(0, 0.0, {}, {})
    if last is not None and done.steps >= train.steps:
        _load_weights(module, last)
        return done

    if train.compile:
        module.compile(dynamic=False)
    watch = _Watch(module, train, tracker, evaluate, settings, done)
    kind = torch.optim.AdamW if optimizer == "adamw" else torch.optim.Adam
    options = {"lr": train.lr, "betas": (0.9, train.beta2), "fused": True}
    trainer = _Trainer(
        model=module,
        args=arguments,
        train_dataset=_Order(dataset, train.steps * train.batch_size, seed),
        data_collator=cast(Any, collate or default_collate),
        optimizer_cls_and_kwargs=(kind, options),
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.watch = watch
    with watch.shown(), watch.interruptible(arguments.world_size):
        trainer.train(resume_from_checkpoint=str(last) if last is not None else None)
    steps = trainer.state.global_step
    if steps < train.steps:
        raise KeyboardInterrupt(
            f"stopped after step {steps} of {train.steps}, saved in {checkpoints}; resume=true goes on from there"
        )
    return watch.summary(steps)


class _Arguments(TrainingArguments):
    """One device a process: the Trainer would otherwise spread over every visible GPU by DataParallel."""

    @property
    def n_gpu(self) -> int:
        return min(super().n_gpu, 1)


def _arguments(train: TrainConfig, checkpoints: Path, device: torch.device, seed: int) -> _Arguments:
    if train.schedule not in _SCHEDULES:
        raise UserError(f"train.schedule={train.schedule}: accepted are {', '.join(_SCHEDULES)}")
    if train.warmup_steps > train.steps:
        raise UserError(f"train.warmup_steps={train.warmup_steps}: at most train.steps={train.steps}")
    on_gpu = device.type == "cuda"
    arguments = _Arguments(
        output_dir=str(checkpoints),
        max_steps=train.steps,
        per_device_train_batch_size=train.micro_batch_size,
        learning_rate=train.lr,
        lr_scheduler_type=train.schedule,
        warmup_steps=train.warmup_steps,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        logging_steps=train.log_every,
        logging_nan_inf_filter=False,  # it would hide NaN, and wait for the device at every step
        save_steps=train.save_every,
        save_total_limit=2,
        seed=seed,
        use_cpu=not on_gpu,
        train_sampling_strategy="sequential",  # the order is _Order's
        dataloader_num_workers=train.num_workers,
        dataloader_pin_memory=on_gpu,
        accelerator_config={"non_blocking": on_gpu},
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        label_names=[],
        report_to="none",
        disable_tqdm=True,
    )
    per_pass = train.micro_batch_size * arguments.world_size
    if train.batch_size % per_pass:
        raise UserError(
            f"train.batch_size={train.batch_size}: a multiple of micro_batch_size x processes = "
            f"{train.micro_batch_size} x {arguments.world_size}"
        )
    arguments.gradient_accumulation_steps = train.batch_size // per_pass
    return arguments


class _Order(Dataset[Any]):
    """The run as one long epoch of ``length`` items: pass ``n`` over the data is a permutation drawn from (seed, n)."""

    def __init__(self, dataset: "Dataset[Any]", length: int, seed: int) -> None:
        self.dataset = dataset
        self.length = length
        self.seed = seed
        self.size = len(dataset)  # pyright: ignore[reportArgumentType]
        if self.size == 0:
            raise UserError("the training data hold no item")
        self._permutation = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        number, place = divmod(index, self.size)
        if self._permutation[0] != number:
            self._permutation = (number, np.random.default_rng((self.seed, number)).permutation(self.size))
        return self.dataset[int(self._permutation[1][place])]


class _Trainer(Trainer):
    """Takes the loss from the module's output and saves the module whole, tied weights once."""

    watch: "_Watch"

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        # A forward with **kwargs would else be handed num_items_in_batch, and the accumulated loss not be averaged.
        self.model_accepts_loss_kwargs = False

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        outputs = model(**inputs)
        self.watch.add(outputs, inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.args.should_save:
            target = Path(output_dir or cast(str, self.args.output_dir))
            target.mkdir(parents=True, exist_ok=True)
            save_model(cast(nn.Module, self.model), str(target / WEIGHTS))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        _load_weights(cast(nn.Module, self.model), Path(resume_from_checkpoint))


class _Watch(TrainerCallback):
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
        self._sums: dict[str, Tensor] = {}
        self._count = 0
        self._tokens = 0
        self._started = self._window_started = time.perf_counter()

    def summary(self, steps: int) -> Summary:
        return Summary(steps, self.done.seconds + time.perf_counter() - self._started, self.losses, self.metrics)

    def add(self, outputs: dict[str, Any], inputs: dict[str, Any]) -> None:
        """Take in the losses of one micro-batch without waiting for the device."""
        for name, value in {"loss": outputs["loss"], **outputs.get("parts", {})}.items():
            value = value.detach()
            self._sums[name] = self._sums[name] + value if name in self._sums else value.clone()
        self._count += 1
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
        self._sums, self._count, self._tokens, self._window_started = {}, 0, 0, time.perf_counter()
        if args.process_index == 0:
            self.tracker.log(figures, state.global_step)
            self._show(state.global_step, figures)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if args.world_size > 1:
            torch.distributed.barrier()  # every process has its random state in the checkpoint
        if args.process_index == 0:
            marker = Path(cast(str, args.output_dir)) / f"checkpoint-{state.global_step}" / MARKER
            marker.write_text(json.dumps({"settings": self.settings, **asdict(self.summary(state.global_step))}))

    def _read_losses(self, step: int, args: TrainingArguments) -> None:
        if not self._count:
            return
        names = list(self._sums)
        values = (torch.stack([self._sums[name].float() for name in names]) / self._count).tolist()
        # The sum over the window is what is checked: NaN and infinity survive addition.
        broken = [name for name, value in zip(names, values, strict=True) if not np.isfinite(value)]
        if broken:
            parts = [name for name in broken if name != "loss"]
            self._stop(step, args, f"the loss of {', '.join(parts)}" if parts else "the loss")
        self.losses = dict(zip(names, values, strict=True))

    def _check_weights(self, step: int, args: TrainingArguments) -> None:
        trained = [(name, weight) for name, weight in self.module.named_parameters() if weight.requires_grad]
        finite = torch.stack([weight.detach().isfinite().all() for _, weight in trained]).tolist()
        if not all(finite):
            self._stop(step, args, f"the weight {trained[finite.index(False)][0]}")

    def _stop(self, step: int, args: TrainingArguments, what: str) -> None:
        last = newest_checkpoint(Path(cast(str, args.output_dir)))
        kept = f"the last good checkpoint is {last}" if last is not None else "there is no checkpoint yet"
        raise TrainingDiverged(f"{what} is not finite at step {step}; {kept}")

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


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The complete checkpoint with the most steps in ``checkpoints``, or None."""
    complete = [marker.parent for marker in checkpoints.glob(f"checkpoint-*/{MARKER}")]
    return max(complete, key=lambda path: int(path.name.removeprefix("checkpoint-")), default=None)


def _settings(train: TrainConfig, seed: int, optimizer: str, processes: int) -> dict[str, Any]:
    kept = {key: value for key, value in asdict(train).items() if key not in _FREE_TO_CHANGE}
    return {**kept, "seed": seed, "optimizer": optimizer, "processes": processes}


def _starting_point(checkpoints: Path, settings: dict[str, Any], *, resume: bool, writes: bool) -> Path | None:
    """The checkpoint to go on from; what is of no more use is removed."""
    last = newest_checkpoint(checkpoints) if resume else None
    if last is not None:
        before = json.loads((last / MARKER).read_text())["settings"]
        for key, value in settings.items():
            if before.get(key) != value:
                raise UserError(
                    f"resume=true: the run in {checkpoints} has {key}={before.get(key)}, not {value}; "
                    "use the same settings, or resume=false to start again"
                )
    if writes:
        for path in checkpoints.glob("checkpoint-*"):
            if not resume or not (path / MARKER).exists():
                shutil.rmtree(path)
    return last


def _outcome(checkpoint: Path) -> Summary:
    marker = json.loads((checkpoint / MARKER).read_text())
    del marker["settings"]
    return Summary(**marker)


def _load_weights(module: nn.Module, checkpoint: Path) -> None:
    try:
        load_model(module, checkpoint / WEIGHTS)
    except RuntimeError as error:
        raise UserError(f"resume=true: {checkpoint} does not fit the module: {error}") from error
