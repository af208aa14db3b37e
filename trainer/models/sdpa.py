"""Selection of the SDPA backend for the dense baseline of measurements."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SDPA_BACKENDS = {"cuda": {"cuDNN": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}, "cpu": {"SDPA": None}}


class BackendUnavailable(RuntimeError):
    """A baseline cannot run on this machine; the message gives the reason."""


@contextmanager
def use_backend(kernel: str | None) -> Iterator[None]:
    """Restricts SDPA to the backend ``kernel``, a value of :data:`SDPA_BACKENDS`; None leaves the choice to PyTorch.

    Raises
    ------
    BackendUnavailable : the body ran out of device memory, or PyTorch has no such backend for its inputs.
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
        raise BackendUnavailable("PyTorch has no such SDPA backend for this device and these inputs") from error
