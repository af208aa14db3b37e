"""Replacement of methods of a model inside a context. A copy of the model would keep them, so
copying raises UserError.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from msattn.trainer.errors import UserError


def refuse_copy() -> NoReturn:
    """Raises UserError for a copy of an attached model."""
    raise UserError(
        "model: it is attached, so it cannot be copied or pickled; leave the context (or call "
        "disable) first"
    )


class NotCopied:
    """Base of the objects whose methods are hooks: copying or pickling an attached model raises
    UserError.
    """

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_copy()


@contextmanager
def replaced(
    module: nn.Module, method: Callable[..., Any], *, name: str = "forward"
) -> Iterator[None]:
    """Replaces the method ``name`` of one module inside the context; a copy, which would keep it,
    raises UserError.
    """
    new, attributes = {name: method, "__getstate__": refuse_copy}, vars(module)
    before = {key: attributes[key] for key in new if key in attributes}
    attributes.update(new)
    try:
        yield
    finally:
        for key in new:  # the collector may end contexts of one module in any order
            attributes.pop(key, None)
        attributes.update(before)
