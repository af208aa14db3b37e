"""Timing of phases without device synchronization, of the tokens of ``generate``, and of dense
baselines by backend, and of a pass on the CPU.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.generation.streamers import BaseStreamer

from msattn.trainer.models.families import text_config
from msattn.trainer.models.predictions import token_scores
from msattn.trainer.models.tap import run_backbone
from msattn.trainer.progress import activity, duration

SDPA_BACKENDS = {
    "cuda": {"cuDNN": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"},
    "cpu": {"SDPA": None},
}

# a pass over this many tokens and more may take minutes: one over a part of them says how many
LONG = 8192
PART = 16
SCORED = 256  # tokens whose predictions are timed


def seconds_of_pass(
    model: Any, tokens: int, run: Callable[[Any, Tensor], Any] = run_backbone
) -> float | None:
    """Returns how long a pass over a chunk takes on this machine's CPU; None on another device.

    ``run`` gets the model and ids ``[1, tokens]``; by default it is a dense pass.
    """
    if model.device.type != "cpu":
        return None
    ids = torch.arange(tokens)[None] % model.config.get_text_config().vocab_size

    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        run(model, ids[:, :tokens])
        return time.perf_counter() - began

    what = f"measuring the speed of this machine with {tokens:,} tokens"
    with torch.no_grad():
        with activity(what):
            run_backbone(model, ids[:, :16])  # prepares libraries
            least = PART * seconds(tokens // PART) if tokens >= LONG else 0
        with activity(f"{what}, at least {duration(least)}" if least else what):
            return seconds(tokens)


def seconds_of_scores(model: Any) -> float:
    """Returns how long this machine's CPU takes to compare the prediction of a token with that of
    dense attention; with a large vocabulary that may be longer than its part of a pass.
    """
    hidden = torch.zeros(1, SCORED, text_config(model.config).hidden_size, dtype=model.dtype)
    ids = torch.arange(SCORED)
    with activity("measuring the speed of this machine"), torch.no_grad():
        began = time.perf_counter()
        token_scores(model, hidden, ids, hidden)
        return (time.perf_counter() - began) / SCORED


class TokenClock(BaseStreamer):
    """Streamer that records the host time of the prompt and of each new token of ``generate``, also
    for batches.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Records the time; the first call is for the prompt."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Does nothing."""


class PhaseTimer:
    """Accumulates the time of each phase, with CUDA events on a GPU and the host clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._intervals: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Adds the time of the block to ``phase``."""
        begin = self._now()
        yield
        self._intervals.setdefault(phase, []).append((begin, self._now()))

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, phase: str) -> float | None:
        """Returns the total seconds of ``phase``, or None if it never ran. Synchronizes with the
        device.
        """
        intervals = self._intervals.get(phase)
        if intervals is None:
            return None
        if self.device.type != "cuda":
            return sum(end - begin for begin, end in intervals)
        torch.cuda.synchronize(self.device)
        return sum(begin.elapsed_time(end) for begin, end in intervals) / 1e3


class BackendUnavailable(RuntimeError):
    """Raised if a baseline cannot run on this machine; the message gives the reason."""


@contextmanager
def use_backend(kernel: str | None) -> Iterator[None]:
    """Restricts SDPA to the backend ``kernel``, a value of :data:`SDPA_BACKENDS`; None leaves the
    choice to PyTorch.

    Raises BackendUnavailable if device memory is too small, or PyTorch has no such backend for the
    inputs.
    """
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
        raise BackendUnavailable(
            "PyTorch has no such SDPA backend for this device and these inputs"
        ) from error
