"""The size of the paged KV cache, and the configuration of transformers' continuous batching."""

import math
from typing import TYPE_CHECKING, Any

from msattn.trainer.config.commands import ServerLimits
from msattn.trainer.errors import UserError
from msattn.trainer.memory import free_memory
from msattn.trainer.models.families import head_dim, max_length, num_kv_heads, num_layers
from msattn.trainer.serving.attend import CACHE_SHARE_OF_MEMORY

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig, PreTrainedConfig, PreTrainedModel

    from msattn.trainer.serving.attend import Sparse

BATCH_TOKENS, BATCH_TOKENS_ON_CPU = 8192, 512
REQUESTS_ON_CPU = 8  # a CPU's cache has room for so many requests of the greatest length


def check_limits(config: "PreTrainedConfig", cfg: ServerLimits) -> None:
    """Raises UserError if the longest request exceeds ``server.pages`` or the positions of a model
    with this ``config``.
    """
    longest = longest_request(config, cfg)
    if cfg.pages is not None and cfg.pages < (needed := pages_of(longest, cfg)):
        raise UserError(
            f"server.pages={cfg.pages}: a request of {longest} tokens takes {needed} pages of "
            f"{cfg.page_size} tokens; "
            "raise it, or lower server.max_length"
        )


def longest_request(config: "PreTrainedConfig", cfg: ServerLimits) -> int:
    """Returns the tokens of the longest request that is accepted, prompt and answer together."""
    positions = max_length(config)
    if cfg.max_length is not None and cfg.max_length > positions:
        raise UserError(
            f"server.max_length={cfg.max_length}: the model has positions for {positions} tokens; "
            f"lower it, or extend the "
            "context with model.rope_scaling={rope_type: yarn, factor: ...}"
        )
    return cfg.max_length or positions


def paged_cache_config(
    model: "PreTrainedModel", cfg: ServerLimits, sparse: "Sparse | None"
) -> "ContinuousBatchingConfig":
    """Returns the configuration of a manager for ``model``.

    Batching is synchronous: with asynchronous batching, transformers 5.23 fails for all requests if
    one is cancelled in the pass that completes one of its pages. Raises UserError if the cache of
    the longest request does not fit into memory, and like :func:`check_limits`.
    """
    from transformers import ContinuousBatchingConfig

    check_limits(model.config, cfg)
    pages, is_gpu = cfg.pages, model.device.type == "cuda"
    needed = pages_of(longest_request(model.config, cfg), cfg)
    if pages is None and not is_gpu:
        free = free_memory() // 2
        pages = min(REQUESTS_ON_CPU * needed, free // _bytes_of_page(model, cfg))
        if pages < needed:
            raise too_small(model, cfg, free)
    create = ContinuousBatchingConfig if sparse is None else sparse.batching_config
    return create(
        page_size=cfg.page_size,
        num_blocks=pages,
        max_batch_tokens=cfg.batch_tokens or (BATCH_TOKENS if is_gpu else BATCH_TOKENS_ON_CPU),
        max_requests_per_batch=cfg.max_running,
        max_blocks_per_request=needed,
        max_memory_percent=CACHE_SHARE_OF_MEMORY if is_gpu else None,
        use_async_batching=False,
    )


def pages_of(tokens: int, cfg: ServerLimits) -> int:
    """Returns the pages that a request takes at most; the manager allots them in groups, so one
    more than its tokens fill.
    """
    return math.ceil(tokens / cfg.page_size) + 1


def too_small(model: "PreTrainedModel", cfg: ServerLimits, free: int) -> UserError:
    """Returns the error for a cache that cannot hold the longest request in ``free`` bytes."""
    longest, size = longest_request(model.config, cfg), _bytes_of_page(model, cfg)
    fits = max(0, free // size - 1) * cfg.page_size
    return UserError(
        f"the KV cache of one request of {longest} tokens takes "
        f"{pages_of(longest, cfg) * size / 1e9:.2f} GB, and "
        f"{free / 1e9:.2f} GB are free for it; lower server.max_length"
        + (f" to {fits} or less" if fits else "")
    )


def _bytes_of_page(model: "PreTrainedModel", cfg: ServerLimits) -> int:
    config: Any = model.config
    numbers = 2 * num_layers(config) * num_kv_heads(config) * head_dim(config)
    return numbers * model.dtype.itemsize * cfg.page_size
