"""Methods of vLLM's worker class that msattn wraps, because vLLM has no hook for them."""

from collections.abc import Callable
from functools import partial, wraps
from pkgutil import resolve_name
from typing import Any


def wrap_method(config: Any, name: str, around: Callable[..., Any]) -> None:
    """Lets ``around`` run instead of a method of the class of an engine's workers, with the bound
    method, the worker and the arguments; does nothing if it is wrapped already.
    """
    worker_class = resolve_name(config.parallel_config.worker_cls)
    method = getattr(worker_class, name)
    if hasattr(method, "msattn"):
        return

    @wraps(method)
    def wrapped(worker: Any, *arguments: Any) -> Any:
        return around(partial(method, worker), worker, *arguments)

    wrapped.msattn = True  # type: ignore[attr-defined]
    setattr(worker_class, name, wrapped)
