"""The function that vLLM calls in each of its processes (entry point ``vllm.general_plugins``),
which registers the backend.
"""

import logging
from typing import Any, cast

NAME = "MSATTN"
OUTSIDE = "CUSTOM"  # what vLLM before 0.32 calls the one backend from outside that it can have
OLDEST, NEWEST = (0, 24), (0, 32)  # versions of vLLM; its interfaces differ between minor versions

_log = logging.getLogger(__name__)


def register() -> None:
    """Registers the attention backend; in another version of vLLM, it logs one line and registers
    nothing.
    """
    from vllm.version import __version__, __version_tuple__

    if not OLDEST <= tuple(__version_tuple__[:2]) <= NEWEST:
        needed = " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))
        _log.warning(
            "msattn: needs vLLM %s, %s is installed; there is no backend %s",
            needed,
            __version__,
            NAME,
        )
        return
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    package = __name__.rpartition(".")[0]
    path, name = f"{package}.backend.Backend", backend_name()
    if name == OUTSIDE:
        register_backend(AttentionBackendEnum.CUSTOM, path)
    elif name not in AttentionBackendEnum.__members__:  # vLLM may load plugins several times
        cast(Any, AttentionBackendEnum).register(name, _Path(path))
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{package}.cpu.Backend")


def backend_name() -> str:
    """Returns the name by which the installed vLLM knows the backend: ``MSATTN``, before 0.32
    ``CUSTOM``.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return NAME if hasattr(AttentionBackendEnum, "register") else OUTSIDE


class _Path(str):
    """The path of the backend, by which vLLM pickles it.

    A process that vLLM spawns reads its configuration before it loads plugins; reading the path
    registers the backend.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _registered, (str(self),)


def _registered(path: str) -> str:
    register()
    return path
