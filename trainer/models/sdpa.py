"""PyTorch's dense attention by one of its fast kernels alone: what sparse attention is measured against."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SDPA_BACKENDS = {"cuda": {"cuDNN": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}, "cpu": {"SDPA": None}}


class BackendUnavailable(RuntimeError):
    """A measurement cannot be taken here; the message says why."""


@contextmanager
def use_backend(kernel: str | None) -> Iterator[None]:
    """Meanwhile SDPA runs on ``kernel`` (a value of :data:`SDPA_BACKENDS`; None leaves the choice to PyTorch).

    Raises
    ------
    BackendUnavailable : the device's memory does not hold what ran within, or PyTorch has no such kernel for it.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    try:
        if kernel is None:
            yield
        else:
            with sdpa_kernel(getattr(SDPBackend, kernel)):
                yield
    except torch.OutOfMemoryError as error:
        raise BackendUnavailable("out of memory") from error
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        raise BackendUnavailable("PyTorch has no such attention here") from error
