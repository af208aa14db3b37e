"""The rank of this process under ``torchrun``, from its environment alone."""

import os


def is_main_rank() -> bool:
    """Returns True in the one process that prints and writes."""
    return os.environ.get("RANK", "0") == "0"


def num_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
