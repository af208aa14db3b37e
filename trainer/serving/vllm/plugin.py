"""The function that vLLM calls in each of its processes (entry point ``vllm.general_plugins``), which registers the backend."""

import logging
from typing import Any

NAME = "MSATTN"
SUPPORTED = (0, 32)  # version of vLLM; its interfaces differ between minor versions

_log = logging.getLogger(__name__)


def register() -> None:
    """Registers the attention backend ``MSATTN``; in another version of vLLM, it logs one line and registers nothing."""
    from vllm.version import __version__, __version_tuple__

    if tuple(__version_tuple__[:2]) != SUPPORTED:
        needed = ".".join(map(str, SUPPORTED))
        _log.warning("msattn: needs vLLM %s, %s is installed; there is no backend %s", needed, __version__, NAME)
        return
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    package = __name__.rpartition(".")[0]
    if NAME not in AttentionBackendEnum.__members__:  # vLLM may load plugins several times
        AttentionBackendEnum.register(NAME, _Path(f"{package}.backend.Backend"))
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{package}.cpu.Backend")


class _Path(str):
    """The path of the backend, by which vLLM pickles it.

    A process that vLLM spawns reads its configuration before it loads plugins; reading the path registers the backend.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _registered, (str(self),)


def _registered(path: str) -> str:
    register()
    return path
