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

# With more tokens a pass is not faster: a GPU is busy, and a CPU is from far fewer on.
TOKENS = {"cuda": 2**16, "cpu": 2**11}
STATE_BYTES = 8  # of a trained weight in the optimizer
DDP_BYTES = 4  # of a trained weight in the buckets of several ranks' gradients
MARGIN = 0.05  # of the GPU's memory, for fragments


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
    """Returns ``train`` with a number in place of ``auto``, the same on all ranks, each of which must call this.

    It divides the items of a rank, and their ``input_ids`` are at most :data:`TOKENS` together. On a GPU a forward and backward
    pass is tried, and the next smaller number taken if memory is too small. Items without ``input_ids``, which are batches of
    queries, and those of ``sharded`` modules, which do not fit whole, run one by one.
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
    size = next((size for size in sizes if not on_gpu or _fits(module, dataset, collate, device, size, ranks)), 1)
    return replace(train, micro_batch_size=min(gather_object([size])))


def tokens_of(dataset: "Dataset[Any]") -> int | None:
    """Returns the tokens of the first item, or None if items have none."""
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
    """Returns True if ``size`` items pass forward and backward beside the optimizer's state; leaves no gradient behind."""
    total: Any = len(dataset)  # pyrefly: ignore[bad-argument-type]
    items = collate([dataset[index % total] for index in range(size)])
    batch = {name: value.to(device) for name, value in items.items()}
    weights = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
    later = weights * (STATE_BYTES + DDP_BYTES * (ranks > 1)) + MARGIN * torch.cuda.get_device_properties(device).total_memory
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
