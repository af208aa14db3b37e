"""The one training loop: ``transformers.Trainer``, thinly specialised.

:func:`fit` trains any module whose forward returns ``{"loss": scalar, "parts": {name: scalar}}``. What it adds to the
Trainer: checkpoints that count only once they are complete, resuming to the bit, a stop that names the part whose loss is
not finite, and Ctrl-C or SIGTERM that saves first. The step itself never waits for the device: losses are summed there and
read when they are logged or a checkpoint is due.
"""

import gc
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate
from transformers import PrinterCallback, Trainer, TrainingArguments

from msattn.trainer.config import TrainConfig
from msattn.trainer.errors import Terminated, TrainingDiverged, UserError
from msattn.trainer.training.callbacks import TrainingCallback
from msattn.trainer.training.checkpoints import (
    WEIGHTS,
    TrainingResult,
    handle_write_errors,
    load_weights,
    newest_checkpoint,
    prepare_resume,
    read_result,
    resume_settings,
)
from msattn.trainer.training.distributed import StopConsensus
from msattn.trainer.training.tracker import Tracker

__all__ = ["TrainingDiverged", "TrainingResult", "fit", "newest_checkpoint"]

# Of transformers.SchedulerType those that need no more than a number of steps.
_SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
)


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
    job: Mapping[str, Any] | None = None,
    evaluate: Callable[[], dict[str, float]] | None = None,
    collate: Callable[[list[Any]], dict[str, Any]] | None = None,
    optimizer: Literal["adamw", "adam"] = "adamw",
    shard: str | None = None,
) -> TrainingResult:
    """Train ``module`` in place for ``train.steps`` optimizer steps.

    Parameters
    ----------
    module : ``forward(**batch)`` returns a dict with ``loss`` (scalar, mean over the micro-batch) and, optionally, ``parts``
        (name -> scalar, the same names each time) to be logged and watched. Only registered parameters and buffers are saved.
    dataset : map-style, its items a function of the index alone. Passed over as often as needed, each time in an order
        drawn from ``seed``.
    folder : work folder; checkpoints go to ``folder/checkpoints``.
    device : ``cpu``, or ``cuda`` (one device a process; more under ``torchrun``).
    resume : go on from the newest complete checkpoint, to the same result as an uninterrupted run; start where there is
        none. Otherwise earlier checkpoints in ``folder`` are removed.
    job : what else the result depends on, by the names that the user has for it: a continuation must have the same.
    evaluate : called every ``train.eval_every`` steps and after the last, the module in eval mode.
    collate : items -> batch; torch's default otherwise.
    optimizer : ``adamw`` decays weights beside the gradient, ``adam`` inside it.
    shard : class of the layers whose weights the processes (each with a GPU) share out among them, gathering a layer's when it
        runs (FSDP2); None: each process holds all. Afterwards the weights of ``module`` are ``DTensor``.

    Raises
    ------
    UserError : settings that do not fit together, or that differ from those of the run to be resumed; a full disk.
    TrainingDiverged : something is not finite; the last complete checkpoint stays.
    KeyboardInterrupt : Ctrl-C, after the step was finished and saved; Terminated, a kind of it, for SIGTERM.
    """
    checkpoints = Path(folder) / "checkpoints"
    arguments = _arguments(train, checkpoints, device, seed, shard)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    settings = resume_settings(train, seed, optimizer, arguments.world_size, job)
    last = prepare_resume(checkpoints, settings, resume=resume, writes=arguments.process_index == 0)
    done = read_result(last) if last is not None else TrainingResult(0, 0.0, {}, {})
    if last is not None and done.steps >= train.steps:
        load_weights(module, last)
        return done

    if train.compile:
        module.compile(dynamic=False)
    vote = StopConsensus(arguments.world_size)
    watch = TrainingCallback(module, train, tracker, evaluate, settings, done, vote)
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
    with watch.shown(first=arguments.process_index == 0), watch.interruptible():
        trainer.train(resume_from_checkpoint=str(last) if last is not None else None)
        stopped_by = vote.settle(watch.signal)
    steps = trainer.state.global_step
    if stopped_by:
        raise (Terminated if stopped_by == signal.SIGTERM else KeyboardInterrupt)(
            f"stopped after step {steps} of {train.steps}, saved in {checkpoints}; resume=true continues from there"
        )
    return watch.summary(steps)


def release_memory() -> None:
    """What nobody holds any more goes back to the device; the Trainer and its callbacks hold each other."""
    gc.collect()
    torch.cuda.empty_cache()


class _Arguments(TrainingArguments):
    """One device a process, its current one: the Trainer would otherwise spread over every visible GPU by DataParallel."""

    @property
    def n_gpu(self) -> int:
        return min(super().n_gpu, 1)

    @property
    def device(self) -> torch.device:
        own = super().device  # the first GPU, for a process that trains alone among others
        return torch.device("cuda", torch.cuda.current_device()) if own.type == "cuda" else own


def _arguments(train: TrainConfig, checkpoints: Path, device: torch.device, seed: int, shard: str | None) -> _Arguments:
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
        seed=seed,
        use_cpu=not on_gpu,
        train_sampling_strategy="sequential",  # the order is _Order's
        dataloader_num_workers=train.num_workers,
        dataloader_pin_memory=on_gpu,
        # Shared-out gradients are summed at every micro-batch: kept whole until the last, they would fill each GPU.
        accelerator_config={"non_blocking": on_gpu, "gradient_accumulation_kwargs": {"sync_each_batch": shard is not None}},
        fsdp=shard is not None,  # pyright: ignore[reportArgumentType]
        fsdp_config={"transformer_layer_cls_to_wrap": [shard], "state_dict_type": "SHARDED_STATE_DICT"} if shard else None,
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


def _begin_worker(seed_worker: Callable[[int], None] | None, worker: int) -> None:
    """Leave the process group: Ctrl-C and torchrun send signals to all of it, and who trains still needs its workers."""
    os.setpgrp()
    if seed_worker is not None:
        seed_worker(worker)


class _Trainer(Trainer):
    """Takes the loss from the module's output and saves the module whole, tied weights once."""

    watch: TrainingCallback

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

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        loader.worker_init_fn = partial(_begin_worker, loader.worker_init_fn)
        return loader

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with handle_write_errors(Path(cast(str, self.args.output_dir), f"checkpoint-{self.state.global_step}")):
            super()._save_checkpoint(model, trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.args.should_save and not self.is_fsdp_enabled:  # FSDP's shards are saved beside the optimizer's
            target = Path(output_dir or cast(str, self.args.output_dir))
            target.mkdir(parents=True, exist_ok=True)
            save_model(cast(nn.Module, self.model), str(target / WEIGHTS))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        return load_weights(cast(nn.Module, self.model), Path(resume_from_checkpoint))
