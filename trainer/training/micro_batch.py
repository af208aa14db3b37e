"""``train.micro_batch_size=auto``: the number of items of a forward pass."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import Dataset

from msattn.trainer.config import TrainConfig
from msattn.trainer.config.train import AUTO
from msattn.trainer.memory import release_memory

# More tokens make a pass no faster: they fill a GPU, and far fewer already fill a CPU.
TOKENS = {"cuda": 2**16, "cpu": 2**11}
STATE_BYTES = 8  # for each trained weight, in the optimizer
DDP_BYTES = 4  # for each trained weight, in the gradient buckets of several ranks
MARGIN = 0.05  # share of the GPU's memory, for fragmentation


def resolve(
    train: TrainConfig,
    module: nn.Module,
    dataset: "Dataset[Any]",
    collate: Callable[[list[Any]], dict[str, Any]],
    device: torch.device,
    ranks: int,
    *,
    sharded: bool,
) -> TrainConfig:
    """Returns ``train`` with a number in place of ``auto``, the same on all ranks. Every rank must
    call it.

    The number divides a rank's items, and a pass has at most :data:`TOKENS` ``input_ids``. On a GPU
    a forward and backward pass is tried; if memory is too small, the next smaller number is tried.
    Items without ``input_ids`` are batches of queries and run one by one, as do the items of
    ``sharded`` modules, which do not fit whole.
    """
    if train.micro_batch_size != AUTO:
        return train
    tokens = tokens_of(dataset)
    most = 1 if tokens is None or sharded else max(1, TOKENS[device.type] // tokens)
    share = train.batch_size // ranks
    sizes = [size for size in range(min(most, share), 1, -1) if share % size == 0]
    if not sizes:
        return replace(train, micro_batch_size=1)
    on_gpu = device.type == "cuda"
    size = next(
        (
            size
            for size in sizes
            if not on_gpu or _fits(module, dataset, collate, device, size, ranks)
        ),
        1,
    )
    return replace(train, micro_batch_size=min(gather_object([size])))


def tokens_of(dataset: "Dataset[Any]") -> int | None:
    """Returns the number of tokens of the first item, or None if items have no tokens."""
    size: Any = len(dataset)  # pyrefly: ignore[bad-argument-type]
    first = dataset[0] if size else None
    return first["input_ids"].numel() if isinstance(first, dict) and "input_ids" in first else None


def _fits(
    module: nn.Module,
    dataset: "Dataset[Any]",
    collate: Callable[[list[Any]], dict[str, Any]],
    device: torch.device,
    size: int,
    ranks: int,
) -> bool:
    """Returns True if the passes of ``size`` items fit into memory next to the optimizer's state;
    leaves no gradient behind.
    """
    total: Any = len(dataset)  # pyrefly: ignore[bad-argument-type]
    items = collate([dataset[index % total] for index in range(size)])
    batch = {name: value.to(device) for name, value in items.items()}
    weights = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
    later = (
        weights * (STATE_BYTES + DDP_BYTES * (ranks > 1))
        + MARGIN * torch.cuda.get_device_properties(device).total_memory
    )
    module.train()
    try:
        with torch.random.fork_rng([device]):
            reserved = torch.empty(int(later), dtype=torch.uint8, device=device)
            module(**batch)["loss"].backward()
        torch.cuda.synchronize(device)
        del reserved
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        module.zero_grad(set_to_none=True)
        release_memory()
