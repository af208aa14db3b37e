"""The schema of ``server.*``: limits and memory of ``msattn serve``."""

from dataclasses import dataclass, field

from msattn.trainer.config.values import check, within


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Memory of the KV cache, and limits of requests.

    Attributes
    ----------
    page_size : tokens of a page of the cache.
    pages : pages of the cache; None stands for what memory holds on a GPU, and for eight of the longest requests on a CPU.
    batch_tokens : tokens that one pass of the model computes at most; longer prompts take several passes.
    max_length : tokens of a request, prompt and answer together; None stands for the model's positions.
    max_running : requests that one pass of the model computes at most.
    max_waiting : requests without a first token; a further one is refused.
    max_body_mb : size of a request's body in megabytes.
    drain_s : seconds that running requests have to finish after Ctrl-C or SIGTERM.
    """

    page_size: int = field(default=256, metadata=within("[16, 4096]"))
    pages: int | None = field(default=None, metadata=within("[1, 1e9]"))
    batch_tokens: int | None = field(default=None, metadata=within("[1, 1e6]"))
    max_length: int | None = field(default=None, metadata=within("[2, 1e9]"))
    max_running: int = field(default=256, metadata=within("[1, 1e5]"))
    max_waiting: int = field(default=1024, metadata=within("[1, 1e6]"))
    max_body_mb: float = field(default=16.0, metadata=within("(0, 1024]"))
    drain_s: float = field(default=30.0, metadata=within("[0, 3600]"))

    def __post_init__(self) -> None:
        check(self, "server.")
