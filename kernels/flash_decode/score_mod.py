"""Built-in score modifications; see :class:`msattn.kernels.types.ScoreMod`.

    softcap(t)          t * tanh(s / t)
    alibi(slopes)       s + slopes[h] * (j - i)
    sliding_window(w)   s where j > i - w, else -inf

Each has a Triton function of tiles, and a PyTorch function for the reference. The schema of a
custom operator cannot hold functions: built-in modifications are passed to it by name, and
:func:`built_in` restores them.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from msattn.kernels.common.primitives import tl, triton
from msattn.kernels.common.softcap import softcap_mod
from msattn.kernels.types import ScoreMod


def softcap(limit: float) -> ScoreMod:
    """Returns a soft cap of scores: ``limit * tanh(score / limit)``.

    Gemma 2 uses it (arXiv 2408.00118). Scores stay within ``(-limit, limit)``.

    Raises
    ------
    ValueError
        If ``limit`` is not positive and finite.
    """
    if not 0 < limit < math.inf:
        raise ValueError(f"limit={limit!r}: expected a positive, finite number")
    return softcap_mod(limit)


def alibi(slopes: Tensor) -> ScoreMod:
    """Returns ALiBi: ``score + slopes[h] * (j - i)`` (arXiv 2108.12409).

    Parameters
    ----------
    slopes : Tensor fp32 ``[Hq]``
        One slope per query head, on the device of q.

    Raises
    ------
    ValueError
        If ``slopes`` is not an fp32 vector.
    """
    if slopes.dtype != torch.float32 or slopes.dim() != 1:
        raise ValueError(
            f"slopes is {slopes.dtype} {tuple(slopes.shape)}: expected float32 [query heads]"
        )
    return ScoreMod(_alibi_kernel, _alibi, tensors=(slopes.contiguous(),), built_in="alibi")


def sliding_window(width: int) -> ScoreMod:
    """Returns a sliding window: query i sees only keys ``j > i - width``.

    Keys before the windows of all queries are not read.

    Raises
    ------
    ValueError
        If ``width`` is not an integer of at least 1.
    """
    if width < 1 or width != int(width):
        raise ValueError(f"width={width!r}: expected an integer of at least 1")
    return ScoreMod(
        _window_kernel, _window, numbers=(int(width),), window=int(width), built_in="sliding_window"
    )


def built_in(name: str, tensors: Sequence[Tensor], numbers: Sequence[float]) -> ScoreMod | None:
    """Restores the modification of that name from its tensors and numbers; "" is none."""
    constructors: dict[str, Callable[..., ScoreMod]] = {
        "softcap": softcap,
        "alibi": alibi,
        "sliding_window": sliding_window,
    }
    return constructors[name](*tensors, *numbers) if name else None


@triton.jit
def _alibi_kernel(score, b, h, i, j, slopes_ptr):
    return score + tl.load(slopes_ptr + h) * (j - i).to(tl.float32)


def _alibi(score, b, h, i, j, slopes):
    return score + slopes[h].to(score.dtype) * (j - i)


@triton.jit
def _window_kernel(score, b, h, i, j, width):
    return tl.where(j > i - width, score, float("-inf"))


def _window(score, b, h, i, j, width):
    return score.masked_fill(j <= i - width, -math.inf)
