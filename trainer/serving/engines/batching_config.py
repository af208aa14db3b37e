"""The configuration of transformers' continuous batching, and the version that it needs."""

from typing import TYPE_CHECKING, Any

import torch
import transformers

from msattn.trainer.errors import UserError

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig

TRANSFORMERS_NEEDED = (5, 23)  # earlier versions page their cache in another way
# default share of the free memory: buckets and pooled keys need room next to the cache
CACHE_SHARE_OF_MEMORY = 0.8
PAGE_SIZE = 256


def check_version(caller: str) -> None:
    """Raises UserError, which names the ``caller``, if transformers is too old."""
    installed, needed = transformers.__version__, ".".join(map(str, TRANSFORMERS_NEEDED))
    if tuple(map(int, installed.split(".")[:2])) < TRANSFORMERS_NEEDED:
        raise UserError(
            f"{caller}: needs transformers {needed} or newer, {installed} is installed; pip "
            f"install -U 'transformers>={needed}'"
        )


def batching_config(**options: Any) -> "ContinuousBatchingConfig":
    """Returns the configuration for an attached model, in which ``options`` replace values."""
    check_version("generate_batch")
    from transformers import ContinuousBatchingConfig

    own: dict[str, Any] = {"page_size": PAGE_SIZE, "auto_switch_to_flash": False}
    if torch.cuda.is_available():
        own |= {"max_memory_percent": CACHE_SHARE_OF_MEMORY, "use_cuda_graph": (False, True)}
    return ContinuousBatchingConfig(**{**own, **options})
