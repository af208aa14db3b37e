"""Work that the processes of a ``torchrun`` share out: meeting the others, and training alone among them."""

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from datetime import timedelta

import torch
from accelerate.state import AcceleratorState, PartialState

PATIENCE = timedelta(days=7)  # one process may have hours more work than another; torchrun ends all when one is lost
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def join(device: torch.device) -> PartialState:
    """This process among those of its ``torchrun``, or on its own: ``num_processes``, ``process_index``, ``wait_for_everyone``.

    They meet over NCCL where ``device`` is a GPU, else over gloo.
    """
    return PartialState(cpu=device.type == "cpu", timeout=PATIENCE)


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Within it, this process trains by itself whatever the others do: its own layers, checkpoints and figures.

    transformers and accelerate learn of the others from torchrun's variables and from accelerate's state: both are put
    aside. What other processes than the first print is dropped, as it would mix with the first one's lines.
    """
    first = os.environ.get("RANK", "0") == "0"
    logger = logging.getLogger("transformers.training_args")  # warns of a process group that the Trainer is not to use
    level = logger.level
    hidden = {name: os.environ.pop(name) for name in VARIABLES if name in os.environ}
    AcceleratorState._reset_state(reset_partial_state=True)
    with ExitStack() as stack:
        if not first:
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
            os.environ.update(hidden)
            AcceleratorState._reset_state(reset_partial_state=True)
            join(device)
