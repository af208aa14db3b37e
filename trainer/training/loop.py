"""The training loop: a thin specialization of ``transformers.Trainer``.

:func:`fit` trains any module whose forward returns ``{"loss": scalar, "parts": {name: scalar}}``.
It adds to the Trainer: completion markers for checkpoints, bit-identical resuming, an error that
names the part whose loss is not finite, and a checkpoint on Ctrl-C or SIGTERM. A step does not
synchronize with the device: losses are summed on the device and read only for logging and before a
checkpoint.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

import numpy as np
import torch
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate
from transformers import PrinterCallback, Trainer, TrainingArguments

from msattn.trainer.config import TrainConfig
from msattn.trainer.errors import Fault, Terminated, UserError, output_error
from msattn.trainer.training import micro_batch
from msattn.trainer.training.callbacks import TrainingCallback
from msattn.trainer.training.checkpoints import (
    MICRO_BATCH,
    WEIGHTS,
    TrainingResult,
    describe_last_checkpoint,
    handle_write_errors,
    load_weights,
    prepare_resume,
    read_marker,
    resume_settings,
)
from msattn.trainer.training.distributed import StopConsensus
from msattn.trainer.training.tracker import Tracker


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
    extra_settings: Mapping[str, Any] | None = None,
    evaluate: Callable[[], dict[str, float]] | None = None,
    collate: Callable[[list[Any]], dict[str, Any]] | None = None,
    optimizer: Literal["adamw", "adam"] = "adamw",
    shard: str | None = None,
    shuffle: bool = True,
) -> TrainingResult:
    """Trains ``module`` in place for ``train.steps`` optimizer steps.

    Parameters
    ----------
    module : ``forward(**batch)`` returns a dict with ``loss`` (scalar, mean over the micro-batch)
        and, optionally, ``parts`` (name -> scalar, the same names each time), which are logged and
        checked. Only registered parameters and buffers are saved.
    dataset : map-style; an item depends only on its index. Each pass has a new order, drawn from
        ``seed``.
    folder : work folder; checkpoints go to ``folder/checkpoints``.
    device : ``cpu``, or ``cuda`` (one device per rank; several ranks under ``torchrun``).
    resume : continue from the newest complete checkpoint, if any; the result equals that of an
        uninterrupted run. If False, earlier checkpoints in ``folder`` are removed: call
        :func:`~msattn.trainer.training.checkpoints.check_start` before.
    extra_settings : further settings that the result depends on, under the names of the command
        line. A resumed run must have the same.
    evaluate : called with the module in eval mode, every ``train.eval_every`` steps (0: none) and
        after the last one.
    collate : items -> batch; default: ``torch.utils.data.default_collate``.
    optimizer : ``adamw`` has decoupled weight decay, ``adam`` adds it to the gradient.
    shard : name of the layer class whose weights are sharded over the ranks' GPUs (FSDP2); None
        replicates them. With sharding the weights of ``module`` are ``DTensor`` afterwards.
    shuffle : if False, items come in the order of ``dataset``, which must have
        ``train.steps * train.batch_size`` items.

    Raises
    ------
    UserError : contradictory settings, settings that differ from the run to resume, or a full disk.
    TrainingDiverged : a loss, gradient or weight is not finite; the last complete checkpoint is
        kept.
    Fault : a data worker was killed.
    KeyboardInterrupt : Ctrl-C, once the step is finished and saved; its subclass ``Terminated`` for
        SIGTERM.
    """
    checkpoints = Path(folder) / "checkpoints"
    arguments = _arguments(train, checkpoints, device, seed, shard)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    settings = resume_settings(train, seed, optimizer, arguments.world_size, extra_settings)
    last = prepare_resume(checkpoints, settings, resume=resume, writes=arguments.process_index == 0)
    previous = TrainingResult(0, 0.0, {}, {})
    if last is not None:
        marker = read_marker(last)
        previous = marker.result
        train = replace(train, micro_batch_size=marker.settings[MICRO_BATCH])
        if previous.steps >= train.steps:
            load_weights(module, last)
            return previous
    tracker.cut(previous.steps)

    if train.compile:
        module.compile(dynamic=False)
    collate = collate or default_collate
    train = micro_batch.resolve(
        train, module, dataset, collate, device, arguments.world_size, sharded=shard is not None
    )
    settings[MICRO_BATCH] = train.micro_batch_size
    arguments.per_device_train_batch_size = train.least_micro_batch
    arguments.gradient_accumulation_steps = train.batch_size // (
        train.least_micro_batch * arguments.world_size
    )
    stop_consensus = StopConsensus(arguments.world_size)
    tokens = micro_batch.tokens_of(dataset)
    callback = TrainingCallback(
        module, train, tracker, evaluate, settings, previous, stop_consensus, tokens
    )
    optimizer_class = torch.optim.AdamW if optimizer == "adamw" else torch.optim.Adam
    options = {"lr": train.lr, "betas": (0.9, train.beta2), "fused": True}
    trainer = _Trainer(
        model=module,
        args=arguments,
        train_dataset=_ShuffledPasses(dataset, train.steps * train.batch_size, seed)
        if shuffle
        else dataset,
        data_collator=cast(Any, collate),
        optimizer_cls_and_kwargs=(optimizer_class, options),
        callbacks=[callback],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.callback = callback
    with callback.progress_bar(enabled=arguments.process_index == 0), callback.handle_signals():
        _train(trainer, callback, checkpoints, last)
        stop_signal = stop_consensus.finish(callback.signal)
    steps = trainer.state.global_step
    if stop_signal:
        done = f"stopped after step {steps} of {train.steps}, saved in {checkpoints}"
        raise _stop(stop_signal, f"{done}; resume=true continues from there")
    return callback.result(steps)


def _train(
    trainer: Trainer, callback: TrainingCallback, checkpoints: Path, last: Path | None
) -> None:
    """Trains to the last step, or to the end of the step in which a first signal arrives; a second
    signal stops at once.
    """
    try:
        trainer.train(resume_from_checkpoint=str(last) if last is not None else None)
        _ignore_data_workers(callback.train)
    except KeyboardInterrupt as stop:
        raise type(stop)(
            f"stopped within a step; {describe_last_checkpoint(checkpoints)}"
        ) from stop
    except (RuntimeError, OSError, EOFError) as error:
        _ignore_data_workers(callback.train)
        if not callback.train.num_workers or not _is_lost_worker(error):
            raise
        if callback.signal:
            raise _stop(
                callback.signal, f"stopped within a step; {describe_last_checkpoint(checkpoints)}"
            ) from error
        reason = " ".join(str(error).split()).rstrip(" .") or type(error).__name__
        raise Fault(
            f"a data worker was lost ({reason}); {describe_last_checkpoint(checkpoints)}"
        ) from error


def _stop(number: int, message: str) -> KeyboardInterrupt:
    return (Terminated if number == signal.SIGTERM else KeyboardInterrupt)(message)


def _ignore_data_workers(train: TrainConfig) -> None:
    """Removes PyTorch's handler of SIGCHLD, which raises an error wherever the main thread is when
    a data worker is killed.
    """
    if train.num_workers and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _is_lost_worker(error: BaseException) -> bool:
    """Returns True if an error means that a data worker was lost: PyTorch's own error, or a broken
    connection to the worker.
    """
    if isinstance(error, ConnectionError | EOFError):
        return output_error() is None  # otherwise a line could not be printed
    return str(error).startswith("DataLoader worker (pid")


class _Arguments(TrainingArguments):
    """Training arguments that use only the current device: by default the Trainer applies
    DataParallel to all visible GPUs.
    """

    @property
    def n_gpu(self) -> int:
        return min(super().n_gpu, 1)

    @property
    def device(self) -> torch.device:
        own = super().device  # the first GPU for an isolated rank, whichever its own GPU is
        return torch.device("cuda", torch.cuda.current_device()) if own.type == "cuda" else own


def _arguments(
    train: TrainConfig, checkpoints: Path, device: torch.device, seed: int, shard: str | None
) -> _Arguments:
    on_gpu = device.type == "cuda"
    arguments = _Arguments(
        output_dir=str(checkpoints),
        max_steps=train.steps,
        learning_rate=train.lr,
        lr_scheduler_type=train.schedule,
        warmup_steps=train.warmup_steps,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        logging_steps=train.log_every,
        # the filter would hide NaN and synchronize with the device at every step
        logging_nan_inf_filter=False,
        save_steps=train.save_every,
        seed=seed,
        use_cpu=not on_gpu,
        train_sampling_strategy="sequential",  # _ShuffledPasses has shuffled already
        dataloader_num_workers=train.num_workers,
        dataloader_pin_memory=on_gpu,
        # Sharded gradients are reduced at every micro-batch: unreduced gradients are as large as
        # the whole model.
        accelerator_config={
            "non_blocking": on_gpu,
            "gradient_accumulation_kwargs": {"sync_each_batch": shard is not None},
        },
        fsdp=shard is not None,  # pyrefly: ignore[bad-argument-type]
        fsdp_config={
            "transformer_layer_cls_to_wrap": [shard],
            "state_dict_type": "SHARDED_STATE_DICT",
        }
        if shard
        else None,
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        label_names=[],
        report_to="none",
        disable_tqdm=True,
    )
    per_pass = train.least_micro_batch * arguments.world_size
    if train.batch_size % per_pass:
        raise UserError(
            f"train.batch_size={train.batch_size}: expected a multiple of micro_batch_size x "
            f"processes = {train.least_micro_batch} x {arguments.world_size}"
        )
    return arguments


class _ShuffledPasses(Dataset[Any]):
    """Passes over ``dataset`` as one epoch of ``length`` items; pass ``n`` is permuted by a
    generator of (seed, n).
    """

    def __init__(self, dataset: "Dataset[Any]", length: int, seed: int) -> None:
        self.dataset = dataset
        self.length = length
        self.seed = seed
        self.size = len(dataset)  # pyrefly: ignore[bad-argument-type]
        if self.size == 0:
            raise UserError("there are no training data")
        self._permutation = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        number, position = divmod(index, self.size)
        if self._permutation[0] != number:
            self._permutation = (
                number,
                np.random.default_rng((self.seed, number)).permutation(self.size),
            )
        return self.dataset[int(self._permutation[1][position])]


def _init_worker(main_process: int, seed_worker: Callable[[int], None] | None, worker: int) -> None:
    """Moves the worker to its own process group, so that Ctrl-C and torchrun's signals do not end
    it before the last step.
    """
    os.setpgrp()
    # it has ended; PyTorch would watch the process that took its place
    if os.getppid() != main_process:
        os._exit(1)
    sys.excepthook = _report_in_worker
    if seed_worker is not None:
        seed_worker(worker)


def _report_in_worker(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Prints an error of a worker's thread, unless the main process ended during a transfer."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, trace)


class _Trainer(Trainer):
    """Takes the loss from the module's output and saves tied weights once."""

    callback: TrainingCallback

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        # Otherwise a forward with **kwargs gets num_items_in_batch, and the loss is not divided by
        # the accumulation steps.
        self.model_accepts_loss_kwargs = False

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        outputs = model(**inputs)
        self.callback.add_losses(outputs, inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        inner = getattr(loader, "base_dataloader", loader)  # accelerate's loaders read PyTorch's
        inner.worker_init_fn = partial(_init_worker, os.getpid(), inner.worker_init_fn)
        return loader

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with handle_write_errors(
            Path(cast(str, self.args.output_dir), f"checkpoint-{self.state.global_step}")
        ):
            super()._save_checkpoint(model, trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        # accelerate saves FSDP's shards together with the optimizer's
        if self.args.should_save and not self.is_fsdp_enabled:
            target = Path(output_dir or cast(str, self.args.output_dir))
            target.mkdir(parents=True, exist_ok=True)
            save_model(cast(nn.Module, self.model), str(target / WEIGHTS))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if self.is_fsdp_enabled:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        return load_weights(cast(nn.Module, self.model), Path(resume_from_checkpoint))
